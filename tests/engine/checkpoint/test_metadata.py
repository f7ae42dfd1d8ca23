"""A run's metadata is read as it was written, or refused by every reader: forged counts, sizes and ranks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from run_checkpoints import JOB, META, SHAPE, forge, run_checkpoint
from stretto.cli import main
from stretto.engine.checkpoint.files import DamageError, dump_json
from stretto.engine.checkpoint.index import SavedTensor
from stretto.engine.checkpoint.manifest import load_manifest, problems, quick_problems
from stretto.engine.checkpoint.metadata import index_problem, metadata_problem
from stretto.engine.checkpoint.read import StoredTensors, shape_of
from stretto.errors import StrettoError
from stretto.job.parameters import parameter_shapes
from stretto.job.presets import PRESETS, preset
from stretto.job.shape import shape_from_record, shape_to_record
from stretto.run.train.checkpointing import restored_progress
from stretto.run.train.resume import read_meta

COUNTS = ("step", "samples", "tokens")
HOSTILE: list[Any] = [
    0,
    -1,
    1,
    7,
    1.5,
    10**9,
    2**63,
    10**400,
    True,
    None,
    "",
    "x",
    "1" * 5000,
    [],
    {},
    [None],
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_checkpoint(tmp_path_factory.mktemp("run") / "checkpoints")


@pytest.fixture
def checkpoint(written: Path) -> Iterator[Path]:
    before = (written / "manifest.json").read_bytes()
    yield written
    (written / "manifest.json").write_bytes(before)


def test_a_run_is_read_as_it_was_written(checkpoint: Path) -> None:
    assert problems(checkpoint) == quick_problems(checkpoint) == []
    assert read_meta(checkpoint, COUNTS) == META
    assert shape_of(checkpoint, META) == SHAPE


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_of_every_model_come_back(name: str) -> None:
    record = shape_to_record(preset(name))
    assert metadata_problem({"model": record}, 0, 1) is None
    assert shape_from_record(record) == preset(name)


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "few samples": (
        {"samples": 7},
        "samples is 7 at step 80, but steps of 4 from 164 at step 40 add up to 324",
    ),
    "another step": ({"step": 79}, "its step is 79, but the checkpoint is of step 80"),
    "a later start": ({"counted_from": {"step": 81, "samples": 328}}, "samples is 324 at step 80"),
    "more targets than tokens": (
        {"targets": 2561},
        "targets is 2561, more than the 2560 possible at step 80",
    ),
    "more updates than samples": ({"updates": 321}, "updates is 321"),
    "skipped in no order": ({"skipped": [[160, 164], [4, 8]]}, "invalid range of skipped samples, 4 to 8"),
    "skipped that never came": ({"skipped": [[4, 400]]}, "invalid range of skipped samples, 4 to 400 of 324"),
    "another seed": ({"seed": 2}, "its seed is 2, but 1 in its config"),
    "no number": ({"tokens": 48.0}, "tokens is 48.0: Input should be a valid integer"),
    "a truth": ({"updates": True}, "updates is True"),
    "below zero": ({"tokens": -1}, "tokens is -1"),
    "a word": ({"loss": "low"}, "loss is 'low'"),
    "a billion layers": (
        {"model": {**META["model"], "layers": 10**9}},
        "model.layers is 1000000000: it must",
    ),
    "other layers": ({"model": {**META["model"], "layers": 3}}, "model.blocks.2.norm1.weight is missing"),
    "fewer layers": (
        {"model": {**META["model"], "layers": 1}},
        "it has more blocks than model.layers=1",
    ),
    "another width": ({"model": {**META["model"], "ffn": 16}}, "but the model's has shape"),
    "an unknown size": ({"model": {**META["model"], "depth": 2}}, "model.depth is 2"),
    "another kind of size": ({"model": {**META["model"], "tied": 0}}, "model.tied is 0"),
    "a wrong pair": ({"history": [[1.5]]}, "history.0"),
    "no mixture": ({"text": {"mixture": [1]}}, "text.mixture.0"),
    "no scale": ({"loss_scale": {"value": 0.0, "good": 0, "skipped": 0}}, "loss_scale.value"),
}


@pytest.mark.parametrize("which", FORGED)
def test_forged_metadata_is_refused_at_once(
    checkpoint: Path, which: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changes, about = FORGED[which]
    forge(checkpoint, meta=META | changes)
    began = time.monotonic()
    assert about in problems(checkpoint)[0]
    assert main.run(["checkpoint", "verify", str(checkpoint)]) == 1
    assert about in capsys.readouterr().out
    assert main.run(["checkpoint", "export", str(checkpoint), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    with pytest.raises(StrettoError):
        StoredTensors(checkpoint)
    if not about.startswith(("but the", "model.blocks", "it has")):  # which compare tensors
        assert quick_problems(checkpoint)
        with pytest.raises(StrettoError, match=r"is damaged: file manifest\.json: "):
            read_meta(checkpoint, COUNTS)
    assert time.monotonic() - began < 10


def test_ranks_that_wrote_nothing_are_missed(checkpoint: Path) -> None:
    forge(checkpoint, world=3)
    assert "its layout has 2 ranks, but 3 wrote it" in problems(checkpoint)[0]
    forge(checkpoint, world=3, meta=META | {"config": {}})
    assert "but 3 ranks wrote the checkpoint" in problems(checkpoint)[0]
    forge(checkpoint, world=1, meta=META | {"config": {}})
    assert "but 1 ranks wrote the checkpoint" in problems(checkpoint)[0]


def test_since_when_samples_are_counted() -> None:
    assert restored_progress(META, 4)["counted_from"] == {"step": 40, "samples": 164}
    assert restored_progress(META, 8)["counted_from"] == {"step": 80, "samples": 324}
    older = {name: value for name, value in META.items() if name != "counted_from"}
    assert restored_progress(older, 4)["counted_from"] == {"step": 80, "samples": 324}
    imported = older | {"config": {"optim": {"name": "adamw"}}}
    assert restored_progress(imported, 4)["counted_from"] == {"step": 80, "samples": 324}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every mapping or list, with a key of it."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


PLACES = len(list(_places({**META, "config": {"optim": {}, "batch": {"global_size": 4}}})))
READ_AGAIN: dict[str, Callable[[dict[str, Any]], object]] = {
    "step": lambda meta: meta["step"],
    "samples": lambda meta: meta["samples"],
    "parameters": lambda meta: parameter_shapes(shape_from_record(meta["model"])),
}


INDEX_OF_SHAPE = {
    f"model.{name}": SavedTensor("float32", sizes, ()) for name, sizes in parameter_shapes(SHAPE).items()
}


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, PLACES - 1), value=st.sampled_from([..., *HOSTILE]))
def test_a_single_change_is_refused_or_harms_nothing(place: int, value: Any) -> None:
    meta = copy.deepcopy({**META, "config": {"optim": {}, "batch": {"global_size": 4}}})
    holder, key = list(_places(meta))[place]
    if value is ...:
        del holder[key]
    else:
        holder[key] = value
    try:
        dump_json(meta)
    except ValueError:
        return  # not JSON, of which no reader gets this far
    if not isinstance(meta.get("model"), dict):
        return  # which every reader refuses
    if metadata_problem(meta, 80, 2) is not None or index_problem(meta, 2, INDEX_OF_SHAPE) is not None:
        return
    for name, read in READ_AGAIN.items():
        try:
            now = read(meta)
        except (KeyError, TypeError, StrettoError):
            continue  # which readers refuse
        assert now == read(META), name
    for first, last in meta.get("skipped", []):
        assert 0 <= first < last <= 324
    if {"step", "samples"} <= meta.keys():  # otherwise readers refuse it, or the run begins anew
        restored_progress(meta, 4)


def test_metadata_of_other_programs_is_left_alone(checkpoint: Path) -> None:
    for meta in ({}, {"step": "seven", "model": "mine"}, {"samples": -1}):
        forge(checkpoint, meta=meta)
        assert problems(checkpoint) == []
        with pytest.raises(StrettoError, match="does not say what model it is of"):
            read_meta(checkpoint, COUNTS)
    with pytest.raises(StrettoError, match="has no model sizes in its metadata"):
        shape_of(checkpoint, {})


def test_what_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="metadata of the checkpoint: samples is 7 at step 80"):
        run_save(tmp_path, META | {"samples": 7, "config": {"batch": {"global_size": 4}}})
    assert not list(tmp_path.glob("step-*"))


def run_save(folder: Path, meta: dict[str, Any]) -> Path:
    from stretto.engine.checkpoint.save import save

    return save(folder, 80, {}, meta)


def test_a_shape_has_bounds() -> None:
    for name in ("layers", "hidden", "heads", "vocab", "sequence"):
        with pytest.raises(StrettoError, match=rf"{name} is {2**60}: it must be at most"):
            replace(SHAPE, **{name: 2**60})
    with pytest.raises(StrettoError, match="experts is"):
        preset_with_experts(2**31)
    assert JOB.shape() == SHAPE


def preset_with_experts(count: int) -> object:
    shape = preset("mixtral-8x7b")
    assert shape.moe is not None
    return replace(shape, moe=replace(shape.moe, experts=count))


def test_a_damaged_manifest_is_one_error(checkpoint: Path) -> None:
    forge(checkpoint, meta=META | {"model": {**META["model"], "attention": {"nosuch": 1}}})
    with pytest.raises(DamageError, match=r"file manifest.json: model\."):
        load_manifest(checkpoint)
