"""A sharding plan on a plain model: everything accounted for, values kept, every mistake named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from fake_mesh import FakeMesh
from torch import nn

from stretto.engine.models.build import build
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.parallelize import matches, materialise, parallelize
from stretto.engine.parallel.styles import (
    ColumnParallel,
    ParallelStyle,
    ParameterShard,
    Replicate,
    RowParallel,
    ShardRange,
    SplitDropout,
    VocabParallel,
)
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout import Layout

SHAPES = [
    ModelShape(family="gpt", layers=2, hidden=16, heads=4, vocab=37, sequence=8),
    ModelShape(family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=37, sequence=8),
    ModelShape(
        family="llama",
        layers=1,
        hidden=16,
        heads=4,
        kv_heads=1,
        ffn=24,
        vocab=3,
        sequence=8,
        tied=True,
        bias=True,
    ),
]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.down(self.up(self.norm(x)).relu())


PLAN: dict[str, ParallelStyle] = {"": Replicate(), "up": ColumnParallel(), "down": RowParallel()}


@pytest.mark.parametrize(
    ("pattern", "name", "yes"),
    [
        ("blocks.*.up", "blocks.11.up", True),
        ("blocks.*.up", "blocks.1.mlp.up", False),
        ("blocks.*", "blocks.1.up", False),
        ("layer_*.norm?", "layer_x.norm1", True),
        ("*", "", False),
        ("", "", True),
        ("", "up", False),
        ("Up", "up", False),
    ],
)
def test_a_star_in_a_pattern_matches_within_one_part_of_a_name(pattern, name, yes):
    assert matches(pattern, name) is yes


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=["gpt", "grouped", "one-key-head"])
def test_owned_pieces_of_all_ranks_are_the_plain_model_once(shape, tp):
    plain = dict(build(shape).named_parameters())
    seen = {name: torch.zeros(p.shape, dtype=torch.int) for name, p in plain.items()}
    for rank in range(tp):
        with torch.device("meta"):
            model = build(shape)
        table = parallelize(model, sharding_plan(Job(shape=shape, vocab_multiple=4)), FakeMesh(tp, rank))
        assert table.keys() == plain.keys()
        local = dict(model.named_parameters())
        for name, sharded in table.items():
            assert sharded.placed.shape == plain[name].shape
            for piece in sharded.placed.pieces:
                assert all(
                    a + n <= size
                    for a, n, size in zip(piece.local, piece.sizes, local[name].shape, strict=True)
                )
                if piece.owned:
                    piece.of_full(seen[name]).add_(1)
    assert all(bool((count == 1).all()) for count in seen.values())


class Boxed(nn.Module):
    """A parameter that is cut along two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(48.0).view(4, 6, 2))


@dataclass(frozen=True)
class Boxes(ParallelStyle):
    """The first dimension in two, and of each half the second in two; a gap or an overlap on request."""

    rows: int = 2  # of the second dimension's first run

    def parts(self, name, module, index, tp):
        start, size = ((0, self.rows), (3, 3))[index % 2]
        return {"w": ParameterShard(dim=1, runs=(ShardRange(start, size),), within=(0, index // 2 * 2, 2))}

    def replace_module(self, module, mesh):
        return module


def test_a_parameter_cut_along_two_dimensions_is_held_in_boxes():
    seen = torch.zeros(4, 6, 2)
    for rank in range(4):
        model = nn.ModuleDict({"box": Boxed()})
        table = parallelize(model, {"box": Boxes(3)}, FakeMesh(4, rank))
        (piece,) = table["box.w"].placed.pieces
        assert (piece.offsets, piece.sizes) == ((rank // 2 * 2, rank % 2 * 3, 0), (2, 3, 2))
        assert torch.equal(model["box"].w, piece.of_full(Boxed().w))
        piece.of_full(seen).add_(1)
    assert bool((seen == 1).all())


@pytest.mark.parametrize(("rows", "reported"), [(2, "no rank holds"), (4, "two ranks own")])
def test_boxes_that_leave_a_gap_or_overlap_are_refused(rows, reported):
    with pytest.raises(StrettoError, match=f"{reported} box.w from . along dimension 1"):
        parallelize(nn.ModuleDict({"box": Boxed()}), {"box": Boxes(rows)}, FakeMesh(4))


def test_norms_of_a_split_sequence_share_their_gradient():
    for partial in (False, True):
        with torch.device("meta"):
            model = build(SHAPES[0])
        job = Job(shape=SHAPES[0], layout=Layout(tp=2), sequence=6, sequence_parallel=partial)
        table = parallelize(model, sharding_plan(job), FakeMesh(2, grouped=True))
        shared = {name for name, sharded in table.items() if sharded.shared}
        norms = {name for name in table if "norm" in name or name.endswith(("proj.bias", "down.bias"))}
        assert shared == ({*norms, "embed.pos.weight"} if partial else set())


def test_a_real_model_keeps_its_values():
    for rank in range(2):
        torch.manual_seed(0)
        model = MLP()
        plain = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.up.weight.requires_grad_(False)
        parallelize(model, PLAN, FakeMesh(2, rank))
        assert isinstance(model.up, ParallelLinear)
        assert torch.equal(model.up.weight, plain["up.weight"][4 * rank : 4 * rank + 4])
        assert torch.equal(model.up.bias, plain["up.bias"][4 * rank : 4 * rank + 4])
        assert torch.equal(model.down.weight, plain["down.weight"][:, 4 * rank : 4 * rank + 4])
        assert torch.equal(model.down.bias, plain["down.bias"])
        assert torch.equal(model.norm.weight, plain["norm.weight"])
        assert not model.up.weight.requires_grad
        assert model.down.weight.requires_grad


def test_a_model_without_storage_gets_its_values_piece_by_piece():
    shape = SHAPES[0]
    torch.manual_seed(0)
    full = {name: p.detach() for name, p in build(shape).double().named_parameters()}
    with torch.device("meta"):
        model = build(shape)
    table = parallelize(model, sharding_plan(Job(shape=shape)), FakeMesh(4, 3))
    layers = [(name, layer) for name, layer in model.layers() if name != "blocks.0"]
    requested = []

    def values(name: str, size: tuple[int, ...]) -> torch.Tensor:
        requested.append(name)
        assert size == full[name].shape
        return full[name]

    parameters = materialise(layers, table, values, "cpu", torch.float64)
    assert sorted(requested) == sorted(parameters)
    assert len(requested) == len(set(requested))
    assert not any(name.startswith("blocks.0") for name in parameters)
    assert all(p.is_meta for p in model.blocks[0].parameters())
    assert model.head.out.weight is model.embed.tok.weight  # tied, so one tensor
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.float64
        for piece in table[name].placed.pieces:
            assert torch.equal(piece.of_local(parameter), piece.of_full(full[name]))
    tok = parameters["embed.tok.weight"]  # 37 rows over 4 ranks: 10, 10, 10 and 7 with three of padding
    assert tok.shape == (10, 16)
    assert not tok[7:].any()


def test_parameters_of_the_model_itself_have_a_place_too():
    with torch.device("meta"):
        model = MLP()
    table = parallelize(model, PLAN, FakeMesh(2, 1))
    parameters = materialise(
        [("", model)], table, lambda name, size: torch.full(size, float(len(name))), "cpu", torch.float32
    )
    assert set(parameters) == set(table)
    assert model.scale.tolist() == [5.0] * 4
    assert not table["scale"].placed.pieces[0].owned  # rank 0's copy is


def test_copied_key_heads_name_the_ranks_that_share_their_gradient():
    shape = SHAPES[1]
    for rank in range(4):
        with torch.device("meta"):
            model = build(shape)
        table = parallelize(model, sharding_plan(Job(shape=shape)), FakeMesh(4, rank))
        d = shape.head_dim
        group = ("tp", 2)  # four ranks, two key heads
        assert table["blocks.0.attn.qkv.weight"].shared == ((0, d, d, group), (0, 2 * d, d, group))
        assert table["blocks.0.attn.proj.weight"].shared == ()
        owned = [piece.owned for piece in table["blocks.0.attn.qkv.weight"].placed.pieces]
        assert owned == [True, rank % 2 == 0, rank % 2 == 0]


def test_a_module_with_two_names_is_swapped_under_both():
    model = nn.Module()
    model.a = nn.Module()
    model.b = nn.Module()
    model.a.fc = model.b.fc = nn.Linear(4, 4)
    model.c = model.a
    table = parallelize(model, {"a.fc": ColumnParallel()}, FakeMesh(2))
    assert isinstance(model.a.fc, ParallelLinear)
    assert model.b.fc is model.a.fc
    assert model.c.fc is model.a.fc
    assert set(table) == {"a.fc.weight", "a.fc.bias"}
    assert set(table["a.fc.weight"].names) == {"a.fc.weight", "b.fc.weight", "c.fc.weight"}


def test_a_module_with_two_names_has_one_style():
    model = nn.Module()
    model.a = model.b = nn.Linear(4, 4)
    with pytest.raises(StrettoError, match="'a' and 'b' are one module"):
        parallelize(model, {"a": ColumnParallel(), "b": RowParallel()}, FakeMesh(2))


class Greedy(Replicate):
    """A style with a fault: what each of two ranks takes of four rows."""

    def __init__(self, *runs: ShardRange) -> None:
        self.runs = runs

    def parts(self, name, module, index, tp):
        return {"weight": ParameterShard(dim=0, runs=(self.runs[index],))}


@pytest.mark.parametrize(
    ("plan", "phrases"),
    [
        (PLAN | {"dwn": RowParallel()}, ("pattern 'dwn' matches no module", "'down'")),
        (PLAN | {"xyzzy": RowParallel()}, ("pattern 'xyzzy' matches no module",)),
        (PLAN | {"u*": ColumnParallel()}, ("module 'up' is matched twice", "'u*'")),
        (
            {"up": ColumnParallel(), "down": RowParallel(), "norm": Replicate()},
            ("no pattern covers parameter 'scale'", "'': Replicate()"),
        ),
        ({"up": ColumnParallel(), "norm": Replicate()}, ("no pattern covers parameter 'scale'",)),
        (
            {"": Replicate(), "up": ColumnParallel(), "down": RowParallel(), "norm": ColumnParallel()},
            ("norm is LayerNorm",),
        ),
    ],
)
def test_every_mistake_of_a_plan_is_named(plan, phrases):
    with pytest.raises(StrettoError) as error:
        parallelize(MLP(), plan, FakeMesh(2))
    for word in phrases:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("style", "message"),
    [
        (Greedy(ShardRange(0, 4), ShardRange(0, 4)), "two ranks own fc.weight from 0"),
        (Greedy(ShardRange(0, 3), ShardRange(2, 2)), "two ranks own fc.weight from 2"),
        (Greedy(ShardRange(0, 1), ShardRange(2, 2)), "no rank holds fc.weight from 1"),
        (Greedy(ShardRange(0, 1), ShardRange(1, 2)), "hold 3 of 4"),
    ],
)
def test_shares_must_add_up_to_the_plain_parameter(style, message):
    model = nn.Sequential()
    model.fc = nn.Linear(2, 4, bias=False)
    with pytest.raises(StrettoError, match=message):
        parallelize(model, {"fc": style}, FakeMesh(2))


def test_tied_parameters_must_be_split_alike():
    shape = SHAPES[0]
    plan = sharding_plan(Job(shape=shape)) | {"head.out": VocabParallel(multiple=64)}
    with pytest.raises(StrettoError, match=r"embed.tok.weight = head.out.weight is split in different ways"):
        parallelize(build(shape), plan, FakeMesh(2))


def test_sizes_that_do_not_divide_are_refused():
    shape = SHAPES[0]
    with pytest.raises(StrettoError, match="does not divide over tp=3 ranks"):
        parallelize(build(shape), sharding_plan(Job(shape=shape)), FakeMesh(3))


def test_the_model_itself_can_be_kept_but_not_swapped():
    linear = nn.Linear(4, 4)
    assert set(parallelize(linear, {"": Replicate()}, FakeMesh(2))) == {"weight", "bias"}
    with pytest.raises(StrettoError, match="swaps the model itself, a Linear"):
        parallelize(nn.Linear(4, 4), {"": ColumnParallel()}, FakeMesh(2))


class DropoutMLP(nn.Module):
    """A user's MLP, with dropout between the layer that is split by columns and the one split by rows, and
    dropout of its output.
    """

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.inner = nn.Dropout(0.5) if inner is None else inner
        self.down = nn.Linear(8, 4)
        self.outer = nn.Sequential(nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.down(self.inner(self.up(x))))


SPLIT: dict[str, ParallelStyle] = {"up": ColumnParallel(), "down": RowParallel()}
DROPOUT: dict[str, ParallelStyle] = {**SPLIT, "inner": SplitDropout(heads=(2, 8)), "outer": Replicate()}


def keyed(model: nn.Module) -> nn.Module:
    key_dropout(model, DropoutKeys(0))
    return model


@pytest.mark.parametrize(
    ("model", "plan", "says", "hint"),
    [
        (DropoutMLP(), SPLIT, "'inner' is Dropout: each", "call key_dropout"),
        (DropoutMLP(), DROPOUT, "'inner' is Dropout: each", "call key_dropout"),
        (DropoutMLP(nn.AlphaDropout(0.5)), DROPOUT, "'inner' is AlphaDropout: each", "use nn.Dropout"),
        (keyed(DropoutMLP()), SPLIT, "dropout 'inner'", "add 'inner': SplitDropout"),
        (keyed(DropoutMLP()), {"": Replicate(), **SPLIT}, "dropout 'inner'", "add 'inner': SplitDropout"),
        (
            keyed(DropoutMLP()),
            {**DROPOUT, "inner": Replicate(sequence=True)},
            "dropout 'inner'",
            "SplitDropout",
        ),
        (
            keyed(DropoutMLP()),
            {**DROPOUT, "outer": Replicate(sequence=True)},
            "dropout 'outer.0'",
            "SplitDropout",
        ),
    ],
)
def test_dropout_with_masks_other_than_one_process_is_refused(
    model: nn.Module, plan: dict[str, ParallelStyle], says: str, hint: str
) -> None:
    before = list(model.named_parameters())
    with pytest.raises(StrettoError, match=says) as caught:
        parallelize(model, plan, FakeMesh(2))
    assert hint in (caught.value.hint or "")
    after = list(model.named_parameters())
    assert all(
        state[0] == other[0] and state[1] is other[1] for state, other in zip(before, after, strict=True)
    )


def test_dropout_that_is_keyed_and_has_a_style_is_accepted() -> None:
    model = keyed(DropoutMLP())
    parallelize(model, DROPOUT, FakeMesh(2))
    assert len(model.inner.cuts) == 1
    assert not model.outer[0].cuts
    parallelize(keyed(DropoutMLP()), {"": Replicate()}, FakeMesh(2))  # nothing is split


@pytest.mark.parametrize(
    "inner",
    [
        nn.RReLU(),
        nn.Dropout2d(0.1),
        nn.FeatureAlphaDropout(0.1),
        nn.MultiheadAttention(8, 2, dropout=0.1),
        nn.LSTM(8, 8, num_layers=2, dropout=0.1),
        nn.FractionalMaxPool2d(2, output_size=1),
    ],
)
def test_modules_known_to_draw_random_numbers_are_refused(inner: nn.Module) -> None:
    with pytest.raises(StrettoError, match=f"'inner' is {type(inner).__name__}: each"):
        parallelize(DropoutMLP(inner), {"": Replicate()}, FakeMesh(2))


class Noisy(nn.Module):
    """Random functions that no type shows."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), Drawing(draw))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x) if self.training else x


def attention(p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=p)


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.1),
    "attention": attention(0.1),
    "gumbel": F.gumbel_softmax,
    "rand": lambda x: x + torch.rand(4),
    "noise": lambda x: x + torch.randn_like(x),
    "mask": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "choice": lambda x: x[torch.multinomial(x.softmax(-1)[0], 1)],
    "rrelu": lambda x: F.rrelu(x, training=True),
}
HARMLESS = {
    "generator": lambda x: x + torch.rand(4, generator=torch.Generator().manual_seed(0)),
    "no dropout": lambda x: F.dropout(x, 0.0),
    "evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "attention": attention(0.0),
    "rrelu": lambda x: F.rrelu(x, training=False),
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_a_random_function_in_any_module_is_refused_when_it_is_called(draw: Any) -> None:
    model = Noisy(draw)
    parallelize(model, {"": Replicate()}, FakeMesh(2))
    x = torch.randn(2, 4)
    model.eval()(x)
    with pytest.raises(
        StrettoError, match=r"'body\.1' \(Drawing\) calls aten.*test_parallelize.py:"
    ) as caught:
        model.train()(x)
    assert "key_dropout" in (caught.value.hint or "")
    torch.rand(2)  # no mode has been left behind


@pytest.mark.parametrize("draw", HARMLESS.values(), ids=HARMLESS)
def test_a_function_that_draws_nothing_by_itself_is_accepted(draw: Any) -> None:
    model = Noisy(draw)
    parallelize(model, {"": Replicate()}, FakeMesh(2))
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), draw(model.body[0](x)))
    alone = Noisy(RANDOM["dropout"])
    parallelize(alone, {"": Replicate()}, FakeMesh(1))
    alone(x)


def test_functional_dropout_of_a_transformers_model_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 11}
    for p in (0.0, 0.1):
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=p)).train()
        parallelize(model, {"": Replicate()}, FakeMesh(2))
        ids = torch.tensor([[1, 2, 3]])
        if not p:
            model(input_ids=ids, labels=ids).loss.backward()
            continue
        with pytest.raises(StrettoError, match=r"'model\.layers\.0\.self_attn' \(LlamaAttention\)"):
            model(input_ids=ids)


def test_what_a_split_linear_would_lose_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    def hooked(linear: nn.Linear) -> nn.Linear:
        linear.register_forward_hook(lambda *_: None)
        return linear

    buffered = nn.Linear(4, 8)
    buffered.register_buffer("mask", torch.ones(8, 4))
    pruned = torch.nn.utils.prune.random_unstructured(nn.Linear(4, 8), "weight", 0.5)
    cases = {
        "a forward other than that of nn.Linear": Scaled(4, 8),
        "hooks": hooked(nn.Linear(4, 8)),
        "the buffer 'mask'": buffered,
        "the buffer 'weight_mask'": pruned,
    }
    for lost, linear in cases.items():
        for style in (ColumnParallel(), VocabParallel()):
            with pytest.raises(StrettoError, match=f"{lost}, which its tensor-parallel form would not have"):
                parallelize(nn.Sequential(linear), {"0": style}, FakeMesh(2))


def test_batch_statistics_of_a_part_of_the_tokens_are_refused() -> None:
    norms = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4)))
    with pytest.raises(StrettoError, match=r"'0\.0' takes statistics over the batch"):
        parallelize(norms, {"0": Replicate(sequence=True)}, FakeMesh(2))
    parallelize(norms, {"0": Replicate()}, FakeMesh(2))


def test_dropout_without_effect_on_other_ranks_needs_no_style() -> None:
    parallelize(DropoutMLP(), SPLIT, FakeMesh(1))
    model = DropoutMLP(nn.Dropout(0.0))
    model.outer = nn.Sequential(nn.Identity())
    parallelize(model, SPLIT, FakeMesh(2))
