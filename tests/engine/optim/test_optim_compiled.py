"""Compiled updates against those by torch's operators, which other tests hold to the papers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stretto.engine import loops
from stretto.engine.optim import base, chunks
from stretto.engine.optim.base import FragmentOptimizer
from stretto.engine.optim.build import build_optimizer
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.errors import StrettoError
from stretto.spec.optimiser import Optimiser

pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
CONFIGS = {
    "lamb": Optimiser(name="lamb", lr=0.1, weight_decay=0.3),
    "adafactor": Optimiser(name="adafactor", lr=0.7, weight_decay=0.3),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "a.weight": (37, 20),
    "a.bias": (37,),
    "experts.up": (3, 7, 5),
    "experts.up_bias": (3, 7),
    "scale": (),
}


def optimiser(name: str, fragments: Iterable[ParameterFragment], compiled: bool) -> FragmentOptimizer:
    """Built, with all that it decides at its first update."""
    result = build_optimizer(fragments, CONFIGS[name])
    assert isinstance(result, FragmentOptimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "has_numba", lambda: compiled)
        result.step()
    return result


def fragments_of(tensors: dict[str, Tensor], gradients: dict[str, Tensor]) -> list[ParameterFragment]:
    """Whole tensors with their gradients."""
    results = list[ParameterFragment]()
    for name, tensor in tensors.items():
        parameter = nn.Parameter(tensor.clone(memory_format=torch.preserve_format))
        parameter.grad = gradients[name].clone(memory_format=torch.preserve_format)
        placed = ShardPlacement.unsharded(name, tuple(tensor.shape))
        results.append(ParameterFragment(name=name, parameter=parameter, placed=placed))
    return results


def random(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in shapes.items()}


def train(name: str, fragments: list[ParameterFragment], compiled: bool, steps: int = 3) -> list[Tensor]:
    """The weights and states afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "has_numba", lambda: compiled)
        optimizer = build_optimizer(fragments, CONFIGS[name])
        for _ in range(steps):
            optimizer.step()
            for fragment in fragments:
                gradient = fragment.parameter.grad
                assert gradient is not None
                gradient.neg_().mul_(0.7)
    states = [state for f in fragments for state in optimizer.state[f.parameter].values()]
    return [*(f.parameter.detach() for f in fragments), *states]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(CONFIGS)))
def test_loops_and_operators_make_the_same_update(data: st.DataObject, name: str):
    """Of tensors of any sizes, some empty, some not contiguous, and of parts of matrices."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    sizes = st.tuples(st.integers(1, 90), st.integers(1, 90))
    shapes = {f"{at}.weight": data.draw(sizes) for at in range(data.draw(st.integers(1, 3)))}
    shapes |= {f"{at}.bias": (data.draw(st.integers(1, 3000)),) for at in range(data.draw(st.integers(0, 2)))}
    shapes |= {"experts.up": (3, 4, 5)} if data.draw(st.booleans()) else {}
    weights, gradients = random(shapes, 0, dtype), random(shapes, 1, dtype)
    if data.draw(st.booleans()):
        weights["0.weight"] = weights["0.weight"].T.contiguous().T
    if data.draw(st.booleans()):
        gradients["0.weight"] = gradients["0.weight"].T.contiguous().T
    cuts = {
        n: data.draw(st.lists(st.integers(0, prod(s)), min_size=2, max_size=2)) for n, s in shapes.items()
    }
    flat = data.draw(st.booleans())  # as a shard of a unit
    results = list[list[Tensor]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "SIZE", data.draw(st.sampled_from([16, 1000, 1 << 16])))
        for compiled in (False, True):
            fragments = fragments_of(weights, gradients)
            for at, fragment in enumerate(fragments if flat else []):
                low, high = sorted(cuts[fragment.name])
                parameter = nn.Parameter(weights[fragment.name].flatten()[low:high].clone())
                parameter.grad = gradients[fragment.name].flatten()[low:high].clone()
                placed = fragment.placed.part(fragment.placed.shape, low, high)
                fragments[at] = ParameterFragment(name=fragment.name, parameter=parameter, placed=placed)
            results.append(train(name, fragments, compiled))
    tolerance = {"rtol": 1e-11, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, **tolerance)


@pytest.mark.parametrize("name", CONFIGS)
def test_loops_are_what_runs(name: str, monkeypatch: pytest.MonkeyPatch):
    """On a CPU, of tensors of its own; not of those without values or in 16 bits."""
    bound = list[bool]()
    plain = chunks.BatchLoops.bind

    def bind(*arguments: object, **named: object) -> object:
        result = plain(*arguments, **named)  # pyright: ignore
        bound.append(result is not None)
        return result

    monkeypatch.setattr(chunks.BatchLoops, "bind", bind)
    for dtype, wanted in ((torch.float32, True), (torch.float64, True), (torch.bfloat16, False)):
        bound.clear()
        optimiser(name, fragments_of(random(SHAPES, 0, dtype), random(SHAPES, 1, dtype)), compiled=True)
        assert bound
        assert set(bound) == {wanted}, dtype
    bound.clear()
    with FakeTensorMode(), suppress(DataDependentOutputException):
        zeros = {n: torch.zeros(s) for n, s in SHAPES.items()}
        optimiser(name, fragments_of(zeros, zeros), compiled=True)
    assert set(bound) == {False}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_go_through(name: str, value: float):
    results = list[list[Tensor]]()
    for compiled in (False, True):
        gradients = random(SHAPES, 1, torch.float32)
        for gradient in gradients.values():
            gradient.view(-1)[gradient.numel() // 2] = value
        results.append(train(name, fragments_of(random(SHAPES, 0, torch.float32), gradients), compiled))
    assert all(bool(one.isnan().any()) for one in results[0][: len(SHAPES)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.isinf(), other.isinf())


@pytest.mark.parametrize("name", CONFIGS)
def test_threads_and_runs_do_not_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch):
    weights, gradients = random(SHAPES, 0, torch.float32), random(SHAPES, 1, torch.float32)
    monkeypatch.setattr(chunks, "SIZE", 64)
    results, before = list[list[Tensor]](), torch.get_num_threads()
    try:
        for threads, cached in ((1, 1 << 19), (3, 1 << 19), (1, 1), (2, 100)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(base, "CACHED", cached)
            results.append(train(name, fragments_of(weights, gradients), compiled=True))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("name", CONFIGS)
def test_sums_of_many_elements_keep_their_digits(name: str):
    """Half a million squares in float32, against float64."""
    results = list[list[Tensor]]()
    for dtype in (torch.float32, torch.float64):
        weights = {"w.weight": torch.full((1 << 10, 1 << 9), 0.1, dtype=dtype)}
        gradients = {"w.weight": torch.full((1 << 10, 1 << 9), 0.3, dtype=dtype)}
        results.append(train(name, fragments_of(weights, gradients), compiled=True, steps=1))
    torch.testing.assert_close(results[0][0].double(), results[1][0], rtol=0.0, atol=2e-8)


@pytest.mark.parametrize("name", CONFIGS)
def test_states_of_other_shapes_are_not_loaded(name: str) -> None:
    values = random(SHAPES, 1, torch.float32)
    optimizer = optimiser(name, fragments_of(values, values), compiled=True)
    states = optimizer.state_dict()
    optimizer.load_state_dict(states)
    optimizer.step()
    moments = states["state"][0]
    key = next(key for key in moments if key != "step")
    for change, about in ((moments[key].new_zeros(3), r"of shape \[3\]"), (None, "missing")):
        wrong = {k: v for k, v in moments.items() if k != key} | ({} if change is None else {key: change})
        with pytest.raises(StrettoError, match=f"state {key} of .* is {about}"):
            optimizer.load_state_dict({**states, "state": {**states["state"], 0: wrong}})
