from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_data_indexed import make

from stretto.engine.models.language import IGNORED
from stretto.errors import StrettoError
from stretto.run.data.dataset import WindowSamples
from stretto.run.data.permutation import Permutation
from stretto.run.data.token_folder import TokenFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """1000 documents of 10 tokens: 10 000 tokens, of which each says its place (modulo 997)."""
    documents = [[(10 * d + i) % 997 + 1 for i in range(9)] for d in range(1000)]
    return make(tmp_path_factory.mktemp("d") / "t", documents)


def test_an_epoch_predicts_every_token_once(folder: TokenFolder):
    samples = WindowSamples(folder, "train", 33, seed=3)
    assert samples.range == range(9490)
    assert len(samples) == (9490 - 1) // 33
    stream = folder.tokens[samples.range.start : samples.range.stop]
    places = sorted(samples.starts(range(len(samples))).tolist())
    assert places == list(range(0, len(samples) * 33, 33))
    for k in (0, 5, len(samples) - 1):
        start = int(samples.starts([k])[0])
        batch = samples.batch([k])
        assert [*batch.inputs[0], batch.targets[0, -1]] == stream[start : start + 34].tolist()


def test_targets_are_the_inputs_one_on(folder: TokenFolder):
    samples = WindowSamples(folder, "valid", 16, seed=1)
    batch = samples.batch([4, 0, 100_000])
    inputs, targets = batch.inputs, batch.targets
    assert batch.begins is None
    assert inputs.shape == targets.shape == (3, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for row, start in enumerate(samples.starts([4, 0, 100_000]).tolist()):
        sample = folder.tokens[start : start + 17].tolist()
        assert sample == [*inputs[row].tolist(), int(targets[row, -1])]
    assert not torch.equal(inputs[0], inputs[1])


def test_each_epoch_has_an_order_of_its_own(folder: TokenFolder):
    samples = WindowSamples(folder, "train", 100, seed=0)
    n = len(samples)
    epochs = [tuple(samples.starts(range(e * n, (e + 1) * n)).tolist()) for e in range(5)]
    assert len(set(epochs)) == 5
    assert len({tuple(sorted(e)) for e in epochs}) == 1
    # a batch that reaches over the end of an epoch
    assert samples.starts(range(n - 3, n + 3)).tolist() == [*epochs[0][-3:], *epochs[1][:3]]
    assert tuple(WindowSamples(folder, "train", 100, seed=1).starts(range(n)).tolist()) not in epochs
    assert tuple(WindowSamples(folder, "train", 100, seed=0).starts(range(n)).tolist()) == epochs[0]


def test_without_shuffling_the_stream_comes_in_order(folder: TokenFolder):
    samples = WindowSamples(folder, "valid", 10, shuffle=False)
    n = len(samples)
    assert samples.starts(range(2 * n)).tolist() == [samples.range.start + 10 * (k % n) for k in range(2 * n)]


def test_splits_do_not_share_tokens(folder: TokenFolder):
    seen = [WindowSamples(folder, name, 5, ratio="8,1,1").range for name in ("train", "valid", "test")]
    assert [i for part in seen for i in part] == list(range(10_000))


def test_a_split_shorter_than_a_sample(folder: TokenFolder):
    WindowSamples(folder, "test", 9)
    with pytest.raises(
        StrettoError, match=r"test split .* 10 tokens of 10000.* sequence 10 needs 11"
    ) as caught:
        WindowSamples(folder, "test", 10)
    assert "use sequence 9 or less" in (caught.value.hint or "")
    with pytest.raises(StrettoError, match="0 tokens") as caught:
        WindowSamples(folder, "test", 1, ratio="1,1,0")
    assert "larger share" in (caught.value.hint or "")
    assert "use sequence" not in (caught.value.hint or "")


def test_a_corpus_shorter_than_one_sequence(tmp_path: Path):
    folder = make(tmp_path / "t", [[1, 2, 3]])
    with pytest.raises(StrettoError, match="sequence 128 needs 129"):
        WindowSamples(folder, "train", 128)


def test_wrong_names_and_lengths(folder: TokenFolder):
    with pytest.raises(StrettoError, match=r"'vald'.*\n.*did you mean valid"):
        WindowSamples(folder, "vald", 8)
    with pytest.raises(StrettoError, match="sequence 0"):
        WindowSamples(folder, "train", 0)
    with pytest.raises(StrettoError, match="'1,2'"):
        WindowSamples(folder, "train", 8, ratio="1,2")


@pytest.mark.parametrize(("split", "sequence"), [("valid", 33), ("test", 9), ("test", 200), ("all", 64)])
def test_a_whole_split_has_every_token_once(folder: TokenFolder, split: str, sequence: int) -> None:
    samples = WindowSamples(folder, split, sequence, once=True)
    batch = samples.batch(range(len(samples) + 3))
    inputs, targets = batch.inputs, batch.targets
    counted = targets != IGNORED
    stream = folder.tokens[samples.range.start : samples.range.stop].astype("int64")
    assert targets[counted].tolist() == stream[1:].tolist()
    assert inputs[counted].tolist() == stream[:-1].tolist()
    assert (inputs[~counted] == folder.index.endoftext).all()
    assert counted[: len(samples)].any(1).all()
    assert not counted[len(samples) :].any()
    some = samples.targets(2)
    assert folder.tokens[some.start : some.stop].tolist() == targets[:2][counted[:2]].tolist()


def test_a_split_without_a_token_to_predict(folder: TokenFolder) -> None:
    with pytest.raises(StrettoError, match=r"the test split \(data.split=9,1,0\) of the 10000 tokens"):
        WindowSamples(folder, "test", 8, ratio="9,1,0", once=True)
    with pytest.raises(StrettoError, match="allowed are train, valid, test, all"):
        WindowSamples(folder, "tset", 8, once=True)


def test_samples_are_shuffled_within_windows(tmp_path: Path) -> None:
    source = make(tmp_path, [list(range(1, 200))] * 40)
    unlimited = WindowSamples(source, "train", 2, seed=3)
    near = WindowSamples(source, "train", 2, seed=3, within=1 << 10)
    assert (unlimited.block, near.block) == (0, 8)
    for epoch in range(2):
        order = near.positions(range(epoch * len(near), (epoch + 1) * len(near)))
        assert sorted(order.tolist()) == list(range(len(near)))
        first = order[: 64 * 8]
        assert len({*(first // 8).tolist()}) == 64, "64 runs of 8 samples, wherever they lie"
    assert near.positions([5]).tolist() == [int(near.positions(range(10))[5])]
    assert WindowSamples(source, "train", 2, seed=3).positions(range(9)).tolist() == [
        int(p) for p in Permutation(len(unlimited), 3)(range(9))
    ], "without a window the order is what it was"
