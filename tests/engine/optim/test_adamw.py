"""AdamW with moments of 16 bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from splits import set_gradients, unsplit, values

from stretto.engine.optim import adam
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.states import state_tensors
from stretto.job.optimiser import Optimiser

CONFIG = Optimiser(lr=0.01, weight_decay=0.3, states="bfloat16")


def test_narrow_adamw_is_adamw_with_rounded_moments():
    fragments = unsplit(values(0))
    optimizer = build_optimizer(fragments, CONFIG)
    b1, b2 = CONFIG.betas
    wanted = values(0)
    first, second = ({n: torch.zeros_like(t) for n, t in wanted.items()} for _ in range(2))
    for step in range(1, 4):
        set_gradients(fragments, values(step))
        optimizer.step()
        for name, g in values(step).items():
            m = b1 * first[name] + (1 - b1) * g
            v = b2 * second[name] + (1 - b2) * g * g
            decay = CONFIG.weight_decay if wanted[name].dim() > 1 and not name.endswith("bias") else 0.0
            wanted[name] *= 1 - CONFIG.lr * decay
            wanted[name] -= CONFIG.lr * m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + CONFIG.eps)
            first[name], second[name] = m.bfloat16().double(), v.bfloat16().double()
    for fragment in fragments:
        torch.testing.assert_close(fragment.parameter.detach(), wanted[fragment.name], rtol=1e-9, atol=1e-12)
        states = state_tensors(optimizer, fragment)
        assert {tensor.dtype for tensor, _ in states.values()} == {torch.bfloat16}


def test_narrow_adamw_stays_near_adamw():
    narrow, full = unsplit(values(0)), unsplit(values(0))
    pair = [(narrow, build_optimizer(narrow, CONFIG))]
    pair.append((full, build_optimizer(full, replace(CONFIG, states="float32"))))
    for step in range(30):
        for fragments, optimizer in pair:
            set_gradients(fragments, values(step))
            optimizer.step()
    for a, b in zip(narrow, full, strict=True):
        moved = (b.parameter - values(0)[b.name]).norm()
        assert 0 < (a.parameter - b.parameter).norm() < 0.01 * moved, a.name


def test_results_do_not_depend_on_the_chunk_size(monkeypatch):
    results = []
    for chunk in (1 << 16, 7):
        monkeypatch.setattr(adam, "CHUNK", chunk)
        fragments = unsplit(values(0))
        optimizer = build_optimizer(fragments, CONFIG)
        set_gradients(fragments, values(1))
        optimizer.step()
        results.append(fragments)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.parameter, b.parameter)
