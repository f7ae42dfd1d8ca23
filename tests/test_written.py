"""Files that earlier versions wrote, and this one, are read; those of newer ones are refused by name.

`data/written/write.py` writes the folder of a version.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine
from stretto import __version__
from stretto.engine.checkpoint import manifest
from stretto.errors import StrettoError
from stretto.planner.cutting.profile import read_profile
from stretto.planner.machines.catalogue import find_cluster
from stretto.program import schedule
from stretto.program.text import from_csv, from_json
from stretto.recommender.clicks.index import read_index as read_clicks
from stretto.recommender.config.load import load_config
from stretto.recommender.planner.placement_file import read_placements
from stretto.run.data.token_folder import read_index as read_tokens
from stretto.run.train.metrics import read_lines
from stretto.view.trace import read_trace

WRITTEN = Path(__file__).parent / "data" / "written"
VERSIONS = sorted(path.name for path in WRITTEN.iterdir() if path.is_dir())
ZB_V = schedule("zb-v", ranks=2, microbatches=4)


def read_records(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path))


def read_text(read: Callable[[str], Any]) -> Callable[[Path], Any]:
    return lambda path: read(path.read_text(encoding="utf-8"))


# each file: how it is read, and what is true of its content
FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Any], bool]]] = {
    "config.yaml": (load_config, lambda config: config.model.layers == 4),
    "recommender.yaml": (load_config, lambda config: config.model.dense == 13),
    "plan.yaml": (load_config, lambda config: config.layout.to_layout().world == 8),
    "program.json": (read_text(from_json), lambda program: program == ZB_V),
    "program.csv": (read_text(from_csv), lambda program: program.orders == ZB_V.orders),
    "trace.json": (read_text(read_trace), lambda trace: len(trace.events) == 8),
    "cluster.yaml": (find_cluster, lambda cluster: cluster.devices == 16),
    "layers.json": (
        read_text(lambda text: read_profile(text, "layers")),
        lambda profile: len(profile.layers) == 4,
    ),
    "placement.yaml": (lambda path: read_placements(path, 2), lambda placements: len(placements) == 26),
    "tokens/index.json": (lambda path: read_tokens(path.parent), lambda index: index.tokens == 591),
    "clicks/index.json": (lambda path: read_clicks(path.parent), lambda index: len(index.features) == 2),
    "language/quickstart/metrics.jsonl": (
        read_records,
        lambda records: [r["step"] for r in records] == [1, 2],
    ),
    "recommender/dlrm/eval.jsonl": (read_records, lambda records: records[0]["step"] == 2),
    "language/quickstart/config.yaml": (load_config, lambda config: config.model.hidden == 8),
    "recommender/dlrm/config.yaml": (load_config, lambda config: config.model.bottom == [4, 2]),
}
UNVERSIONED = ("program.csv",)  # torch's format, which has no place for a version


def test_this_version_has_a_folder() -> None:
    assert __version__.rpartition(".")[0] in VERSIONS, "run python tests/data/written/write.py"


@pytest.mark.filterwarnings("ignore::stretto.versions.DeprecatedName")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_a_version_are_read(version: str, name: str) -> None:
    read, holds = FILES[name]
    assert holds(read(WRITTEN / version / name))


@pytest.mark.parametrize("name", [name for name in FILES if name not in UNVERSIONED])
def test_a_file_of_a_newer_version_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree((WRITTEN / VERSIONS[-1] / name).parent, tmp_path / "copy")
    path = folder / Path(name).name
    text = path.read_text(encoding="utf-8")
    mark = next(
        mark for mark in ("version: 1", '"version": 1', '"version":1', '"version": 3') if mark in text
    )
    path.write_text(text.replace(mark, mark[:-1] + "9", 1), encoding="utf-8")
    message = (
        rf"has version 9, written by a newer Stretto; {__version__} reads up to version .\nhint: pip install"
    )
    with pytest.raises(StrettoError, match=message):
        FILES[name][0](path)


@pytest.mark.parametrize("run", ["language/quickstart", "recommender/dlrm"])
@pytest.mark.parametrize("version", VERSIONS)
def test_checkpoints_of_a_version_are_read(stretto: CommandLine, version: str, run: str) -> None:
    checked = stretto.json("checkpoint", "verify", WRITTEN / version / run)
    assert checked["ok"]
    assert checked["checkpoints"][0]["stretto"].startswith(f"{version}.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, "written by a newer Stretto (0.1.0); "),
        (
            {"version": 2, "last_readers": {1: "0.4"}},
            "which Stretto 0.4 was the last to read, written by 0.1.0",
        ),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_and_not_called_damaged(
    stretto: CommandLine, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(manifest, "CHECKPOINT", replace(manifest.CHECKPOINT, **change))
    for command in ("checkpoint verify", "evaluate"):
        printed = stretto.error(*command.split(), WRITTEN / "0.1" / "language" / "quickstart")
        assert "step-00000002/manifest.json: the checkpoint has version 1, " + message in printed
        assert "damaged" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_models_of_a_version_are_evaluated(
    stretto: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.chdir(shutil.copytree(WRITTEN / version, tmp_path / version))
    recorded = json.loads(Path("recommender/dlrm/eval.jsonl").read_text(encoding="utf-8").splitlines()[0])
    evaluated = stretto.json("evaluate", "recommender/dlrm")
    assert evaluated["logloss"] == pytest.approx(recorded["logloss"], rel=1e-5)
    assert stretto.json("generate", "language/quickstart", "--prompt", "line", "--tokens", 2)
