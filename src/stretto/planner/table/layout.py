"""The degrees of a row: what stands there, what follows from it, and what is usual where nothing does."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.planner.table.cells import Cells
from stretto.spec.shape import ModelShape

_TOKENS = 16384  # of a microbatch that is the whole batch of a replica without a pipeline


@dataclass(frozen=True)
class Batch:
    """Samples of a step, as the row has them and as they divide, and of a microbatch."""

    told: int
    samples: int
    micro: int


def gpus_of(cells: Cells) -> int:
    """How many devices: told, or the product of the degrees.

    Raises:
        StrettoError: neither stands there.
    """
    gpus = cells.whole("gpus")
    if gpus is not None:
        return gpus
    degrees = [cells.whole(axis) for axis in ("dp", "tp", "pp")]
    if any(degree is None for degree in degrees):
        raise StrettoError("the row has no number of GPUs", hint="fill in gpus, or dp, tp and pp")
    product = cells.whole("cp") or 1
    for degree in degrees:
        product *= degree or 1
    return cells.take("gpus", product, "dp x tp x cp x pp")


def layout_of(cells: Cells, gpus: int, node: int, shape: ModelShape) -> Layout:
    """The degrees on so many devices: dp takes what the others leave, whatever stands there; tp, where dp
    alone is told, takes as much of a node as model parallelism and the model let it; the rest is pp.

    Raises:
        StrettoError: the degrees do not make up the devices.
    """
    dp, tp, pp = (cells.whole(axis) for axis in ("dp", "tp", "pp"))
    cp = cells.whole("cp") or 1
    if dp is None and tp is None and pp is None and not _by_itself(cells, gpus):
        raise StrettoError(
            f"the row tells no degrees for {gpus} GPUs", hint="fill in tp, pp and dp, or zero where dp is all"
        )
    if tp is None and pp is None:
        match = re.search(r"model[- ]parallel size (\d+)", cells.words("notes"))
        model = int(match[1]) if match else gpus // (dp * cp) if dp and gpus % (dp * cp) == 0 else 1
        tp = _widest(model, node, shape)
        pp = model // tp
        if model > 1:
            cells.take("tp", tp, f"of model parallelism {model}, inside a node")
            cells.take("pp", pp, "what is left of it")
    elif pp is None:
        pp = gpus // ((tp or 1) * cp * dp) if dp else 1
        if pp != 1:
            cells.take("pp", pp, "what the others leave")
    elif tp is None:
        tp = gpus // (pp * cp * dp) if dp else 1
        if tp != 1:
            cells.take("tp", tp, "what the others leave")
    rest, over = divmod(gpus, (tp or 1) * (pp or 1) * cp)
    if over or not rest:
        told = f"tp={tp} x cp={cp} x pp={pp}"
        raise StrettoError(
            f"{told} does not divide {gpus} GPUs", hint="the product of tp, cp, dp and pp is the GPUs"
        )
    if dp is None and rest > 1:
        cells.take("dp", rest, "what the others leave")
    elif dp not in (None, rest):
        cells.take("dp", rest, f"not {dp}: tp x cp x dp x pp is the GPUs")
    ep = cells.whole("ep") or 1
    return Layout(
        tp=tp or 1,
        cp=cp,
        ep=ep,
        dp=rest,
        pp=pp or 1,
        expert_tp=_expert_tp(cells, shape, ep, tp or 1, cp * rest),
    )


def _by_itself(cells: Cells, gpus: int) -> bool:
    """Whether devices without degrees are replicas: one device, shared states, or a context's split."""
    notes = cells.words("notes")
    shared = cells.words("zero") not in ("", "0") or "zero" in notes or "fsdp" in notes
    return gpus == 1 or shared or cells.whole("cp") is not None or "model-parallel size" in notes


def _widest(model: int, node: int, shape: ModelShape) -> int:
    """The largest tp of a node that divides model parallelism and the heads."""
    return max(n for n in range(1, min(model, node) + 1) if model % n == 0 and shape.heads % n == 0)


def _expert_tp(cells: Cells, shape: ModelShape, ep: int, tp: int, copies: int) -> int | None:
    given = cells.whole("expert_tp")
    if shape.moe is None or ep == 1:
        return None
    if given is None and tp > 1:
        given = cells.take("expert_tp", 1, "experts whole, as in Megatron-Core")
        if tp * copies % ep:
            return None
    return given


def batch_of(cells: Cells, layout: Layout, sequence: int) -> Batch:
    """Samples of a step and of a microbatch.

    A batch that does not divide is taken as the nearest that does; its time is compared by tokens. Without a
    microbatch it is one sample, or without a pipeline the whole batch of a replica where that is at most
    16,384 tokens.
    """
    told, micro = cells.whole("global_batch"), cells.whole("micro_batch")
    if told is None:
        steps = (
            layout.pp * (cells.whole("vp") or 1)
            if layout.pp > 1 and cells.words("vp").isdigit()
            else layout.pp
        )
        told = cells.take(
            "global_batch", (micro or 1) * layout.dp * steps, "a microbatch a stage and replica"
        )
    if micro is None:
        each = max(1, told // layout.dp)
        whole = layout.pp == 1 and each * sequence <= _TOKENS
        micro = cells.take("micro_batch", each if whole else 1)
    unit = layout.dp * micro
    samples = max(1, round(told / unit)) * unit
    if samples != told:
        cells.take("global_batch", samples, f"the nearest to {told} that dp={layout.dp} x {micro} divides")
    return Batch(told, samples, micro)
