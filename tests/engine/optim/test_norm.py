"""The gradient norm of every layout is the plain model's, and clipping by it is torch's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ranks import on_ranks
from stretto import Layout
from stretto.engine.models.build import build
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.optim.norm import GradientNorm, clip, finite
from stretto.engine.parallel.data.reduction import shard_groups
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import ShardedParameter, materialise, parallelize
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.shards import ShardSizes

TIED = ModelShape(family="gpt", layers=2, hidden=16, heads=4, vocab=37, sequence=6)
GROUPED = ModelShape(family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=5, sequence=6)


def gradients(shape: ModelShape) -> dict[str, Tensor]:
    """A whole gradient of the plain model; the tied one is the largest, so that counting it twice shows."""
    torch.manual_seed(0)
    with torch.device("meta"):
        plain = dict(build(shape).named_parameters())
    return {
        name: torch.randn(p.shape, dtype=torch.float64, device="cpu") * (3.0 if "tok" in name else 1.0)
        for name, p in plain.items()
    }


def fragments_of(
    parameters: Mapping[str, nn.Parameter], places: Mapping[str, ShardPlacement]
) -> list[ParameterFragment]:
    """Parameters that are not sharded over data-parallel ranks."""
    return [ParameterFragment(name=name, parameter=p, placed=places[name]) for name, p in parameters.items()]


def replica(mesh: Mesh) -> dict[str, ProcessGroup | None]:
    """The ranks that hold one copy of the dense parameters together."""
    return {"tp": shard_groups(mesh, "tp", ShardSizes()).counted}


def whole_norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors]).norm()


def places_of(
    table: dict[str, ShardedParameter], names: Iterable[str], first: bool
) -> dict[str, ShardPlacement]:
    """Return placements like those of `assemble`: only the first stage's copy of a tied parameter is
    owned.
    """
    results = {}
    for name in names:
        placed = table[name].placed
        if len(table[name].names) > 1 and not first:
            placed = replace(placed, pieces=tuple(replace(p, owned=False) for p in placed.pieces))
        results[name] = placed
    return results


def norms(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """The norm over the layout, and what it would be if every rank counted all that it holds."""
    mesh, full = Mesh(layout), gradients(shape)
    with torch.device("meta"):
        model = build(shape)
    table = parallelize(model, sharding_plan(Job(shape=shape, layout=layout, vocab_multiple=4)), mesh)
    layers = model.layers()
    stages = [layers] if layout.pp == 1 else [layers[:2], layers[2:]]
    parameters = materialise(stages[mesh.index("pp")], table, None, "cpu", torch.float64)
    for name, parameter in parameters.items():
        parameter.grad = torch.zeros_like(parameter)
        table[name].placed.fill(parameter.grad, full[name])
    places = places_of(table, parameters, first=mesh.index("pp") == 0)
    everything = {
        name: replace(p, pieces=tuple(replace(piece, owned=True) for piece in p.pieces))
        for name, p in places.items()
    }
    norm = GradientNorm(fragments_of(parameters, places), replica(mesh))()
    greedy = GradientNorm(fragments_of(parameters, everything), replica(mesh))()
    assert norm.dtype == torch.float64
    mesh.close()
    return float(norm), float(greedy)


LAYOUTS = [
    Layout(tp=4),
    Layout(tp=2, pp=2),
    Layout(tp=2, dp=2),
    Layout(dp=2, pp=2),
    Layout(dp=4),
    Layout(tp=2, dp=2, order="dp-tp-pp"),
]


def every_layout() -> list[list[tuple[float, float]]]:
    results = [[norms(shape, layout) for layout in LAYOUTS] for shape in (TIED, GROUPED)]
    results.append([nothing_here(Layout(pp=4), torch.float64), nothing_here(Layout(pp=4), torch.float32)])
    return results


def nothing_here(layout: Layout, dtype: torch.dtype) -> tuple[float, float]:
    """Only one pipeline rank holds parameters."""
    mesh = Mesh(layout)
    parameters: dict[str, nn.Parameter] = {}
    if mesh.index("pp") == 2:
        parameters["w"] = nn.Parameter(torch.zeros(2, dtype=dtype))
        parameters["w"].grad = torch.tensor([3.0, 4.0], dtype=dtype)
    places = {n: ShardPlacement.unsharded(n, (2,)) for n in parameters}
    norm = GradientNorm(fragments_of(parameters, places), replica(mesh))()
    clip([], norm, 1.0)  # nothing to scale
    mesh.close()
    return float(norm), 0.0


def test_every_layout_has_the_norm_of_the_plain_model():
    for on_rank in on_ranks(4, every_layout):
        for shape, results in zip((TIED, GROUPED), on_rank, strict=False):
            wanted = float(whole_norm(gradients(shape).values()))
            for layout, (norm, greedy) in zip(LAYOUTS, results, strict=True):
                assert norm == pytest.approx(wanted, rel=1e-12), f"{shape.family} {layout}"
                copies = layout.tp > 1 or (layout.pp > 1 and shape.tied)
                assert (greedy > wanted * 1.001) == copies, f"{shape.family} {layout}"
        assert on_rank[2] == [(5.0, 0.0), (5.0, 0.0)]


def test_parameters_without_gradient_count_nothing():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    a.grad = torch.tensor([3.0, 4.0])
    places = {"a": ShardPlacement.unsharded("a", (2,)), "b": ShardPlacement.unsharded("b", (2,))}
    assert GradientNorm(fragments_of({"a": a, "b": b}, places), {"tp": None})() == 5.0
    assert GradientNorm([], {"tp": None})() == 0.0


def test_padding_and_pieces_owned_elsewhere_are_left_out():
    from stretto.engine.parallel.fragment import TensorBox

    w = nn.Parameter(torch.zeros(4))
    w.grad = torch.tensor([3.0, 4.0, 100.0, 0.0])
    pieces = (
        TensorBox(offsets=(0,), sizes=(2,), local=(0,)),
        TensorBox(offsets=(2,), sizes=(1,), local=(2,), owned=False),
    )
    (fragment,) = fragments_of({"w": w}, {"w": ShardPlacement("w", (3,), pieces)})
    assert GradientNorm([fragment], {"tp": None})() == 5.0
    fragment.counted_elsewhere = True
    assert GradientNorm([fragment], {"tp": None})() == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [0.5, 7.0, 1e3])
def test_clipping_is_torchs(dtype: torch.dtype, largest: float):
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (5, 3)]
    torch_parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (5, 3)]
    for a, b in zip(parameters, torch_parameters, strict=True):
        a.grad = torch.randn(a.shape, dtype=dtype) * 10
        b.grad = a.grad.clone()
    before = [a.grad.clone() for a in parameters if a.grad is not None]
    places = {str(i): ShardPlacement.unsharded(str(i), tuple(p.shape)) for i, p in enumerate(parameters)}
    fragments = fragments_of({str(i): p for i, p in enumerate(parameters)}, places)
    norm = GradientNorm(fragments, {"tp": None})()
    clip([p.grad for p in parameters if p.grad is not None], norm, largest)
    torch.nn.utils.clip_grad_norm_(torch_parameters, largest)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    exact = 1e-6 if dtype == torch.bfloat16 else tolerance  # ours is not rounded to the gradients' type
    plain = torch.cat(before).double().norm()
    torch.testing.assert_close(norm, plain, rtol=exact, atol=0)
    for a, b in zip(parameters, torch_parameters, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=0)
        assert a.grad is not None
        assert a.grad.dtype == dtype


def test_small_gradients_stay_as_they_are_where_the_norm_is_not_read():
    """Off the CPU the ratio stays on the device, so the clamp must do it."""

    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("meta")

    grad = torch.tensor([3.0, 4.0])
    clip([grad], torch.tensor(5.0).as_subclass(Elsewhere), 100.0)
    assert grad.tolist() == [3.0, 4.0]
    clip([grad], torch.tensor(5.0).as_subclass(Elsewhere), 1.0)
    assert grad.tolist() == pytest.approx([0.6, 0.8])


def test_a_norm_that_is_not_finite_is_reported():
    grad = torch.tensor([1.0, torch.nan])
    clip([grad], torch.tensor(torch.nan), 1.0)
    assert grad.isnan().all()


@pytest.mark.parametrize("largest", [None, 0.5, 1e3])
def test_scaled_gradients_are_clipped_like_unscaled_ones(largest: float | None):
    torch.manual_seed(1)
    plain = [torch.randn(5, dtype=torch.float64), torch.randn(3, dtype=torch.float32)]
    scaled = [1024 * g for g in plain]
    fragments = [
        ParameterFragment(
            name="w",
            parameter=nn.Parameter(torch.zeros_like(g)),
            placed=ShardPlacement.unsharded("w", tuple(g.shape)),
            gradient=g,
        )
        for g in scaled
    ]
    norm = GradientNorm(fragments, {"tp": None})(1024.0)
    torch.testing.assert_close(norm, whole_norm(plain).double(), rtol=1e-7, atol=0)
    clip(scaled, norm, largest, 1024.0)
    clip(plain, norm, largest)
    for a, b in zip(scaled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_the_norm_of_sixteen_bits_neither_overflows_nor_rounds():
    fragment = ParameterFragment(
        name="w", parameter=nn.Parameter(torch.zeros(4096)), placed=ShardPlacement.unsharded("w", (4096,))
    )
    fragment.gradient = torch.full((4096,), 3e4, dtype=torch.float16)  # its norm is more than float16 has
    assert float(GradientNorm([fragment], {"tp": None})()) == pytest.approx(64 * 3e4, rel=1e-5)


def test_shards_count_what_they_hold():
    """Flat parts of a tensor, of different types, in one process."""
    full = torch.randn(6, 4, dtype=torch.float64)
    placed = ShardPlacement.unsharded("w", (6, 4))
    parts = [(0, 3), (3, 17), (17, 24), (24, 24)]
    fragments = [
        ParameterFragment(
            name="w",
            parameter=nn.Parameter(torch.zeros(b - a)),
            placed=placed.part((6, 4), a, b),
            gradient=full.flatten()[a:b],
        )
        for a, b in parts
    ]
    assert float(GradientNorm(fragments, {"tp": None})()) == pytest.approx(float(full.norm()), rel=1e-12)


def test_tensors_of_each_type_are_looked_at_for_numbers_that_are_not_finite():
    good, bad = torch.ones(3), torch.tensor([1.0, float("nan")])
    assert bool(finite([good, good.double(), torch.ones(0)]))
    for tensors in ([bad, good.double()], [good.double(), bad], [good, bad]):
        assert not bool(finite(tensors))
