"""How a weight, its gradient and states, and an activation are cut over the ranks of a job: as boxes of the
whole tensor, those that the engine gives a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from stretto.errors import StrettoError
from stretto.job.chain import layer_of
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.layout.shards import Mode, boxes
from stretto.planner.counts.compute import vocabulary_rows
from stretto.planner.counts.rank_parameters import Parameter, Shares, layer_parameters
from stretto.planner.counts.state_bytes import StateConfig
from stretto.planner.memory.transient import stage_units
from stretto.web.question_job import Question, read_job

Run = tuple[int, int]  # start and size along a dimension
Box = tuple[int, int, int, int]  # first row, first column, rows, columns

_MODES: tuple[Mode, ...] = ("ddp", "zero1", "zero2", "zero3")
_SHARDED = ("weight", "gradient", "states")  # over 1, 2 and 3 of the digits of a rank's number


@dataclass(frozen=True)
class TensorPart:
    """A rank's part of a tensor: along each dimension the runs that it holds, in local order.

    Attributes:
        padding: rows of zeros after the runs of the first dimension.
    """

    sizes: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    padding: int = 0

    @property
    def local(self) -> tuple[int, ...]:
        """Sizes of the rank's own tensor."""
        sizes = [sum(size for _, size in runs) for runs in self.runs]
        return (sizes[0] + self.padding, *sizes[1:])

    def global_boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yield boxes of the whole tensor, as a matrix whose columns are the last dimension, that have these
        elements of the rank's own tensor in row-major order.
        """
        for offsets, sizes in boxes(self.local, start, stop):
            cuts = [
                [*_overlaps(runs, offset, size)]
                for runs, offset, size in zip(self.runs, offsets, sizes, strict=True)
            ]
            for ranges in product(*cuts):
                yield from self._as_matrix(ranges)

    def _as_matrix(self, ranges: Sequence[Run]) -> Iterator[Box]:
        if len(ranges) == 1:
            yield 0, ranges[0][0], 1, ranges[0][1]
            return
        *stack, (row, rows), (column, columns) = ranges
        if not stack:
            yield row, column, rows, columns
            return
        (first, many), height = stack[0], self.sizes[1]
        if rows == height:
            yield first * height, column, many * height, columns
            return
        for index in range(first, first + many):
            yield index * height + row, column, rows, columns


def _overlaps(runs: Sequence[Run], offset: int, size: int) -> Iterator[Run]:
    """Yield the parts of runs that local positions [offset, offset + size) are in."""
    before = 0
    for start, length in runs:
        low, high = max(offset, before), min(offset + size, before + length)
        if low < high:
            yield start + low - before, high - low
        before += length


# ------------------------------------------------------------------ parts of parameters


def parameter_part(
    parameter: Parameter, shape: ModelShape, shares: Shares, index: Mapping[str, int]
) -> TensorPart:
    """A rank's part of a parameter, before data-parallel ranks shard it.

    Args:
        shape: that of the parameter's block.
        index: the rank's coordinates on "tp", "ep" and "expert_tp".
    """
    sizes = parameter.plain
    tp, at = shares.tp, index["tp"]
    every: list[tuple[Run, ...]] = [((0, size),) for size in sizes]
    name = parameter.name
    if parameter.expert:
        experts = sizes[0] // shares.ep
        every[0] = ((index["ep"] * experts, experts),)
        dim = -1 if name.endswith(".down") else 1
        if not name.endswith("down_bias"):
            blocks = 2 if "gate_up" in name else 1
            every[dim] = _even([sizes[dim] // blocks] * blocks, shares.expert_tp, index["expert_tp"])
        return TensorPart(sizes, tuple(every))
    if name.endswith(("tok.weight", "out.weight")):
        step = vocabulary_rows(shape, tp, shares.vocab_multiple)
        start = min(at * step, shape.vocab)
        real = min(step, shape.vocab - start)
        every[0] = ((start, real),)
        return TensorPart(sizes, tuple(every), padding=step - real)
    if (segments := _segments(name, shape)) is not None:
        every[0] = _heads(segments, tp, at)
    elif parameter.elements * tp == prod(sizes) and tp > 1:
        dim = 1 if len(sizes) > 1 and name.endswith(("proj.weight", "down.weight")) else 0
        blocks = 2 if "gate_up" in name else 1
        every[dim] = _even([sizes[dim] // blocks] * blocks, tp, at)
    return TensorPart(sizes, tuple(every))


def _segments(name: str, shape: ModelShape) -> list[tuple[int, int]] | None:
    """Heads and rows of a head of each tensor that is stacked in a linear, or None if it has no key heads."""
    keys = (shape.kv_heads, shape.head_dim)
    if ".attn.qkv." in name:
        return [(shape.heads, shape.head_dim), keys, keys]
    return [keys, keys] if ".cross.kv." in name else None


def _heads(segments: Sequence[tuple[int, int]], tp: int, at: int) -> tuple[Run, ...]:
    """Rows of rank `at`; ranks share a head if there are fewer heads than ranks."""
    runs, start = list[Run](), 0
    for heads, rows in segments:
        share = max(heads // tp, 1)
        runs.append((start + at * heads // tp * rows, share * rows))
        start += heads * rows
    return tuple(runs)


def _even(widths: Sequence[int], parts: int, at: int) -> tuple[Run, ...]:
    """Part `at` of each of several blocks of rows."""
    runs, start = list[Run](), 0
    for width in widths:
        runs.append((start + at * (width // parts), width // parts))
        start += width
    return tuple(runs)


# ------------------------------------------------------------------ the answer


def cut_tensors(question: Question) -> dict[str, Any]:
    """The parts of a rank in one parameter with its gradient and states in every ZeRO stage, and in one
    activation.

    Args:
        question: a job, a `rank`, a `tensor` (the end of a parameter's name) and an `activation`.
    """
    job, rank = read_job(question).job, question.get("rank", 0)
    place = job.layout.coordinates(rank)
    program = job.program()
    stages = [job.stages(program.depth)[s % program.depth] for s in program.stages_of(place["pp"])]
    shares = Shares(job.layout.tp, job.layout.ep, _expert_tp(job), job.vocab_multiple)
    choices = _choices(job, shares)
    tensor: str = question.get("tensor") or "attn.qkv.weight"
    if tensor not in choices:
        tensor = choices[0]
    holder = next(
        (
            (layer, parameter, stage)
            for stage in stages
            for layer in stage
            for parameter in layer_parameters(job.shape, layer, shares)
            if parameter.name.endswith(f".{tensor}")
        ),
        None,
    )
    dense = any(kind.moe is None for kind, _ in job.shape.kinds())
    activations = ["residual", "heads", *["mlp"] * dense, "logits"]
    kind: str = question.get("activation") or "residual"
    if kind not in activations:
        raise StrettoError(f"activation {kind!r} is not known", hint=f"one of {', '.join(activations)}")
    return {
        "rank": rank,
        "choices": choices,
        "tensor": tensor,
        "weight": None if holder is None else _weight(job, rank, shares, holder),
        "activation": {"kind": kind, **activation_part(job, rank, kind)},
        "activations": activations,
    }


def _expert_tp(job: Job) -> int:
    return job.layout.tp if job.expert_tp is None else job.expert_tp


def _choices(job: Job, shares: Shares) -> list[str]:
    """The ends of names of the matrices, each kind once, those of blocks first."""
    names = dict[str, None]()
    for layer in sorted(range(job.shape.chain), key=lambda layer: layer_of(job.shape, layer).kind != "block"):
        prefix = f"{layer_of(job.shape, layer).name}."
        for parameter in layer_parameters(job.shape, layer, shares):
            if len(parameter.plain) > 1 and ".lora." not in parameter.name:
                inside = parameter.name.startswith(prefix) and prefix.count(".") > 1
                names[parameter.name.removeprefix(prefix) if inside else parameter.name] = None
    return [name.removeprefix("embed.").removeprefix("head.") for name in names]


def _weight(job: Job, rank: int, shares: Shares, holder: tuple[int, Parameter, range]) -> dict[str, Any]:
    """A parameter: the parts of all tensor-parallel ranks, and what this one keeps in each ZeRO stage."""
    layer, parameter, stage = holder
    shape, layout = layer_of(job.shape, layer).shape, job.layout
    group = layout.group(rank, "expert_tp-ep" if parameter.expert else "tp")
    parts = [
        parameter_part(
            parameter,
            shape,
            shares,
            {axis: layout.group(other, axis).index(other) for axis in ("tp", "ep", "expert_tp")},
        )
        for other in group
    ]
    part = parts[group.index(rank)]
    rows = prod(parameter.plain[:-1])
    return {
        "name": parameter.name,
        "layer": layer,
        "sizes": parameter.plain,
        "rows": rows,
        "columns": parameter.plain[-1],
        "segments": _labels(parameter.name, shape, rows),
        "ranks": group,
        "parts": [[*each.global_boxes(0, prod(each.local))] for each in parts],
        "local": part.local,
        "padding": part.padding,
        "elements": parameter.elements,
        "modes": [
            _mode(job, mode, rank=rank, parameter=parameter, part=part, stage=stage) for mode in _MODES
        ],
    }


def _labels(name: str, shape: ModelShape, rows: int) -> list[tuple[str, int]]:
    """Names and rows of the tensors that are stacked in one matrix."""
    if ".attn.qkv." in name:
        return [("q", shape.attention_width), ("k", shape.kv_width), ("v", shape.kv_width)]
    if ".cross.kv." in name:
        return [("k", shape.kv_width), ("v", shape.kv_width)]
    if "gate_up" in name and "experts" not in name:
        return [("gate", rows // 2), ("up", rows // 2)]
    return []


def _mode(
    job: Job, mode: Mode, *, rank: int, parameter: Parameter, part: TensorPart, stage: range
) -> dict[str, Any]:
    """What a rank keeps of a parameter between steps in one ZeRO stage: boxes of weight, gradient, states."""
    variant = replace(job, dp=job.dp if mode == job.dp.mode else DataParallelSettings(mode=mode))
    if broken := problems(variant):
        return {"mode": mode, "refused": broken[0].message}
    program = variant.program()
    state_config = StateConfig.of(variant, program)
    shares = Shares(job.layout.tp, job.layout.ep, _expert_tp(job), job.vocab_multiple)
    gather = variant.dp.gathers(job.layout.pp)
    of_stage = stage_units(job.shape, tuple(stage), shares, state_config, gather)
    unit = next(unit for unit in of_stage.units if parameter.name in {each.name for each in unit.parameters})
    copies = sorted(job.layout.group(rank, "expert_dp" if parameter.expert else "cp-dp"))
    before = 0
    for each in unit.parameters:
        if each.name == parameter.name:
            break
        before += each.elements
    spans = dict[str, Any]()
    for level, kind in enumerate(_SHARDED, 1):
        start, stop = unit.sizes.span(unit.size, copies.index(rank), unit.copies, level)
        low, high = max(start - before, 0), min(stop - before, parameter.elements)
        spans[kind] = {
            "boxes": [*part.global_boxes(low, high)] if low < high else [],
            "elements": max(0, high - low),
            "ranks": prod(unit.sizes.levels(unit.copies)[:level]),
            "span": (start, stop),
        }
    names = [each.name for each in unit.parameters]
    return {
        "mode": mode,
        "unit": {"names": names[:12], "count": len(names), "elements": unit.size, "before": before},
        "copies": copies,
        **spans,
    }


# ------------------------------------------------------------------ activations


def padded_sequence(job: Job) -> int:
    """Positions of a sample, padded so that the ranks that split it hold equally many."""
    unit = (2 * job.layout.cp if job.layout.cp > 1 else 1) * (job.layout.tp if job.sequence_parallel else 1)
    return -(-job.sequence // unit) * unit


def positions(job: Job, place: Mapping[str, int], *, sharded: bool) -> list[Run]:
    """The positions of a sample on a rank, as runs; context-parallel rank i has chunks i and 2 cp - 1 - i.

    Args:
        place: its coordinates.
        sharded: also over tp, as norms and the residual stream are with sequence parallelism.
    """
    tp, cp = job.layout.tp if job.sequence_parallel else 1, job.layout.cp
    padded = padded_sequence(job)
    runs: list[Run] = [(0, padded)]
    if cp > 1:
        chunk = padded // (2 * cp)
        runs = [(place["cp"] * chunk, chunk), ((2 * cp - 1 - place["cp"]) * chunk, chunk)]
    if not sharded:
        return runs
    part = padded // cp // tp
    return [*_overlaps(runs, place["tp"] * part if tp > 1 else 0, part)]


def activation_part(job: Job, rank: int, kind: str) -> dict[str, Any]:
    """A rank's part of an activation of one sample [positions, features].

    Args:
        kind: "residual" (norms, dropout and residual stream), "heads" (queries and attention's output),
            "mlp" (inner width) or "logits".
    """
    shape, layout = job.shape, job.layout
    place, tp = layout.coordinates(rank), layout.tp
    rows = positions(job, place, sharded=kind == "residual")
    columns: Run = (0, shape.hidden)
    width = shape.hidden
    if kind == "heads":
        width = shape.heads * shape.head_dim
        columns = (place["tp"] * width // tp, width // tp)
        if layout.cp > 1 and job.context == "ulysses":  # all positions of a part of the rank's heads
            part = width // tp // layout.cp
            columns = (columns[0] + place["cp"] * part, part)
            rows = [(0, padded_sequence(job))]
    elif kind == "mlp":
        width = next(each.ffn for each, _ in shape.kinds() if each.moe is None)
        columns = (place["tp"] * width // tp, width // tp)
    elif kind == "logits":
        step = vocabulary_rows(shape, tp, job.vocab_multiple)
        width, columns = step * tp, (place["tp"] * step, step)
    return {
        "rows": padded_sequence(job),
        "columns": width,
        "boxes": [(row, columns[0], size, columns[1]) for row, size in rows],
        "local": [sum(size for _, size in rows), job.micro_batch, columns[1]],
        "batch": job.micro_batch,
    }
