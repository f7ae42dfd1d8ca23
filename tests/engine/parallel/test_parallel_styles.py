"""Shares of a module's parameters: pure arithmetic, so held to its laws over many sizes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fake_mesh import FakeMesh
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.engine.parallel.styles import (
    ColumnParallel,
    HeadParallel,
    ParameterShard,
    Replicate,
    RowParallel,
    ShardRange,
    SplitDropout,
    VocabParallel,
    VocabParallelLoss,
    empty_shard,
    padded,
)
from stretto.engine.parallel.tensor.dropout import DropoutKeys, KeyedDropout
from stretto.engine.parallel.tensor.linear import GatherLinear, ParallelLinear, ScatterLinear
from stretto.errors import StrettoError

often = settings(deadline=None, max_examples=60)  # the first use of the meta device is slow
degrees = st.sampled_from([1, 2, 3, 4, 8])


def linear(rows: int, columns: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias, device="meta")


def owned(parts: list[ParameterShard]) -> list[int]:
    """Every owned index, as often as it is owned."""
    return sorted(
        i for p in parts for run in p.runs if run.owned for i in range(run.start, run.start + run.size)
    )


@often
@given(tp=degrees, units=st.integers(1, 5), columns=st.integers(1, 3), bias=st.booleans())
def test_column_shares_rows_once_in_equal_parts(tp, units, columns, bias):
    rows = tp * units
    shares = [ColumnParallel().parts("up", linear(rows, columns, bias), i, tp) for i in range(tp)]
    for leaf in ["weight", "bias"] if bias else ["weight"]:
        parts = [share[leaf] for share in shares]
        assert owned(parts) == list(range(rows))
        assert {p.size for p in parts} == {units}
        assert {p.dim for p in parts} == {0}
    assert set(shares[0]) == ({"weight", "bias"} if bias else {"weight"})


@st.composite
def attention(draw):
    """(tp, heads, kv_heads, head size) that fit."""
    tp = draw(degrees)
    kv = draw(
        st.one_of(
            st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0]), st.just(tp).map(lambda t: 2 * t)
        )
    )
    unit = tp * kv // torch.gcd(torch.tensor(tp), torch.tensor(kv)).item()
    return tp, unit * draw(st.integers(1, 2)), kv, draw(st.integers(1, 3))


@often
@given(attention())
def test_fused_heads_are_shared_by_whole_heads_and_keys_copied_where_they_are_few(sizes):
    tp, heads, kv, d = sizes
    module = linear((heads + 2 * kv) * d, 3)
    style = ColumnParallel(segments=((heads, d), (kv, d), (kv, d)))
    parts = [style.parts("qkv", module, i, tp)["weight"] for i in range(tp)]

    assert owned(parts) == list(range((heads + 2 * kv) * d))
    assert {p.size for p in parts} == {(heads // tp + 2 * max(1, kv // tp)) * d}
    for index, part in enumerate(parts):
        q, k, v = part.runs
        assert (q.start, q.size, q.copies) == (index * heads // tp * d, heads // tp * d, 1)
        assert k.start % d == 0
        assert v.start - k.start == kv * d
        first = q.start // d  # the key head that this rank's first query head reads
        assert k.start == (heads + first // (heads // kv)) * d
        last = first + heads // tp - 1
        assert k.start + k.size == (heads + last // (heads // kv) + 1) * d
    copies = Counter((run.start, run.size) for p in parts for run in p.runs)
    for part in parts:
        for run in part.runs:
            assert (
                copies[run.start, run.size]
                == run.copies
                == (max(1, tp // kv) if run is not part.runs[0] else 1)
            )


@often
@given(tp=degrees, units=st.integers(1, 5), rows=st.integers(1, 3))
def test_row_shares_columns_once_and_copies_the_bias(tp, units, rows):
    shares = [RowParallel().parts("down", linear(rows, tp * units), i, tp) for i in range(tp)]
    weights = [share["weight"] for share in shares]
    assert owned(weights) == list(range(tp * units))
    assert {(w.dim, w.size) for w in weights} == {(1, units)}
    assert {share["bias"] for share in shares} == {ParameterShard(dim=None)}


@often
@given(size=st.integers(1, 200), tp=degrees, multiple=st.sampled_from([1, 2, 8, 64]))
def test_vocabulary_shares_are_equal_padded_and_as_small_as_can_be(size, tp, multiple):
    parts = [padded(size, i, tp, multiple) for i in range(tp)]
    assert owned(parts) == list(range(size))
    (step,) = {p.size for p in parts}
    assert step % multiple == 0
    assert (step - multiple) * tp < size <= step * tp
    for index, part in enumerate(parts):  # local row r is vocabulary row index * step + r
        assert [run.start for run in part.runs] == [index * step][: len(part.runs)]
        assert part.padding == step - sum(run.size for run in part.runs)


@often
@given(size=st.integers(1, 50), tp=degrees, multiple=st.sampled_from([1, 4]))
def test_the_loss_knows_which_columns_of_the_logits_are_real(size, tp, multiple):
    for index in range(tp):
        part = VocabParallel(multiple).parts("out", linear(size, 2, bias=False), index, tp)["weight"]
        loss = VocabParallelLoss(size, multiple).replace_module(nn.Identity(), FakeMesh(tp, index))
        assert loss.real == sum(run.size for run in part.runs)
        assert loss.start == index * part.size
    table = nn.Embedding(size, 2, device="meta")
    assert VocabParallel(multiple).parts("tok", table, tp - 1, tp) == {"weight": part}


def test_replicate_holds_everything_everywhere():
    norm = nn.LayerNorm(4)
    assert Replicate().parts("norm", norm, 1, 2) == {
        "weight": ParameterShard(dim=None),
        "bias": ParameterShard(dim=None),
    }
    assert Replicate().replace_module(norm, FakeMesh(2)) is norm


@pytest.mark.parametrize(
    ("style", "module", "tp", "phrases"),
    [
        (ColumnParallel(), linear(6, 2), 4, ("m: size 6", "tp=4", "[1, 2, 3, 6]")),
        (RowParallel(), linear(2, 9), 2, ("m: size 9", "tp=2", "[1, 3, 9]")),
        (ColumnParallel(segments=((2, 2), (1, 2))), linear(8, 2), 2, ("m: segments", "8 output features")),
        (ColumnParallel(segments=((3, 2),)), linear(6, 2), 2, ("m: size 3", "tp=2")),
        (ColumnParallel(), nn.LayerNorm(4), 2, ("m is LayerNorm", "nn.Linear")),
        (RowParallel(), nn.Embedding(4, 2), 2, ("m is Embedding", "nn.Linear")),
        (VocabParallel(), nn.LayerNorm(4), 2, ("m is LayerNorm", "nn.Embedding or nn.Linear")),
        (VocabParallel(), nn.Embedding(4, 2, padding_idx=0), 2, ("m has padding_idx=0", "Replicate")),
        (VocabParallel(), nn.Embedding(4, 2, max_norm=1.0), 2, ("m has max_norm=1.0", "Replicate")),
        (HeadParallel(), nn.LayerNorm(4), 2, ("m (LayerNorm)", "kv_heads")),
    ],
)
def test_a_style_that_does_not_fit_names_the_module(style, module, tp, phrases):
    with pytest.raises(StrettoError) as error:
        style.parts("m", module, 0, tp)
    for word in phrases:
        assert word in str(error.value)


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "local"), [(8, 8, 2, (4, 4)), (8, 2, 4, (2, 1)), (4, 4, 1, (4, 4))]
)
def test_heads_become_local_numbers(heads, kv, tp, local):
    module = Attention(heads, kv)
    assert HeadParallel().parts("attn", module, 0, tp) == {}
    assert HeadParallel().replace_module(module, FakeMesh(tp)) is module
    assert (module.heads, module.kv_heads) == local


def test_sinks_are_split_like_query_heads():
    module = Attention(8, 2)
    module.sinks = nn.Parameter(torch.zeros(8))
    parts = [HeadParallel().parts("attn", module, index, 4) for index in range(4)]
    assert parts == [{"sinks": ParameterShard(dim=0, runs=(ShardRange(2 * index, 2),))} for index in range(4)]


def test_query_heads_are_never_copied():
    with pytest.raises(StrettoError, match=r"attn\.heads: size 2 does not divide over tp=4"):
        HeadParallel().parts("attn", Attention(2, 2), 0, 4)


def test_dropout_of_a_split_activation_takes_its_slice():
    keyed = KeyedDropout(0.5, "a.drop", DropoutKeys(0)).eval()
    split = SplitDropout(heads=(1, 8)).replace_module(keyed, FakeMesh(4, 3))
    (cut,) = split.cuts
    assert (split.p, split.name, cut.dim, cut.size, cut.indices.tolist()) == (0.5, "a.drop", 1, 8, [6, 7])
    assert not split.training
    identity = nn.Identity()
    assert SplitDropout(heads=(1, 8)).replace_module(identity, FakeMesh(4, 3)) is identity
    with pytest.raises(StrettoError, match="key_dropout"):
        SplitDropout(heads=(1, 8)).replace_module(nn.Dropout(0.1), FakeMesh(2))


def test_shrink_gives_the_local_shape_and_type():
    full = torch.zeros(4, 6, dtype=torch.float64)
    assert empty_shard(full, ParameterShard(dim=None)).shape == (4, 6)
    local = empty_shard(full, ParameterShard(dim=1, runs=(ShardRange(0, 2),), padding=1))
    assert local.shape == (4, 3)
    assert local.dtype == torch.float64
    assert empty_shard(full.to("meta"), ParameterShard(dim=0, runs=(ShardRange(0, 2),))).is_meta


class TwoRanks(FakeMesh):
    """With a group to hand out."""

    def group(self, axes: str) -> str | None:
        return "the tp ranks" if axes == "tp" else None


def test_layers_along_the_sequence_gather_and_scatter_where_there_are_ranks_to():
    for style, kind in (
        (ColumnParallel(sequence=True), GatherLinear),
        (ColumnParallel(sequence=True, ordered=False), GatherLinear),
        (VocabParallel(sequence=True), GatherLinear),
        (RowParallel(sequence=True), ScatterLinear),
        (RowParallel(sequence=True, ordered=False), ScatterLinear),
    ):
        split = style.replace_module(nn.Linear(4, 2), TwoRanks(2))
        assert type(split) is kind
        assert split.group == "the tp ranks"
        assert split.ordered == getattr(style, "ordered", True)
        assert type(style.replace_module(nn.Linear(4, 2), FakeMesh(1))) is ParallelLinear
    table = VocabParallel(sequence=True).replace_module(nn.Embedding(4, 2), TwoRanks(2))
    assert table.sequence
    assert not VocabParallel().replace_module(nn.Embedding(4, 2), TwoRanks(2)).sequence


def test_row_parallel_biases_get_partial_gradients_under_sequence_parallelism():
    parts = RowParallel(sequence=True).parts("m", nn.Linear(4, 2), 1, 2)
    assert parts == {
        "weight": ParameterShard(dim=1, runs=(ShardRange(2, 2),)),
        "bias": ParameterShard(dim=None, partial=True),
    }
    assert not RowParallel().parts("m", nn.Linear(4, 2), 1, 2)["bias"].partial
    norm = Replicate(sequence=True).parts("m", nn.LayerNorm(4), 1, 2)
    assert norm == {
        "weight": ParameterShard(dim=None, partial=True),
        "bias": ParameterShard(dim=None, partial=True),
    }
