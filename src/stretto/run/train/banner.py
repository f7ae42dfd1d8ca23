"""The lines that a run prints before it starts: model, layout, text, stages."""

from __future__ import annotations

from math import prod
from pathlib import Path

from stretto.job.devices import HOST
from stretto.job.flops import layer_names
from stretto.job.job import Job
from stretto.job.parameters import parameter_shapes
from stretto.job.user_shape import UserShape
from stretto.program.action import ActionKind
from stretto.program.program import Program
from stretto.run.config.data import DEFAULT_RATIO, DataConfig
from stretto.run.config.schema import EvalConfig, RunTimeConfig
from stretto.run.data.split import SPLITS, splits_of
from stretto.run.data.token_source import TokenData
from stretto.run.train.metrics import short_count
from stretto.run.train.prediction import local_device_kind


def banner(
    job: Job,
    source: TokenData,
    *,
    data: DataConfig,
    train: RunTimeConfig,
    evaluation: EvalConfig,
    folder: Path,
) -> str:
    """Return a line each for the model and its layout, the text and the results, the splits of the text, and
    the stages.

    Args:
        folder: the run's.
    """
    shape = job.shape
    program, layout = job.program(), job.layout
    kind = local_device_kind(train.device)
    devices = layout.describe() if kind == HOST else f"{layout.describe()}, {kind}"
    parameters = parameter_shapes(shape)
    total, trainable = sum(map(prod, parameters.values())), ""
    if not job.trained.everything:
        count = sum(prod(sizes) for name, sizes in parameters.items() if job.trained(name))
        share = 100 * count / total
        trainable = f" ({short_count(count)} of them trainable, {share:.3g}%)"
    updates = sum(action.kind is ActionKind.UPDATE for action in program.orders[0])
    targets = "" if source.trained is None else f", {short_count(source.trained)} of them trained on"
    boundaries = source.describe_boundaries()
    return "\n".join(
        [
            f"{shape.title} of {short_count(total)} parameters{trainable}, "
            f"{job.precision.dtype}, on {_count(layout.world, 'rank')} ({devices}), "
            f"{', '.join([program.name, *_features(job)])}; {train.steps} "
            f"steps of {job.global_batch} x {job.sequence} tokens in "
            f"{_count(program.microbatches, 'microbatch', 'es')} of {job.micro_batch}"
            + (f", {_count(updates, 'update')} of the weights a step" if updates else ""),
            f"text: {', '.join(data.sources)}, {short_count(source.size)} tokens{targets}, "
            f"vocabulary {source.vocab}{'' if boundaries is None else f', {boundaries}'}; "
            f"results in {folder} (metrics.jsonl, checkpoints/)",
            _splits(job, source, data.split, evaluation),
            _stages(job, program),
        ]
    )


def _splits(job: Job, source: TokenData, split: str | None, evaluation: EvalConfig) -> str:
    """Return the tokens of each split, and those that evaluations read, whose loss is not that of the
    training text.
    """
    streams = source.streams.values()
    ranges = [splits_of(stream, split) for stream in streams]
    sizes = {name: sum(len(each[name]) for each in ranges) for name in SPLITS}
    shown = [f"{name} {short_count(size)} tokens" for name, size in sizes.items() if size]
    if evaluation.every is not None and sizes["valid"]:
        first = min(sizes["valid"], evaluation.batches * job.global_batch * job.sequence)
        part_read = "all" if first == sizes["valid"] else f"the first {short_count(first)}"
        note = f" (evaluations read {part_read}; easier or harder text than training's moves their loss)"
        shown = [part + note if part.startswith("valid") else part for part in shown]
    named = [
        f"{name} of {stream.named_splits[name][1]}"
        for stream in streams
        for name in SPLITS
        if split is None and stream.named_splits and stream.named_splits[name][0]
    ]
    by_name = f"by the names of files: {', '.join(named)}; data.split={DEFAULT_RATIO} cuts all of it instead"
    return "\n".join([f"splits: {', '.join(shown)}", *([by_name] if named else [])])


def _features(job: Job) -> list[str]:
    """Return how layers are split and what is recomputed, if it differs from the default."""
    uncompiled = ""
    if job.compile != "off":  # a compiler could fuse more of these parts of blocks, but does not
        parts = {
            "latent attention": job.shape.latent is not None,
            "routers": job.shape.moe is not None,
            "dropout": job.shape.dropout > 0.0,
        }
        uncompiled = ", ".join(name for name, present in parts.items() if present)
    features = [
        (job.sequence_parallel and job.layout.tp > 1, "sequence parallel"),
        (job.layout.cp > 1, f"{job.context} attention"),
        (job.attention != "auto", f"{job.attention} attention"),
        (job.compile != "off", f"compiled {job.compile}" + (f" (but {uncompiled})" if uncompiled else "")),
        (job.graphs != "off", f"graphs of a {job.graphs}"),
        (job.recompute.mode != "none", f"recompute {job.recompute.mode}"),
    ]
    return [text for shown, text in features if shown]


def _stages(job: Job, program: Program) -> str:
    """Return the layers of each stage, and its pipeline rank unless stages and ranks are the same."""
    names, shown = layer_names(job.shape), list[str]()
    for stage, layers in enumerate(job.stages(program.depth)):
        first, last = names[layers.start], names[layers.stop - 1]
        title = first if len(layers) == 1 else f"{first}..{last}"
        rank = f" (rank {program.placement[stage]})" if program.stages > program.ranks else ""
        shown.append(f"{stage}{rank} {title}")
    even = isinstance(job.shape, UserShape) and job.stage_layers is None and len(shown) > 1
    by = " (equal numbers of layers, whose times are unknown; layout.stages cuts otherwise)" if even else ""
    return "stages: " + " | ".join(shown) + by


def _count(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{plural if count > 1 else ''}"
