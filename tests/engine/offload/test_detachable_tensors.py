"""Tensors whose memory comes and goes while they stay the same objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.engine.offload.scratch import aligned_memory
from stretto.engine.offload.tensor_files import DetachableTensors, mark


def test_tensors_that_share_memory_go_on_sharing_it():
    flat = torch.arange(100.0)
    flats = flat[10:60]
    a, b = nn.Parameter(flat[10:40].view(5, 6)), nn.Parameter(flat[40:60])
    other = torch.arange(7, dtype=torch.int64)
    group = DetachableTensors([a, b, flats, other])
    assert group.size == 256 + 64  # 50 numbers of 4 bytes, which began inside of 64, and 7 of 8
    memory = aligned_memory(group.size)
    group.pack(memory)
    assert torch.equal(a.detach().view(-1), torch.arange(10.0, 40.0))
    assert torch.equal(other, torch.arange(7))
    with torch.no_grad():
        flats.mul_(2)
    assert torch.equal(b, torch.arange(80.0, 120.0, 2))
    assert flat[50] == 50  # what was not given stays behind
    copy = memory.clone()
    group.detach()
    memory.zero_()
    group.attach(copy)
    assert torch.equal(a.detach().view(-1), torch.arange(20.0, 80.0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_an_offloaded_tensor_keeps_its_shape_reads_nan_and_refuses_writes(dtype: torch.dtype):
    tensor = torch.ones((3, 4), dtype=dtype)
    group = DetachableTensors([tensor])
    group.pack(aligned_memory(group.size))
    here = mark(tensor)
    group.detach()
    assert (tensor.shape, tensor.dtype) == ((3, 4), dtype)
    assert not bool((tensor == 1).any())
    assert mark(tensor.detach()) == mark(tensor.view(3, 4)[1:]) == group.marks()[0] != here
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        tensor.add_(1)
    with pytest.raises(RuntimeError, match="setStorage"):
        tensor.as_strided((2, 2), (2, 1), tensor.storage_offset() + 3)


def test_single_elements_stay_and_keep_no_memory():
    flat = torch.arange(1000.0)
    single, none = nn.Parameter(flat[999:]), nn.Parameter(flat[:0])
    group = DetachableTensors([single, none])
    assert group.size == 0
    group.detach()
    assert single.item() == 999
    assert single.untyped_storage().nbytes() == 4
    assert none.numel() == 0


def test_optimiser_states_survive_offloading():
    parameters = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    pairs = [(ps, torch.optim.AdamW(ps, fused=True)) for ps in (parameters, twins)]
    group, memory = None, torch.empty(0)
    for step in range(3):
        for mine, optimizer in pairs:
            torch.manual_seed(step)
            for p in mine:
                p.grad = torch.randn_like(p)
            optimizer.step()
        states = [t for p in parameters for t in pairs[0][1].state[p].values() if t.dim()]
        if group is None:
            group = DetachableTensors([*parameters, *states])
            memory = aligned_memory(group.size)
            group.pack(memory)
        group.detach()
        assert all(bool(t.isnan().all()) for t in (*parameters, *states))
        memory = aligned_memory(group.size).copy_(memory)
        group.attach(memory)
        assert all(torch.equal(a, b) for a, b in zip(parameters, twins, strict=True))
