"""Windows with spans cut out: lengths, what is cut, and the ids that stand for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_data_indexed import make
from tokenizers import models

from stretto.engine.models.language import IGNORED
from stretto.errors import Problem, StrettoError
from stretto.run.config.check import find_problems
from stretto.run.config.data import DataConfig
from stretto.run.config.denoising import Corruption, Denoising, denoising
from stretto.run.config.load import parse
from stretto.run.config.schema import TrainConfig
from stretto.run.data.boundaries import Boundaries
from stretto.run.data.dataset import Batch, WindowSamples
from stretto.run.data.denoising import DenoisedSamples, corrupt
from stretto.run.data.mixture import Mixture, epochs, parts_of
from stretto.run.data.sentinels import SentinelIds, job_of_text, sentinel_ids
from stretto.run.data.token_folder import TokenFolder, TokenWriter
from stretto.run.data.tokenizer import Tokenizer
from texts import read_held_out, read_samples

END, START, TOP = 1, 2, 10_000  # tokens of text are between


class Counting:
    """Window k holds 1000 k + 3, + 4, ...: no token twice."""

    def __init__(self, window: int) -> None:
        self.window = window

    def batch(self, indices: Sequence[int]) -> Batch:
        firsts = torch.tensor([1000 * index + 3 for index in indices]).reshape(-1, 1)
        return Batch(inputs=firsts + torch.arange(self.window), targets=torch.zeros(0))


def denoised(lengths: Denoising, *, seed: int = 0, more: int = 0) -> DenoisedSamples[Counting]:
    top = 10**9
    same = lengths.corruption == "infilling"
    spans = (top,) * lengths.spans if same else tuple(top - i for i in range(lengths.spans))
    marks = SentinelIds(spans=spans, end=END, start=START)
    return DenoisedSamples(
        Counting(lengths.window), lengths=lengths, sentinels=marks, seed=seed, targets=lengths.targets + more
    )


def between(tokens: Sequence[int], marks: Sequence[int]) -> list[list[int]]:
    """What lies before the first of the marks, between them and after the last, each of which is there once
    and in order.
    """
    at = [[*tokens].index(mark) for mark in marks]
    assert at == sorted(at)
    edges = [-1, *at, len(tokens)]
    return [[*tokens[a + 1 : b]] for a, b in pairwise(edges)]


def test_the_example_of_the_papers() -> None:
    """Figure 2 of Raffel et al. 2020, and the same spans as BART leaves them."""
    text = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week"]
    ids = np.arange(len(text))[None]
    names = [*text, "<X>", "<Y>", "<mask>"]

    def example(corruption: Corruption, marks: list[str]) -> list[str]:
        parts = corrupt(
            corruption,
            ids,
            before=np.array([[2, 6]]),
            spans=np.array([[2, 1]]),
            marks=np.array([names.index(name) for name in marks]),
        )
        return [" ".join(names[id_] for id_ in part[0]) for part in parts]

    assert example("span-corruption", ["<X>", "<Y>"]) == [
        "Thank you <X> me to your party <Y> week",
        "<X> for inviting <Y> last",
    ]
    assert example("infilling", ["<mask>"] * 2) == [
        "Thank you <mask> me to your party <mask> week",
        " ".join(text),
    ]
    inserted, _ = corrupt(
        "infilling",
        ids,
        before=np.array([[0, 10]]),
        spans=np.array([[0, 0]]),
        marks=np.array([12, 12]),
    )
    assert inserted[0].tolist() == [12, *range(10), 12], "an empty span inserts a mask"


@pytest.mark.parametrize(
    ("sequence", "expected"),
    # the first two as T5's random_spans_helper gives them; the others counted by hand
    [(512, (568, 85, 28, 114)), (1024, (1137, 171, 57, 229)), (3, (2, 1, 1, 3)), (10, (10, 2, 1, 4))],
)
def test_lengths_of_span_corruption(sequence: int, expected: tuple[int, int, int, int]) -> None:
    found = denoising("span-corruption", sequence, 0.15, 3.0)
    assert (found.window, found.noise, found.spans, found.targets) == expected
    assert found.inputs == sequence


SIZES = (st.integers(3, 90), st.floats(0.02, 0.6), st.floats(1.0, 6.0), st.integers(0, 10**6))


def lengths_or_skip(corruption: Corruption, sequence: int, density: float, mean: float) -> Denoising:
    """The lengths, unless there are more spans than kept tokens."""
    try:
        return denoising(corruption, sequence, density, mean)
    except Problem:
        assume(density * (1 + 1 / mean) < 0.9 and sequence > 20)
        raise


@given(*SIZES)
@settings(deadline=None)
def test_every_token_is_in_the_input_or_in_the_targets(
    sequence: int, density: float, mean: float, first: int
) -> None:
    lengths = lengths_or_skip("span-corruption", sequence, density, mean)
    samples = denoised(lengths, more=first % 3)
    batch = samples.batch(range(first, first + 4))
    assert batch.decoder is not None
    assert batch.inputs.shape == (4, sequence)
    assert batch.targets.shape == batch.decoder.shape == (4, lengths.targets + first % 3)
    for row, window in enumerate(Counting(lengths.window).batch(range(first, first + 4)).inputs.tolist()):
        *inputs, last = batch.inputs[row].tolist()
        *targets, end = batch.targets[row, : lengths.targets].tolist()
        assert last == end == END
        assert batch.targets[row, lengths.targets :].eq(IGNORED).all()
        assert batch.decoder[row, : lengths.targets].tolist() == [START, *targets]
        visible, spans = between(inputs, samples.sentinels.spans), between(targets, samples.sentinels.spans)
        assert not visible.pop()  # a window ends with a span
        assert not spans.pop(0)  # targets begin with a sentinel
        assert all(visible)
        assert all(spans)
        assert sum(map(len, spans)) == lengths.noise
        assert [
            token for pair in zip(visible, spans, strict=True) for part in pair for token in part
        ] == window


@given(*SIZES)
@settings(deadline=None)
def test_infilling_leaves_a_mask_for_each_span(
    sequence: int, density: float, mean: float, first: int
) -> None:
    lengths = lengths_or_skip("infilling", sequence, density, mean)
    samples = denoised(lengths)
    batch = samples.batch([first])
    (window,) = Counting(lengths.window).batch([first]).inputs.tolist()
    assert batch.targets[0].tolist() == [*window, END]
    assert batch.decoder is not None
    assert batch.decoder[0].tolist() == [START, *window]
    *inputs, last = batch.inputs[0].tolist()
    mask = samples.sentinels.spans[0]
    assert (len(inputs) + 1, last) == (sequence, END)
    assert inputs.count(mask) == lengths.spans
    visible = [token for token in inputs if token != mask]
    assert visible == sorted(set(visible) & set(window))
    assert len(visible) == lengths.window - lengths.noise
    assert all(a != mask or b != mask for a, b in pairwise(inputs)), "spans do not touch"


@pytest.mark.parametrize("corruption", ["span-corruption", "infilling"])
def test_a_sample_depends_on_its_number_and_the_seed_alone(corruption: Corruption) -> None:
    lengths = denoising(corruption, 64, 0.2, 3.0)
    together = denoised(lengths).batch(range(40, 60))
    for row, index in enumerate(range(40, 60)):
        alone = denoised(lengths).batch([index])
        assert torch.equal(alone.inputs[0], together.inputs[row])
        assert torch.equal(alone.targets[0], together.targets[row])
    relative = together.inputs - 1000 * torch.arange(40, 60).unsqueeze(1)
    assert len({tuple(row) for row in relative.tolist()}) == 20, "each sample has spans of its own"
    assert not torch.equal(denoised(lengths, seed=1).batch(range(40, 60)).inputs, together.inputs)


def test_partitions_are_uniform() -> None:
    """Of 6 kept and 4 cut tokens in 2 spans there are 5 x 3 samples, each as likely as the others."""
    lengths = Denoising(corruption="span-corruption", window=10, noise=4, spans=2)
    number = 15_000
    inputs = denoised(lengths).batch(range(number)).inputs - 1000 * torch.arange(number).unsqueeze(1)
    text = inputs.where((inputs >= 3) & (inputs < 13), 0)  # without sentinels and end
    _, counts = torch.unique(text, dim=0, return_counts=True)
    assert len(counts) == comb(5, 1) * comb(3, 1)
    expected = number / 15
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 36.1  # 99.9% of 14 degrees of freedom


def test_lengths_of_infilled_spans_are_poisson() -> None:
    """3,000 spans of mean 3 in one sample: nearly independent."""
    lengths = Denoising(corruption="infilling", window=30_000, noise=9_000, spans=3_000)
    samples = denoised(lengths)
    inputs = samples.batch([0]).inputs[0, :-1]
    at = np.flatnonzero(inputs[1:-1].numpy() == samples.sentinels.spans[0]) + 1
    sizes = (inputs[at + 1] - inputs[at - 1] - 1).numpy()
    assert len(sizes) > 2_990
    for size, expected in ((0, 0.0498), (1, 0.1494), (3, 0.2240), (6, 0.0504)):
        assert abs(float((sizes == size).mean()) - expected) < 0.025
    assert abs(float(sizes.var()) - 3.0) < 0.4


@pytest.mark.parametrize(
    ("sequence", "density", "mean", "field"),
    [(2, 0.15, 3.0, "sequence"), (100, 0.7, 1.0, "noise_density"), (100, 0.95, 3.0, "noise_density")],
)
def test_samples_that_cannot_be_are_refused(sequence: int, density: float, mean: float, field: str) -> None:
    with pytest.raises(Problem) as caught:
        denoising("span-corruption", sequence, density, mean)
    assert caught.value.field == field
    assert caught.value.hint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    numbers = iter(range(1, 1000))
    documents = [[next(numbers) for _ in range(length)] for length in (30, 8, 55, 90, 12)]
    return make(tmp_path_factory.mktemp("denoising") / "t", documents, vocab=1000)


def test_windows_of_a_split_are_denoised(folder: TokenFolder) -> None:
    """Training goes through every window once an epoch, and with other spans in the next; evaluation through
    the same in the order of the stream.
    """
    lengths = denoising("span-corruption", 20, 0.2, 2.0)
    marks = sentinel_ids(folder, DataConfig(), lengths, rows=1100)
    options: dict[str, Any] = {"lengths": lengths, "sentinels": marks, "targets": lengths.targets}
    windows = WindowSamples(folder, "train", lengths.window, 3, ratio="1,0,0")
    samples = DenoisedSamples(windows, **options, seed=3)
    epoch = samples.batch(range(len(windows)))
    again = samples.batch(range(len(windows), 2 * len(windows)))
    text = sorted(folder.tokens[: len(windows) * lengths.window].tolist())
    assert sorted(tokens(epoch, marks)) == sorted(tokens(again, marks)) == text
    assert not torch.equal(epoch.inputs.sort(0)[0], again.inputs.sort(0)[0])
    split = DenoisedSamples(WindowSamples(folder, "all", lengths.window, once=True), **options)
    assert len(split) == folder.size // lengths.window
    read = split.batch(range(len(split) + 2))
    assert read.targets[len(split) :].eq(IGNORED).all()
    assert not read.targets[: len(split)].eq(IGNORED).any()
    first = Batch(inputs=read.inputs[: len(split)], targets=read.targets[: len(split)])
    assert sorted(tokens(first, marks)) == sorted(folder.tokens[: len(split) * lengths.window].tolist())


def tokens(batch: Batch, marks: SentinelIds) -> list[int]:
    """The text of inputs and targets."""
    every = [*batch.inputs[:, :-1].flatten().tolist(), *batch.targets[:, :-1].flatten().tolist()]
    return [token for token in every if token not in marks.spans]


def config(*overrides: str) -> TrainConfig:
    return parse("model: {family: t5, layers: 2, hidden: 32, heads: 2}", "t5.yaml", overrides)


def with_special(path: Path, names: Sequence[str]) -> TokenFolder:
    """A folder whose tokenizer ends with these special tokens."""
    table = {"</s>": 0, **{f"w{i}": i for i in range(1, 10)}}
    inner = tokenizers.Tokenizer(models.WordLevel(table, unk_token="w1"))
    inner.add_special_tokens([*names])
    with TokenWriter(path, Tokenizer(inner, Boundaries(0)), key="", source=["s"]) as writer:
        writer.add([1, 2, 3] * 20, ends=True)
        writer.commit()
    return TokenFolder(path)


def test_marks_are_the_tokenizers_or_the_last_of_the_vocabulary(folder: TokenFolder, tmp_path: Path) -> None:
    spans, mask = denoising("span-corruption", 30, 0.2, 3.0), denoising("infilling", 30, 0.3, 3.0)
    assert (spans.spans, mask.spans) == (2, 4)
    data = DataConfig()
    assert job_of_text(config("model.family=gpt"), folder).shape.vocab == folder.vocab
    assert job_of_text(config(), folder).shape.vocab == folder.vocab + 100
    assert job_of_text(config("data.sentinels=7"), folder).shape.vocab == folder.vocab + 7
    assert job_of_text(config("data.objective=infilling"), folder).shape.vocab == folder.vocab + 1
    assert job_of_text(config("data.first_sentinel=5"), folder).shape.vocab == folder.vocab
    rows = folder.vocab + 2
    assert sentinel_ids(folder, data, spans, rows).spans == (rows - 1, rows - 2)
    assert sentinel_ids(folder, data, mask, rows).spans == (rows - 1,) * 4
    named = sentinel_ids(folder, DataConfig(first_sentinel=77), spans, rows)
    assert (named.spans, named.end, named.start) == ((77, 76), folder.endoftext, folder.endoftext)
    special = with_special(tmp_path / "t5", ["<pad>", "<extra_id_1>", "<extra_id_0>", "<mask>"])
    assert job_of_text(config(), special).shape.vocab == special.vocab == 14
    assert sentinel_ids(special, data, spans, 14) == SentinelIds(spans=(12, 11), end=0, start=10)
    assert sentinel_ids(special, data, mask, 14) == SentinelIds(spans=(13,) * 4, end=0, start=0)


def test_vocabularies_without_room_are_refused(folder: TokenFolder, tmp_path: Path) -> None:
    spans = denoising("span-corruption", 60, 0.2, 3.0)
    with pytest.raises(Problem, match=rf"model\.vocab is {folder.vocab + 3}: .* 3 are left") as caught:
        sentinel_ids(folder, DataConfig(), spans, folder.vocab + 3)
    assert f"model.vocab={folder.vocab + 5}" in (caught.value.hint or "")
    with pytest.raises(Problem, match="first_sentinel is 2"):
        sentinel_ids(folder, DataConfig(first_sentinel=2), spans, 2000)
    with pytest.raises(Problem, match="first_sentinel is 2000"):
        sentinel_ids(folder, DataConfig(first_sentinel=2000), spans, 2000)
    few = with_special(tmp_path / "few", ["<extra_id_1>", "<extra_id_0>"])
    with pytest.raises(StrettoError, match="5 spans, and the tokenizer has 2 sentinels"):
        sentinel_ids(few, DataConfig(), spans, 2000)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.objective=causal"], "data.objective is causal: the model has an encoder"),
        (["model.family=gpt", "data.objective=infilling"], "data.objective is infilling: the model has no"),
        (["model.family=gpt", "data.noise_density=0.2"], "data.noise_density is 0.2: nothing is cut out"),
        (["data.packing=documents"], "data.packing is documents: objective span-corruption cuts spans"),
        (["data.chat=all"], "data.chat is all: objective span-corruption cuts spans"),
        (["data.noise_density=0.9"], "data.noise_density is 0.9: with mean_span_length=3"),
        (["data.sequence=2"], "data.sequence is 2: a sample needs a token"),
        (["data.target_sequence=28"], "data.target_sequence is 28: .* 29 targets"),
    ],
)
def test_objectives_that_do_not_fit_are_refused(overrides: list[str], message: str) -> None:
    problems = [
        str(problem) for problem in find_problems(config(*overrides)) if problem.field != "data.source"
    ]
    assert len(problems) == 1
    assert re.match(message, problems[0])
    assert "hint" in problems[0]


def test_a_run_reads_samples_of_its_objective(folder: TokenFolder) -> None:
    """Training and evaluation, of one source and of a mixture, with lengths that the model is built for."""
    job = config("data.sequence=20", "data.split=3,1,0", "batch.global_size=4", "train.seed=5")
    assert (job.denoising, job.target_sequence) == (denoising("span-corruption", 20, 0.15, 3.0), 5)
    longer = config("data.sequence=20", "data.split=3,1,0", "data.target_sequence=8", "train.seed=5")
    alone, padded = read_samples(folder, job), read_samples(folder, longer)
    batch = alone.batch(range(8))
    assert batch.inputs.shape == (8, 20)
    assert batch.targets.shape == (8, 5)
    assert torch.equal(padded.batch(range(8)).targets[:, :5], batch.targets)
    assert padded.batch(range(8)).targets[:, 5:].eq(IGNORED).all()
    assert epochs(alone, 2 * len(parts_of(alone)[folder.name])) == {folder.name: 2.0}
    mixed = read_samples(Mixture({"a": folder, "b": folder}, {"a": 3.0, "b": 1.0}), job)
    assert mixed.batch(range(8)).decoder is not None
    assert set(epochs(mixed, 8)) == {"a", "b"}
    other = read_samples(folder, config(*OTHER))
    assert not torch.equal(other.batch(range(8)).inputs, batch.inputs)
    (valid,) = read_held_out(folder, job, "valid")
    again = read_held_out(folder, config(*OTHER), "valid")[0].split
    assert torch.equal(valid.split.batch([0]).inputs, again.batch([0]).inputs), "whatever the seed"
    with pytest.raises(StrettoError, match="one sample is made of"):
        read_held_out(folder, config("data.sequence=60", "data.split=3,1,0"), "valid")


OTHER = ("data.sequence=20", "data.split=3,1,0", "train.seed=6")
