"""Writes the files of this version that later ones have to read, into a folder of its name beside this file.

    python tests/data/written/write.py

Run it before a minor version is released, and commit the folder: `tests/test_written.py` reads those of all
versions. The folder of a released version never changes; it is removed with the last reader of its files.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from stretto import __version__
from stretto.planner.cutting.profile import profile_json, read_profile
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.describe import save_cluster

FOLDER = Path(__file__).parent / __version__.rpartition(".")[0]
LANGUAGE = (
    "train quickstart model.layers=1 model.hidden=8 model.heads=1 model.positions=8 data.vocab=260 "
    "data.source=text.txt "
    "data.sequence=8 data.cache=cache layout.pp=1 layout.dp=1 batch.global_size=2 batch.micro_size=1 "
    "train.steps=2 train.vocab_multiple=4 eval.every=2 eval.batches=1 optim.name=adamw optim.rate.warmup=0 "
    "checkpoint.every=null metrics.every=1 sample.tokens=1 run.dir=language"
)
RECOMMENDER = (
    "train dlrm model.dense=2 model.bottom=[4,2] model.top=[2,1] data.source=clicks layout.ranks=1 "
    "batch.global_size=8 train.steps=2 eval.every=2 eval.batches=1 checkpoint.every=null metrics.every=1 "
    "run.dir=recommender"
)
COMMANDS = (
    "init quickstart --out config.yaml",
    "init dlrm --out recommender.yaml",
    "schedule zb-v --ranks 2 --microbatches 4 --write program.json",
    "schedule zb-v --ranks 2 --microbatches 4 --write program.csv",
    "schedule 1f1b --ranks 2 --microbatches 2 --trace trace.json",
    "plan --model gpt2-124m --cluster h100:8 --batch 32 --write plan.yaml",
    "plan recommender.yaml --cluster h100:2 --write placement.yaml",
    "data build text.txt --out tokens --vocab 260",
    "data synth-clicks --out clicks --samples 64 --dense 2 --features 2 --rows 4:8",
    LANGUAGE,
    RECOMMENDER,
)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(40)))
        for command in COMMANDS:
            print("stretto", command, flush=True)
            argv = [sys.executable, "-c", "from stretto.cli.main import main; main()", *command.split()]
            subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        layers = read_profile(json.dumps([{"forward_s": 0.01, "backward_s": 0.02}] * 4), "layers")
        (folder / "layers.json").write_text(json.dumps(profile_json(layers), indent=1) + "\n")
        save_cluster(find_cluster("h100:16"), folder / "cluster.yaml")
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(folder, FOLDER, ignore=shutil.ignore_patterns("cache", "text.txt"))


if __name__ == "__main__":
    main()
