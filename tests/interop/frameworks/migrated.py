"""Arguments of Megatron-LM's as configs, for tests."""

from __future__ import annotations

from pathlib import Path

from stretto.run.config.schema import TrainConfig
from stretto_interop.commands.migrate import run_script
from stretto_interop.frameworks.mapping import Start
from stretto_interop.frameworks.megatron.framework import MEGATRON
from stretto_interop.frameworks.migrate import Migration, migrate

SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
RUN = "--vocab-size 500 --lr 1e-3 --train-iters 100 --data-path t --micro-batch-size 1 --global-batch-size 8"
ROTARY = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
NONE = "--hidden-dropout 0 --attention-dropout 0"


def moved(
    text: str, *arguments: str, devices: int | None = None, overrides: tuple[str, ...] = ()
) -> Migration:
    start = Start(arguments=arguments, devices=devices, wins=True, variables={"HOME": "/home/me"})
    return migrate(MEGATRON, text, "run.sh", start, overrides, name="moved")


def moved_by_run(text: str, *arguments: str) -> Migration:
    """The config of a script that is run, in this folder, with `--run`'s launchers."""
    Path("run.sh").write_text(text)
    return moved(run_script(Path("run.sh"), arguments, {"HOME": "/home/me"}), *arguments)


def arguments_of(more: str) -> Migration:
    return moved(f"{SIZES} {RUN} {NONE} {more}", devices=8)


def config_of(migration: Migration) -> TrainConfig:
    """The config, which is also what its text says."""
    assert migration.config is not None
    return migration.config
