"""LAMB against the paper's algorithm, written out."""

from __future__ import annotations

import torch
from splits import set_gradients, unsplit, values
from torch import Tensor

from stretto.engine.optim.base import decays, stack_depth
from stretto.engine.optim.build import build_optimizer
from stretto.job.optimiser import Optimiser

LR, BETAS, EPS, DECAY = 0.1, (0.8, 0.9), 1e-6, 0.3


def by_the_paper(weight: Tensor, gradients: list[Tensor], decay: float) -> Tensor:
    """You et al. 2019, algorithm 2, for one layer; phi(z) = z."""
    m, v, x = torch.zeros_like(weight), torch.zeros_like(weight), weight.clone()
    for t, g in enumerate(gradients, 1):
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        m_hat = m / (1 - BETAS[0] ** t)
        v_hat = v / (1 - BETAS[1] ** t)
        r = m_hat / (v_hat.sqrt() + EPS)
        length = (r + decay * x).norm()
        ratio = x.norm() / length if x.norm() > 0 and length > 0 else 1.0
        x = x - LR * ratio * (r + decay * x)
    return x


def test_lamb_is_the_papers_with_a_ratio_for_each_expert():
    config = Optimiser(name="lamb", lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    fragments, steps = unsplit(values(0)), [values(s) for s in (1, 2, 3)]
    optimizer = build_optimizer(fragments, config)
    for gradients in steps:
        set_gradients(fragments, gradients)
        optimizer.step()
    for fragment in fragments:
        name, start = fragment.name, values(0)[fragment.name]
        decay = DECAY if decays(name, start.shape) else 0.0
        inputs = [gradients[name] for gradients in steps]
        if stack_depth(name, start.shape):
            experts = [by_the_paper(start[e], [g[e] for g in inputs], decay) for e in range(len(start))]
            wanted = torch.stack(experts)
        else:
            wanted = by_the_paper(start, inputs, decay)
        torch.testing.assert_close(fragment.parameter.detach(), wanted, rtol=1e-12, atol=1e-13)


def test_a_tensor_of_zeros_learns_and_one_without_gradient_stays():
    """If a norm is 0 the ratio is 1; otherwise a bias that begins at 0 would never change."""
    start = {"a.bias": torch.zeros(3, dtype=torch.float64), "b.bias": torch.ones(3, dtype=torch.float64)}
    fragments = unsplit(start)
    optimizer = build_optimizer(fragments, Optimiser(name="lamb", lr=0.1))
    set_gradients(fragments, {"a.bias": torch.ones(3, dtype=torch.float64), "b.bias": start["a.bias"]})
    optimizer.step()
    torch.testing.assert_close(fragments[0].parameter.detach(), torch.full((3,), -0.1, dtype=torch.float64))
    assert torch.equal(fragments[1].parameter, start["b.bias"])
