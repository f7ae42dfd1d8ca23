"""What one block of the real parallel layers keeps for its backward, by unique storage, parameters left out:
the published closed forms, and ours to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ranks import on_ranks
from stretto import Layout
from stretto.cost.activations import Computing, block_saved, published_formula, total
from stretto.cost.flops import Recompute
from stretto.cost.shape import ModelShape
from stretto.models.attention import make_explicit
from stretto.models.build import build
from stretto.models.sharding import Splitting, sharding_plan
from stretto.parallel.dropout import DropoutKeys, key_dropout
from stretto.parallel.mesh import Mesh
from stretto.parallel.norm import lean_norms
from stretto.parallel.parallelize import parallelize
from stretto.parallel.recompute import recompute_blocks

SEQUENCE, BATCH = 128, 2
# wide enough for what papers leave out, the statistics of norms, to be 0.1% of a block's input
GPT = ModelShape(family="gpt", layers=1, hidden=512, heads=8, vocab=16, sequence=SEQUENCE, dropout=0.1)
LLAMA = ModelShape(
    family="llama", layers=1, hidden=256, heads=8, kv_heads=4, ffn=384, vocab=16, sequence=SEQUENCE
)
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def kept(run: Callable[[], Any], parameters: set[int]) -> int:
    """Bytes that autograd keeps: each storage once, none of `parameters`, no tables of rotary positions."""
    seen = dict[int, Tensor]()

    def pack(t: Tensor) -> Tensor:
        at = t.untyped_storage().data_ptr()
        if at not in parameters:
            seen[at] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = run()
    del y
    return sum(t.untyped_storage().nbytes() for t in seen.values() if t.requires_grad or not _table(t))


def _table(t: Tensor) -> bool:
    return t.dim() == 2 and t.shape[0] == SEQUENCE and t.is_floating_point()


def measured(shape: ModelShape, how: Computing, mesh: Mesh) -> int:
    """Bytes that this rank's share of one block keeps."""
    torch.manual_seed(1)
    model, keys = build(shape), DropoutKeys(2)
    keys.samples = range(how.batch)
    if how.attention == "explicit":
        make_explicit(model)
    lean_norms(model)
    key_dropout(model, keys)
    split = Splitting(how.sequence, how.sequence_parallel)
    parallelize(model, sharding_plan(shape, split), mesh)
    block: nn.Module = model.blocks[0].to(torch.float32 if how.autocast else DTYPES[how.element])
    recompute_blocks([block], [how.recompute], mesh, how.shard_inputs)
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    first = next(block.parameters())
    x = torch.randn(how.batch, how.shard // how.batch, shape.hidden, dtype=first.dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
        return kept(lambda: block(x * 1.0), parameters)


def published_cases(tp: int) -> list[Computing]:
    """The rows of table 2 of Korthikanti et al. 2022 for `tp` ranks."""
    made = list[Computing]()
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    for sequence_parallel in (False, True) if tp > 1 else (False,):
        for mode in modes:
            made.append(
                Computing(
                    BATCH,
                    SEQUENCE,
                    tp=tp,
                    sequence_parallel=sequence_parallel,
                    attention="explicit",
                    recompute=mode,
                )
            )
    if tp > 1:
        made.append(replace(made[2], shard_inputs=True))
    return made


def other_cases(tp: int) -> list[tuple[ModelShape, Computing]]:
    """Ours: flash and explicit attention, grouped heads, no dropout, all types."""
    made = list[tuple[ModelShape, Computing]]()
    for how in published_cases(tp):
        for shape in (
            LLAMA,
            replace(LLAMA, kv_heads=1),
            replace(GPT, dropout=0.0, hidden=256, head_dim=32, ffn=512),
        ):
            made.append((shape, replace(how, attention="flash", element=4)))
            if how.recompute == "none":
                made.append((shape, replace(how, element=8, batch=1)))
                made.append((shape, replace(how, attention="flash")))
    return made


def measure_all(cases: list[tuple[ModelShape, Computing]], tp: int) -> list[int]:
    mesh = Mesh(Layout(tp=tp))
    found = [measured(shape, how, mesh) for shape, how in cases]
    mesh.close()
    return found


def of_all_ranks(tp: int, cases: list[tuple[ModelShape, Computing]]) -> list[list[int]]:
    return on_ranks(tp, measure_all, cases, tp) if tp > 1 else [measure_all(cases, tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_bytes_are_the_published_ones(tp: int):
    cases = published_cases(tp)
    for found in of_all_ranks(tp, [(GPT, how) for how in cases]):
        for how, bytes_ in zip(cases, found, strict=True):
            wanted = published_formula(GPT, how)
            assert wanted is not None
            assert bytes_ == pytest.approx(wanted.bytes, rel=0.01), (how, wanted.formula)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_bytes_are_counted_tensor_by_tensor(tp: int):
    cases = other_cases(tp) + [(GPT, how) for how in published_cases(tp)]
    for found in of_all_ranks(tp, cases):
        for (shape, how), bytes_ in zip(cases, found, strict=True):
            wanted = total(block_saved(shape, how))
            if shape.family == "gpt" and how.element == 2 and how.recompute != "full":
                wanted -= 2 * 4 * how.shard  # torch's LayerNorm on CPU keeps mean and scale in bfloat16
            assert bytes_ == wanted, (shape, how)
