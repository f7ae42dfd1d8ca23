"""Muon against torch's, whose iterations are in bfloat16, and against the singular values in exact ones."""

from __future__ import annotations

import pytest
import torch
from splits import set_gradients, unsplit, values
from torch import Tensor, nn

from stretto.engine.optim import muon
from stretto.engine.optim.base import is_block_matrix
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.muon import orthogonal, orthogonalise, products_in
from stretto.engine.optim.states import state_tensors
from stretto.job.optimiser import Optimiser
from stretto.job.parameters import parameter_shapes
from stretto.job.shape import ModelShape

LR, DECAY = 0.1, 0.3
MATRICES = ("blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight", "blocks.0.mlp.experts.up")


def by_singular_values(matrix: Tensor) -> Tensor:
    """Five times the quintic of Jordan et al. 2024, of the singular values alone."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (7, 7), (1, 4)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(shape: tuple[int, int], size: float):
    torch.manual_seed(0)
    matrix = size * torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(orthogonal(matrix), by_singular_values(matrix), rtol=1e-9, atol=1e-11)
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert 0.65 < float(values.min()) <= float(values.max()) < 1.25
    assert not orthogonal(torch.zeros(shape)).any()


def test_equal_shapes_are_stacked_on_accelerators(monkeypatch: pytest.MonkeyPatch):
    shapes = [(5, 9), (9, 5), (5, 9), (5, 9), (7, 7)]
    matrices = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    alone = [orthogonal(matrix) for matrix in matrices]
    stacked = list[tuple[int, ...]]()

    def noted(matrix: Tensor) -> Tensor:
        stacked.append(tuple(matrix.shape))
        return orthogonal(matrix)

    monkeypatch.setattr(muon, "on_accelerator", lambda device: True)
    monkeypatch.setattr(muon, "orthogonal", noted)
    monkeypatch.setattr(muon, "STACKED", 2 * 45)
    orthogonalise(matrices)
    for matrix, expected in zip(matrices, alone, strict=True):
        torch.testing.assert_close(matrix, expected, rtol=1e-12, atol=1e-14)
    assert stacked == [(2, 5, 9), (5, 9), (9, 5), (7, 7)]


def test_iterations_are_in_bfloat16_only_where_a_device_has_such_products(monkeypatch: pytest.MonkeyPatch):
    cpu = torch.device("cpu")
    assert products_in(cpu, torch.float32) is torch.float32
    monkeypatch.setattr(muon, "compute_capability", lambda device: (8, 0))
    assert products_in(cpu, torch.float32) is torch.bfloat16
    assert products_in(cpu, torch.float64) is torch.float64  # what a proof computes in
    matrix = torch.randn(5, 9)
    orthogonalised = matrix.clone()
    orthogonalise([orthogonalised])
    assert 0 < (orthogonalised - orthogonal(matrix)).norm() < 0.05 * orthogonalised.norm()
    monkeypatch.setattr(muon, "compute_capability", lambda device: (7, 5))
    assert products_in(cpu, torch.float32) is torch.float32


def test_muon_is_torchs_up_to_bfloat16():
    names = [n for n in MATRICES if "experts" not in n]
    start = {n: values(0)[n] for n in names}
    fragments, torch_parameters = unsplit(start), [nn.Parameter(t.clone()) for t in start.values()]
    optimizer = build_optimizer(fragments, Optimiser(name="muon", lr=LR, weight_decay=DECAY))
    reference = torch.optim.Muon(torch_parameters, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        set_gradients(fragments, values(10 + step))
        for name, parameter in zip(names, torch_parameters, strict=True):
            parameter.grad = values(10 + step)[name]
        optimizer.step()
        reference.step()
    for fragment, parameter in zip(fragments, torch_parameters, strict=True):
        moved = (parameter - start[fragment.name]).norm()
        assert (fragment.parameter - parameter).norm() < 0.01 * moved
        buffer = state_tensors(optimizer, fragment)["momentum_buffer"][0]
        torch.testing.assert_close(
            buffer, reference.state[parameter]["momentum_buffer"], rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_rule_written_out_with_each_expert_a_matrix(momentum: float):
    """And all else by AdamW, of the same learning rate."""
    config = Optimiser(name="muon", lr=LR, weight_decay=DECAY, momentum=momentum)
    fragments, others = unsplit(values(0)), [f for f in unsplit(values(0)) if f.name not in MATRICES]
    optimizer = build_optimizer(fragments, config)
    adamw = build_optimizer(others, Optimiser(lr=LR, weight_decay=DECAY))
    wanted = {name: values(0)[name] for name in MATRICES}
    buffers = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    b = momentum or 0.95
    for step in range(3):
        rate = LR / (step + 1)
        for group in (*optimizer.param_groups, *adamw.param_groups):
            group["lr"] = rate
        gradients = values(10 + step)
        set_gradients(fragments, gradients)
        set_gradients(others, gradients)
        optimizer.step()
        adamw.step()
        for name in MATRICES:
            buffers[name] = b * buffers[name] + (1 - b) * gradients[name]
            ahead = (1 - b) * gradients[name] + b * buffers[name]
            matrices = ahead if ahead.dim() == 3 else ahead[None]
            update = torch.stack([by_singular_values(m) for m in matrices]).view_as(ahead)
            scale = 0.2 * max(ahead.shape[-2:]) ** 0.5
            wanted[name] = (1 - rate * DECAY) * wanted[name] - rate * scale * update
    wanted |= {f.name: f.parameter.detach() for f in others}
    for fragment in fragments:
        torch.testing.assert_close(fragment.parameter.detach(), wanted[fragment.name], rtol=1e-9, atol=1e-11)


def test_which_parameters_muon_updates():
    assert {n for n, t in values(0).items() if is_block_matrix(n, t.shape)} == set(MATRICES)


def test_muon_updates_the_matrices_of_both_stacks_and_no_table_of_biases():
    shape = ModelShape(family="t5", layers=1, encoder_layers=1, hidden=8, heads=2, vocab=32, sequence=8)
    shapes = parameter_shapes(shape)
    linears = {"attn.qkv", "attn.proj", "mlp.up", "mlp.down"}
    both = {f"{stack}.0.{linear}.weight" for stack in ("encoder", "blocks") for linear in linears}
    cross = {f"blocks.0.cross.{linear}.weight" for linear in ("q", "kv", "proj")}
    assert "encoder.0.attn.relative" in shapes
    assert {name for name, shape in shapes.items() if is_block_matrix(name, shape)} == both | cross


def test_muon_and_its_rest_appear_as_one_optimiser():
    fragments = unsplit(values(0))
    optimizer = build_optimizer(fragments, Optimiser(name="muon", weight_decay=DECAY, no_decay=("*proj*",)))
    inputs = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in inputs} == {id(f.parameter) for f in fragments}
    assert len(inputs) == len(fragments)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert [f.name for f in fragments if id(f.parameter) in decayed] == [
        "embed.tok.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.mlp.router.gate.weight",
        "blocks.0.mlp.experts.up",
        "head.out.weight",
    ]
    set_gradients(fragments, values(1))
    optimizer.step()
    keys = {f.name: set(state_tensors(optimizer, f)) for f in fragments}
    assert keys["blocks.0.attn.qkv.weight"] == {"momentum_buffer"}
    assert keys["blocks.0.attn.qkv.bias"] == {"exp_avg", "exp_avg_sq"}
    optimizer.zero_grad()
    assert all(f.parameter.grad is None for f in fragments)


def test_without_matrices_or_with_nothing_else():
    for names in (["head.out.weight"], ["blocks.0.attn.proj.weight"]):
        fragments = unsplit({n: values(0)[n] for n in names})
        optimizer = build_optimizer(fragments, Optimiser(name="muon"))
        set_gradients(fragments, values(1))
        optimizer.step()
        assert not torch.equal(fragments[0].parameter, values(0)[names[0]])
