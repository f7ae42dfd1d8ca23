"""Mixtures: which source each sample is of, and runs on several sources."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.run.config import TrainConfig
from stretto.run.config.check import check
from stretto.run.config.section import plain_section
from stretto.run.config.validation import read_section
from stretto.run.data.dataset import samples_of
from stretto.run.data.mixture import (
    BLOCK,
    MixedSamples,
    Mixture,
    MixtureOrder,
    WeightPhase,
    epochs,
)
from stretto.run.train.metrics import read_lines
from texts import describe, open_tokens, read_samples
from tiny_job import LLAMA, job, write_text
from train_runs import at_step, keep_notes, send_self, tensors, train

WEIGHTS = st.lists(st.floats(0.001, 1.0) | st.just(0.0), min_size=1, max_size=5).filter(any)


@given(st.lists(WEIGHTS, min_size=1, max_size=3), st.integers(0, 9), st.data())
@example([[0.7, 0.3]], 0, None)
def test_no_sample_is_lost_or_repeated(weights: list[list[float]], seed: int, data: Any) -> None:
    count = min(map(len, weights))
    weights = [
        weights_of_phase[:count] if any(weights_of_phase[:count]) else [1.0] * count
        for weights_of_phase in weights
    ]
    lengths = [3 * BLOCK // 2 if data is None else data.draw(st.integers(1, 70_000)) for _ in weights]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    phases = [
        WeightPhase(start, tuple(weights_of_phase))
        for start, weights_of_phase in zip(starts, weights, strict=True)
    ]
    order = MixtureOrder(phases, seed)
    total = sum(lengths)
    sources, positions = order(range(total))
    for source in range(count):
        assert (positions[sources == source] == np.arange((sources == source).sum())).all()
    assert order.drawn(total).tolist() == np.bincount(sources, minlength=count).tolist()
    for start, length, weights_of_phase in zip(starts, lengths, weights, strict=True):
        here = np.bincount(sources[start : start + length], minlength=count)
        ideal = length * np.array(weights_of_phase) / sum(weights_of_phase)
        assert np.abs(here - ideal).max() <= count + length / BLOCK, "any run has the weights"
    some = [0, total // 2, total - 1]
    again = MixtureOrder(phases, seed)(some)  # in any order, without what comes before
    assert [part.tolist() for part in again] == [sources[some].tolist(), positions[some].tolist()]


def test_a_million_samples_have_the_weights() -> None:
    weights = (0.62, 0.3, 0.05, 0.02, 0.01)
    drawn = MixtureOrder([WeightPhase(0, weights)], 1).drawn(10**6) / 10**6
    assert np.abs(drawn / weights - 1).max() < 1e-3
    orders = {
        tuple(MixtureOrder([WeightPhase(0, weights)], seed)(range(50))[0].tolist()) for seed in range(20)
    }
    assert len(orders) == 20, "seeds give other orders"


def test_a_weight_that_never_comes_up_is_refused() -> None:
    with pytest.raises(StrettoError, match="less than one sample in 65,536"):
        MixtureOrder([WeightPhase(0, (1.0, 1e-6))], 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    for name, word in (("words", "stream"), ("code", "return"), ("spare", "number")):
        rows = [json.dumps({"text": f"{word} {i * i} of {word}s {i}\n" * 3}) for i in range(150)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


def mixed(folder: Path, *overrides: str, phases: str = "") -> TrainConfig:
    prose, code, spare = (folder / f"{name}.jsonl" for name in ("words", "code", "spare"))
    source = f"data.source={{{prose}: 6, {code}: 2, {spare}: 0}}"
    later = (
        f"data.phases=[{{from_step: 3, weights: {{{spare}: 1, {code}: 1}}}}]" if phases else "data.phases=[]"
    )
    return job(folder, source, later, *overrides, model=LLAMA)


def test_samples_are_those_of_the_sources(folder: Path) -> None:
    config = mixed(folder, phases="later")
    check(config)
    source = open_tokens(config)
    assert isinstance(source, Mixture)
    samples = read_samples(source, config)
    assert isinstance(samples, MixedSamples)
    size, parts = config.batch.global_size, list(samples.parts.values())
    sources, positions = MixtureOrder(
        [WeightPhase(0, (6, 2, 0)), WeightPhase(3 * size, (0, 1, 1))], config.train.seed
    )(range(6 * size))
    batch = samples.batch(range(6 * size))
    for row, (source_index, position) in enumerate(zip(sources.tolist(), positions.tolist(), strict=True)):
        wanted = parts[source_index].batch([position])
        assert torch.equal(batch.inputs[row], wanted.inputs[0])
        assert torch.equal(batch.targets[row], wanted.targets[0])
    assert set(sources[: 3 * size].tolist()) == {0, 1}
    assert set(sources[3 * size :].tolist()) == {1, 2}
    sent = pickle.dumps(source)
    assert len(sent) < 2000  # the tokens are not in it
    packed = replace(config, data=replace(config.data, packing="documents"))
    apart = read_samples(source, packed).batch(range(6 * size))
    assert apart.begins is not None
    for row, (source_index, position) in enumerate(zip(sources.tolist(), positions.tolist(), strict=True)):
        begins = samples_of(
            list(source.streams.values())[source_index], packed.data, "train", config.train.seed
        )
        assert torch.equal(apart.begins[row : row + 1], begins.batch([position]).begins)  # pyright: ignore
    again = read_samples(pickle.loads(sent), config).batch([5])
    assert torch.equal(again.inputs, samples.batch([5]).inputs)
    assert {stream.fingerprint for stream in source.streams.values()} == {source.fingerprint}, (
        "one tokenizer for all"
    )
    shares = [line.split(": ")[1].split(" of ")[0] for line in describe(source, config)]
    assert [line.rpartition(" ")[2] for line in shares] == ["37.5%", "37.5%", "25.0%"]


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_samples_do_not_depend_on_what_is_taken_with_them(folder: Path, packing: str) -> None:
    config = mixed(folder, f"data.packing={packing}", phases="later")
    source = open_tokens(config)
    samples = read_samples(source, config)
    for indices in (range(1015, 1035), range(5, 20), range(12, 9, -1), [5000, 1, 1024, 5000], []):
        together, alone = (
            samples.batch(indices),
            [read_samples(source, config).batch([i]) for i in indices],
        )
        assert len(together.inputs) == len(together.targets) == len(indices)
        for row, sample in enumerate(alone):
            assert torch.equal(together.inputs[row], sample.inputs[0])
            assert torch.equal(together.targets[row], sample.targets[0])
            if together.begins is not None and sample.begins is not None:
                assert torch.equal(together.begins[row], sample.begins[0])


def test_a_run_resumes_bitwise_in_another_layout(folder: Path) -> None:
    reference = mixed(folder, "run.name=whole", "eval.every=3", "train.dtype=float64", phases="later")
    parts = ("run.name=parts", "eval.every=3", "train.dtype=float64")
    assert train(reference)["step"] == 6
    assert train(mixed(folder, *parts, phases="later"), at_step(3, 0, send_self, 15))["step"] == 3
    notes = folder / "notes"
    again = ("checkpoint.resume=auto", "layout.pp=1", "layout.dp=2")
    assert train(mixed(folder, *parts, *again, phases="later"), keep_notes(str(notes)))["step"] == 6
    assert "warning" not in notes.read_text()
    for name, weight in tensors(reference, 6).items():
        torch.testing.assert_close(tensors(mixed(folder, *parts), 6)[name], weight, rtol=1e-9, atol=1e-12)
    rows = list(read_lines(reference.run.folder / "metrics.jsonl"))
    names = list(rows[-1]["epochs"])
    assert [Path(name).stem for name in names] == ["words", "code", "spare"]
    assert rows[2]["epochs"][names[2]] == 0 < rows[5]["epochs"][names[2]]
    assert all(row["epoch"] == max(row["epochs"].values()) for row in rows)
    for row in read_lines(reference.run.folder / "eval.jsonl"):
        assert [Path(name).stem for name in row["sources"]] == ["words", "code"]
        assert row["loss"] == pytest.approx(0.75 * row["sources"][names[0]] + 0.25 * row["sources"][names[1]])


def test_other_weights_of_the_past_are_told(folder: Path) -> None:
    train(mixed(folder, "run.name=past", "train.steps=4"))
    notes = folder / "past"
    again = ("run.name=past", "checkpoint.resume=auto", "train.steps=5")
    config = mixed(folder, *again)
    weights = config.data.weights
    assert weights is not None
    first = next(iter(weights))
    source = {**weights, first: 1.0}
    changed = replace(config, data=replace(config.data, source=source))
    train(changed, keep_notes(str(notes)))
    assert (
        "warning: the mixture's weights of steps that are done (data.phases changes those of later ones)"
        in (notes.read_text())
    )
    later = mixed(folder, *again[:2], "train.steps=6")
    phases = [{"from_step": 5, "weights": {first: 1.0}}]
    data = read_section(type(later.data), {**plain_section(later.data), "source": source, "phases": phases})
    notes.unlink()
    train(replace(later, data=data), keep_notes(str(notes)))
    assert "warning: the mixture" not in notes.read_text()


def test_a_tiny_mixture_sees_a_second_epoch_of_one_source(folder: Path) -> None:
    config = mixed(folder, "run.name=again", "data.split=5,95,0", "train.steps=6")
    source = open_tokens(config)
    samples = read_samples(source, config)
    size = config.batch.global_size
    passes = [epochs(samples, step * size) for step in range(7)]
    notes = folder / "again"
    train(config, keep_notes(str(notes)))
    told = [line.partition(":")[0] for line in notes.read_text().splitlines() if "second epoch" in line]
    wanted = [
        f"step {step + 1} begins a second epoch of {len(part):,} training samples of {name}"
        for step, (before, after) in enumerate(pairwise(passes))
        for name, part in training_parts(samples)
        if before[name] <= 1 < after[name]
    ]
    assert told == wanted
    assert wanted, "the case shows nothing"


def training_parts(samples: Any) -> list[tuple[str, Any]]:
    return list(samples.parts.items())


def test_tokens_of_other_tokenizers_are_refused(folder: Path) -> None:
    from stretto.run.data.build import build

    for name, vocab in (("words", 300), ("code", 310)):
        build(folder / f"{name}.jsonl", folder / f"{name}-{vocab}", vocab=vocab)
    source = f"data.source={{{folder}/words-300: 1, {folder}/code-310: 1}}"
    with pytest.raises(
        StrettoError, match=r"tokens of different tokenizers: those of .*words-300 and of .*code-310"
    ):
        open_tokens(job(folder, source, model=LLAMA))


def test_text_beside_tokens_takes_their_tokenizer(folder: Path) -> None:
    from stretto.run.data.build import build

    tokens = build(folder / "words.jsonl", folder / "ready", vocab=290)
    config = job(folder, f"data.source={{{folder}/ready: 1, {folder}/code.jsonl: 1}}", model=LLAMA)
    source = open_tokens(config)
    assert (source.fingerprint, source.vocab) == (tokens.fingerprint, tokens.vocab)
    alone = samples_of(list(source.streams.values())[1], config.data, "train", 0)
    assert len(alone) > 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.source={a: -1, b: 1}",), "data.source is a: -1: a weight is 0 or more"),
        (("data.source={README.md: 0}",), "one weight must be above 0"),
        (("data.phases=[{from_step: 2, weights: {a: 1}}]",), "data.source is no mixture"),
        (
            ("data.source={README.md: 1}", "data.phases=[{from_step: 2, weights: {README: 1}}]"),
            "data.phases.0.weights is README: it is no source of the mixture",
        ),
        (
            (
                "data.source={README.md: 1}",
                "data.phases=[{from_step: 4, weights: {README.md: 1}}, {from_step: 4, weights: {}}]",
            ),
            "data.phases.1.from_step is 4: the phase before it begins at step 4",
        ),
    ],
)
def test_what_is_wrong_with_a_mixture_is_told_first(
    folder: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(StrettoError) as told:
        check(job(folder, *overrides, model=LLAMA))
    assert message in told.value.message


def test_other_held_out_text_of_the_past_is_told(tmp_path: Path) -> None:
    named, notes = tmp_path / "named", tmp_path / "notes"
    named.mkdir()
    for seed, name in enumerate(("train.txt", "valid.txt")):
        write_text(named / name, seed=seed)
    fields = (f"data.source={named}", "run.name=named", "layout.pp=1", "checkpoint.resume=auto")
    told = "warning: data.split or the names of files, and with them the held-out text,"
    for split, steps in (("90,8,2", 1), ("null", 2), ("null", 3)):
        train(job(tmp_path, *fields, f"data.split={split}", f"train.steps={steps}"), keep_notes(str(notes)))
        assert (told in notes.read_text()) == (steps == 2)
        notes.unlink()
