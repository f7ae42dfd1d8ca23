"""The lines that a run prints before it starts: model, layout, text, stages."""

from __future__ import annotations

from math import prod

from stretto.job.flops import layer_names
from stretto.job.job import Job
from stretto.job.parameters import count_parameters, parameter_shapes
from stretto.program.action import ActionKind
from stretto.program.program import Program
from stretto.run.config.schema import TrainConfig
from stretto.run.data.split import SPLITS, split_tokens
from stretto.run.data.token_source import TokenData
from stretto.run.train.prediction import accelerator_named


def banner(config: TrainConfig, job: Job, source: TokenData) -> str:
    """The model and its layout, the text and the results, the splits of the text, the stages: a line each."""
    shape, program = job.shape, job.program()
    layout, micro = job.layout, _count(program.microbatches, "microbatch", "es")
    devices = ", ".join((layout.describe(), *accelerator_named(config.train)))
    updates = sum(action.kind is ActionKind.UPDATE for action in program.orders[0])
    return "\n".join(
        [
            f"{shape.family} of {_short(count_parameters(shape).total)} parameters{_trainable(job)}, "
            f"{job.precision.dtype}, on {_count(layout.world, 'rank')} ({devices}), "
            f"{', '.join([program.name, *_features(job)])}; {config.train.steps} "
            f"steps of {job.global_batch} x {job.sequence} tokens in {micro} of {job.micro_batch}"
            + (f", {_count(updates, 'update')} of the weights a step" if updates else ""),
            f"text: {', '.join(config.data.sources)}, {_short(source.size)} tokens{_trained(source)}, "
            f"vocabulary {source.vocab}{_boundaries(source)}; "
            f"results in {config.run.folder} (metrics.jsonl, checkpoints/)",
            _splits(config, job, source),
            _stages(job, program),
        ]
    )


def _boundaries(source: TokenData) -> str:
    described = source.describe_boundaries()
    return "" if described is None else f", {described}"


def _trainable(job: Job) -> str:
    """How many of the parameters the optimiser updates, where it does not update all."""
    if job.trained.everything:
        return ""
    count = sum(prod(sizes) for name, sizes in parameter_shapes(job.shape).items() if job.trained(name))
    share = 100 * count / count_parameters(job.shape).total
    return f" ({_short(count)} of them trainable, {share:.3g}%)"


def _splits(config: TrainConfig, job: Job, source: TokenData) -> str:
    """The tokens of each split, and what evaluations read, whose loss is not of the text trained on."""
    ranges = [split_tokens(stream.offsets, config.data.split) for stream in source.streams.values()]
    sizes = {name: sum(len(each[name]) for each in ranges) for name in SPLITS}
    shown = [f"{name} {_short(size)} tokens" for name, size in sizes.items() if size]
    if config.eval.every is not None and sizes["valid"]:
        first = min(sizes["valid"], config.eval.batches * job.global_batch * job.sequence)
        part_read = "all" if first == sizes["valid"] else f"the first {_short(first)}"
        note = f" (evaluations read {part_read}; easier or harder text than training's moves their loss)"
        shown = [part + note if part.startswith("valid") else part for part in shown]
    return f"splits: {', '.join(shown)}"


def _trained(source: TokenData) -> str:
    """How many of the tokens the loss counts, where it does not count all."""
    return "" if source.trained is None else f", {_short(source.trained)} of them trained on"


def _features(job: Job) -> list[str]:
    """How layers are split and what is recomputed, where it differs from the default."""
    features = [
        (job.sequence_parallel and job.layout.tp > 1, "sequence parallel"),
        (job.layout.cp > 1, f"{job.context} attention"),
        (job.attention != "auto", f"{job.attention} attention"),
        (job.compile != "off", f"compiled {job.compile}{_uncompiled(job)}"),
        (job.graphs != "off", f"graphs of a {job.graphs}"),
        (job.recompute.mode != "none", f"recompute {job.recompute.mode}"),
    ]
    return [text for shown, text in features if shown]


def _uncompiled(job: Job) -> str:
    """The parts of blocks that stay as they are although a compiler could fuse more of them."""
    parts = {"latent attention": job.shape.latent is not None, "routers": job.shape.moe is not None}
    parts["dropout"] = job.shape.dropout > 0.0
    uncompiled = [name for name, present in parts.items() if present]
    return f" (but {', '.join(uncompiled)})" if uncompiled else ""


def _stages(job: Job, program: Program) -> str:
    """The layers of each stage, and its pipeline rank where stages and ranks are not the same."""
    names, shown = layer_names(job.shape), list[str]()
    for stage, layers in enumerate(job.stages(program.depth)):
        first, last = names[layers.start], names[layers.stop - 1]
        title = first if len(layers) == 1 else f"{first}..{last}"
        rank = f" (rank {program.placement[stage]})" if program.stages > program.ranks else ""
        shown.append(f"{stage}{rank} {title}")
    return "stages: " + " | ".join(shown)


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number > 1 else ''}"


def _short(number: int) -> str:
    """Such as 850, 12.3 k, 124 M, 6.7 B."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
