"""Windows of a stream whose documents are kept apart: where each begins, and which tokens are predicted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_indexed import make

from stretto.engine.models.language import IGNORED
from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig
from stretto.run.config.validation import read_section
from stretto.run.data.dataset import Batch, WindowSamples, isolate_documents, samples_of
from stretto.run.data.token_folder import TokenFolder

LENGTHS = (9, 1, 24, 7, 2, 1, 1, 40, 16, 8, 3)  # of a document's tokens, with its end of text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """Each token is one more than that before it."""
    stream, documents = iter(range(1, 1000)), list[list[int]]()
    for length in LENGTHS:
        documents.append([next(stream) for _ in range(length - 1)])
    return make(tmp_path_factory.mktemp("apart") / "t", documents)


def check(folder: TokenFolder, batch: Batch, starts: list[int], sequence: int, end: int) -> None:
    """By the definition, position by position."""
    firsts = set(folder.offsets[:-1].tolist())
    assert batch.begins is not None
    assert batch.begins.shape == batch.targets.shape
    assert batch.begins.dtype == torch.int64
    for row, start in enumerate(starts):
        begin = 0
        for at in range(min(sequence, end - start - 1)):
            begin = at if start + at in firsts else begin
            assert int(batch.begins[row, at]) == begin
            following = start + at + 1
            wanted = IGNORED if following in firsts else int(folder.tokens[following])
            assert int(batch.targets[row, at]) == wanted
            assert int(batch.inputs[row, at]) == int(folder.tokens[start + at])


@given(st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=12)
def test_documents_of_windows(folder: TokenFolder, sequence: int, seed: int) -> None:
    samples = WindowSamples(folder, "train", sequence, seed, ratio="1,0,0", isolate=True)
    indices = range(2 * len(samples))
    check(folder, samples.batch(indices), samples.starts(indices).tolist(), sequence, sum(LENGTHS))
    windows = WindowSamples(folder, "all", sequence, isolate=True, once=True)
    starts = [k * sequence for k in range(len(windows))]
    check(folder, windows.batch(range(len(windows))), starts, sequence, sum(LENGTHS))
    empty = windows.batch([len(windows) + 3])
    assert empty.begins is not None
    assert bool((empty.targets == IGNORED).all())


def test_the_stream_is_as_it_is_with_documents_kept_apart(folder: TokenFolder) -> None:
    """The same windows in the same order; but what follows a document's end has no target."""
    plain, apart = (
        WindowSamples(folder, "train", 13, 4, ratio="1,0,0", isolate=isolate) for isolate in (False, True)
    )
    isolated, joined = apart.batch(range(20)), plain.batch(range(20))
    assert joined.begins is None
    assert torch.equal(isolated.inputs, joined.inputs)
    differ = isolated.targets != joined.targets
    assert bool(differ.any())
    assert bool((isolated.targets[differ] == IGNORED).all())
    assert bool((isolated.inputs[differ] == folder.index.endoftext).all()), (
        "only an end of text has no target"
    )


def test_a_mask_of_tokens_is_kept(folder: TokenFolder) -> None:
    inputs, targets = torch.zeros(1, 12, dtype=torch.int64), torch.arange(12).unsqueeze(0)
    targets[0, 2] = IGNORED
    batch = isolate_documents([folder], [5], Batch(inputs=inputs, targets=targets))
    assert batch.targets.tolist() == [[0, 1, IGNORED, IGNORED, IGNORED, *range(5, 12)]]
    assert batch.begins is not None
    assert batch.begins.tolist() == [[0, 0, 0, 0, 4, *[5] * 7]]


def test_parts_of_a_batch_keep_their_documents(folder: TokenFolder) -> None:
    samples = WindowSamples(folder, "train", 13, ratio="1,0,0", isolate=True)
    full, parts = samples.batch([1, 2, 5]), [samples.batch([1]), samples.batch([2, 5])]
    for again in (Batch.concatenated(parts), full.take([0, 1, 2]), full.take(slice(None))):
        assert again.begins is not None
        assert torch.equal(again.begins, samples.batch([1, 2, 5]).begins)  # pyright: ignore[reportArgumentType]
        assert torch.equal(again.targets, full.targets)


def test_packing_is_chosen_by_name(folder: TokenFolder) -> None:
    def begins(packing: str | None) -> torch.Tensor | None:
        data = read_section(DataConfig, {"packing": packing, "sequence": 13, "split": "1,1,0"})
        batches = [
            samples_of(folder, data, "train", 0).batch([0]),
            samples_of(folder, data, "valid", once=True).batch([0]),
        ]
        assert (batches[0].begins is None) == (batches[1].begins is None)
        return batches[0].begins

    assert begins("documents") is not None
    assert begins("stream") is None
    assert begins("none") is None
    assert begins(None) is None


def test_bytes_are_not_counted_where_only_some_tokens_are_predicted(folder: TokenFolder) -> None:
    assert WindowSamples(folder, "all", 13, isolate=True, once=True).targets(2) is None
    assert WindowSamples(folder, "all", 13, once=True).targets(2) == range(1, 27)


def test_a_packing_that_there_is_none_of() -> None:
    from stretto.run.config.load import parse

    for wrong in ("true", "document"):
        with pytest.raises(StrettoError, match=r"data\.packing") as caught:
            parse("model: {preset: llama-7b}", "job.yaml", (f"data.packing={wrong}",))
        assert "documents" in str(caught.value) + (caught.value.hint or "")
