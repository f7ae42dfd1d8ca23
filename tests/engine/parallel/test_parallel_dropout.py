"""Dropout by key: a mask is a function of seed, layer and sample, and a slice of it is the slice's mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stretto.engine.parallel.tensor.dropout import Cut, DropoutKeys, KeyedDropout, key_dropout


def dropped(x: Tensor, p: float = 0.4, name: str = "a", seed: int = 0, samples=(5, 9), **where) -> Tensor:
    keys = DropoutKeys(seed)
    keys.samples = samples
    return KeyedDropout(p, name, keys, **where)(x)


@given(parts=st.sampled_from([1, 2, 4]), dim=st.integers(1, 3), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_slices_of_a_split_activation_are_slices_of_the_whole(parts, dim, seed):
    shape = [2, 4, 4, 4]
    x = torch.randn(shape)
    full = dropped(x, seed=seed)
    slices = [
        dropped(part, seed=seed, cuts=[Cut.even(dim, 4, i, parts)])
        for i, part in enumerate(x.chunk(parts, dim))
    ]
    assert torch.equal(torch.cat(slices, dim), full)


def test_the_slices_of_two_ranks_differ():
    x = torch.ones(2, 8, 16)
    a, b = (dropped(x, cuts=[Cut.even(1, 16, i, 2)]) for i in range(2))
    assert not torch.equal(a, b)


def test_masks_of_replicated_activations_are_the_same_on_all_ranks():
    x = torch.ones(2, 64)
    assert torch.equal(dropped(x), dropped(x))
    torch.manual_seed(123)  # the global stream has no part in it
    first = dropped(x)
    torch.rand(7)
    assert torch.equal(dropped(x), first)


def test_other_layer_sample_or_seed_other_mask():
    x = torch.ones(2, 256)
    masks = [dropped(x), dropped(x, name="b"), dropped(x, seed=1), dropped(x, samples=(6, 10))]
    masks.append(masks[0].flip(0))  # samples of one microbatch differ from each other
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert not torch.equal(mask, other)


def test_a_sample_is_masked_alike_in_any_microbatch():
    x = torch.ones(3, 50)
    together = dropped(x, samples=(1, 2, 3))
    alone = [dropped(x[:1], samples=(i,)) for i in (1, 2, 3)]
    assert torch.equal(together, torch.cat(alone))


def test_kept_elements_are_scaled_and_their_number_is_right():
    p, x = 0.3, torch.full((4, 20_000), 2.0)
    y = dropped(x, p, samples=range(4))
    surviving = y != 0
    assert torch.allclose(y[surviving], torch.tensor(2.0 / 0.7))
    assert abs(float(surviving.float().mean()) - 0.7) < 0.01  # five standard deviations are 0.008


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dropout_masks_do_not_depend_on_the_dtype(dtype):
    x = torch.ones(2, 64)
    short = dropped(x.to(dtype))
    assert short.dtype == dtype
    assert torch.equal(short != 0, dropped(x) != 0)


def test_the_gradient_is_masked_and_scaled_alike():
    x = torch.ones(2, 64, requires_grad=True)
    y = dropped(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_dropout_is_off_in_evaluation_and_at_probability_0():
    x = torch.randn(2, 8)
    keys = DropoutKeys(0)  # holds no samples: none are asked for
    assert KeyedDropout(0.5, "a", keys).eval()(x) is x
    assert KeyedDropout(0.0, "a", keys)(x) is x


def test_samples_without_keys_are_an_error():
    with pytest.raises(AssertionError, match="one key for each sample"):
        dropped(torch.ones(3, 4), samples=(1, 2))


def test_every_dropout_of_a_model_is_replaced_and_named():
    model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2)))
    shared = nn.Dropout(0.3)
    model.add_module("x", shared)
    model.add_module("y", shared)
    model[1].eval()
    keys = DropoutKeys(4)
    key_dropout(model, keys)
    results = {name: m for name, m in model.named_modules() if isinstance(m, KeyedDropout)}
    assert {name: (m.name, m.p) for name, m in results.items()} == {
        "0": ("0", 0.1),
        "1.1": ("1.1", 0.2),
        "x": ("x", 0.3),
        "y": ("y", 0.3),
    }
    assert all(m.keys is keys for m in results.values())
    assert [m.training for m in results.values()] == [True, False, True, True]
    assert not any(isinstance(m, nn.Dropout) for m in model.modules())
    assert "p=0.2, name='1.1'" in repr(model)
