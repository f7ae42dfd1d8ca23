"""Which jobs are legal: how states are shared, offloaded, and in which types."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.errors import Problem, StrettoError, nearest
from stretto.spec.data_parallel import KEEP, MODES, SHARDS, Precision
from stretto.spec.job import Job, Rule, either, nearest_values
from stretto.spec.lora import PROJECTIONS
from stretto.spec.parameters import block_shapes, parameter_shapes, stays_float32
from stretto.spec.shape import ModelShape

_SHARDED = ("zero1", "zero2", "zero3")
_TILE = 16  # rows and columns of an 8-bit product are multiples of it
_ELSE = "or a schedule that updates after the step, such as 1f1b"


def _shard_modes(job: Job) -> Iterator[Problem]:
    """A size is given only for what the mode shards."""
    mode = job.dp.mode
    for field, least in SHARDS.items():
        size = job.dp.shards[field]
        if size is not None and MODES.index(mode) < MODES.index(least):
            what = field.removeprefix("shard_")
            yield Problem(
                f"dp.{field}",
                size,
                f"dp.mode={mode} shards no {what}",
                f"dp.{field}=null, or dp.mode={least}",
            )


def _shard_sizes(job: Job) -> Iterator[Problem]:
    """States over a part of the copies, gradients over a part of these ranks, parameters of those."""
    dp, layout = job.dp, job.layout
    if dp.mode not in _SHARDED:
        return
    largest, product = job.copies, f"layout.cp={layout.cp} x layout.dp={layout.dp}"
    for field, least in SHARDS.items():
        size = dp.shards[field]
        if MODES.index(dp.mode) < MODES.index(least) or size is None:
            continue
        if largest % size:
            legal = [n for n in range(1, largest + 1) if largest % n == 0]
            rule = f"it must divide {product}" + (f", which is {largest}" if " x " in product else "")
            yield Problem(f"dp.{field}", size, rule, either(f"dp.{field}", nearest_values(size, legal)))
            return  # what the next must divide is not known
        largest, product = size, f"dp.{field}={size}"


def _reduce_and_gather(job: Job) -> Iterator[Problem]:
    dp = job.dp
    if dp.reduce == "microbatch" and dp.mode not in ("zero2", "zero3"):
        yield Problem(
            "dp.reduce",
            "microbatch",
            f"with dp.mode={dp.mode} ranks keep all gradients, which are reduced once a step",
            "dp.reduce=auto, or dp.mode=zero2",
        )
    if dp.gather != "auto" and dp.mode != "zero3":
        rule = f"dp.mode={dp.mode} keeps parameters whole"
        yield Problem("dp.gather", dp.gather, rule, "dp.gather=auto, or dp.mode=zero3")


def _offload(job: Job) -> Iterator[Problem]:
    dp = job.dp
    if dp.offload_parameters != "none" and dp.mode != "zero3":
        yield Problem(
            "dp.offload_parameters",
            dp.offload_parameters,
            f"dp.mode={dp.mode} keeps parameters whole, and uses them all the time",
            "dp.offload_parameters=none, or dp.mode=zero3",
        )
    away = [f"dp.{name}" for name in ("offload", "offload_parameters") if getattr(dp, name) == "nvme"]
    if away and not dp.path:
        yield Problem("dp.path", "null", f"{away[0]}=nvme needs a folder", "dp.path=/a/folder/on/a/fast/disk")


def _versions(job: Job) -> Iterator[Problem]:
    """What a schedule that updates each stage in the middle of the step leaves no time for."""
    dp = job.dp
    needs_whole_weights = dp.mode == "zero3" or dp.reduce == "microbatch"
    if not needs_whole_weights or not _has_versions(job):
        return
    within = f"schedule {job.schedule_name} updates each stage by itself in the middle of the step"
    if dp.mode == "zero3":
        yield Problem(
            "dp.mode",
            "zero3",
            f"{within} and computes with older weights too, which cannot be gathered from shards",
            f"dp.mode=zero2, {_ELSE}",
        )
    elif dp.mode == "zero2" and dp.reduce == "microbatch":
        rule = f"{within}, where gradients are reduced for each update"
        yield Problem("dp.reduce", "microbatch", rule, f"dp.reduce=auto, {_ELSE}")


def _has_versions(job: Job) -> bool:
    try:
        return bool(job.program().versions)
    except StrettoError:
        return False  # told by the rules of batches and schedules


def _precision(job: Job) -> Iterator[Problem]:
    """Fields that mean something with 16 bits alone; float64 is for proofs of any job."""
    precision, plain = job.precision, Precision()
    if precision.dtype == "float32":
        rule = "train.dtype=float32 has weights and gradients of one type"
        for field, value in (("gradients", precision.gradients), ("keep", precision.keep)):
            if value != getattr(plain, field):
                default = "float32" if field == "gradients" else list(KEEP)
                shown = list(value) if isinstance(value, tuple) else value
                yield Problem(
                    f"precision.{field}", shown, rule, f"precision.{field}={default}, or train.dtype=bfloat16"
                )
    if precision.dtype in ("float32", "bfloat16"):
        for field in ("loss_scale", "loss_scale_steps"):
            value, default = getattr(precision, field), getattr(plain, field)
            if value != default:
                rule = f"train.dtype={precision.dtype} needs no scale of the loss"
                yield Problem(
                    f"precision.{field}", value, rule, f"precision.{field}={default}, or train.dtype=float16"
                )


def _keep(job: Job) -> Iterator[Problem]:
    """A pattern that is no default names some parameter."""
    added = [pattern for pattern in job.precision.keep if pattern not in KEEP]
    names = parameter_shapes(job.shape) if added else {}
    for pattern in added:
        if not any(stays_float32(name, (pattern,)) for name in names):
            yield Problem(
                "precision.keep",
                pattern,
                "it matches no parameter's name",
                f"names are such as {', '.join(list(names)[:3])}",
            )


def _eight_bits(job: Job) -> Iterator[Problem]:
    """Sides of each product of a block's linear layers, as a rank has them; and what scales would not be
    those of one process for: key heads that several ranks hold, and padding.
    """
    if job.precision.fp8 == "none":
        return
    shape, tp = job.shape, job.layout.tp
    if shape.kv_heads % tp:
        yield Problem(
            "precision.fp8",
            job.precision.fp8,
            f"layout.tp={tp} must divide model.kv_heads, which is {shape.kv_heads}: copies of key heads "
            "would each scale a part of their gradient",
            "precision.fp8=none, or a smaller layout.tp",
        )
        return
    unit = (2 * job.layout.cp if job.layout.cp > 1 else 1) * (tp if job.sequence_parallel else 1)
    if job.precision.fp8 == "tensor" and job.sequence % unit:
        rule = f"data.sequence={job.sequence} must be a multiple of {unit}: padding would be in the scales"
        yield Problem("precision.fp8", "tensor", rule, "precision.fp8=row, or another data.sequence")
        return
    for field, size in _sides(shape, tp).items():
        if size % _TILE:
            yield Problem(
                "precision.fp8",
                job.precision.fp8,
                f"the {field} of a rank must be a multiple of {_TILE} and is {size}",
                f"precision.fp8=none, other sizes of the model, or another layout.tp than {tp}",
            )
            return


def _sides(shape: ModelShape, tp: int) -> dict[str, int]:
    """Features that linear layers of a block take and give, on one rank; rounded where tp does not divide."""
    keys = max(shape.kv_heads // tp, 1) * shape.head_dim
    heads = shape.attention_width // tp
    ffn = shape.ffn if shape.moe is None else shape.moe.shared_ffn
    width = {"inner width of the MLP": ffn // tp} if ffn else {}
    return {
        "model.hidden": shape.hidden,
        "width of attention": heads,
        "queries, keys and values together": heads + 2 * keys,
        **width,
    }


def _freeze(job: Job) -> Iterator[Problem]:
    """Every pattern freezes something, and something is left to train."""
    if job.trained.everything:
        return
    names = list(parameter_shapes(job.shape))
    for pattern in job.trained.unmatched(names):
        near = nearest(pattern, names)
        fix = f"did you mean {near}?" if near else "patterns are like embed.* or blocks.0.*"
        yield Problem("finetune.freeze", pattern, "it matches no parameter of the model", fix)
    if not any(map(job.trained, names)):
        rule = "it leaves no parameter to train"
        yield Problem("finetune.freeze", list(job.trained.freeze), rule, "freeze fewer, such as embed.*")


def _adapters(job: Job) -> Iterator[Problem]:
    """Every target is a linear of some block."""
    shape, lora = job.shape, job.shape.lora
    if lora is None:
        return
    modules = {name.rpartition(".")[0] for kind, _ in shape.kinds() for name in block_shapes(kind)}
    for target in lora.unmatched(modules):
        names = dict.fromkeys(name for module in sorted(modules) for name in PROJECTIONS.get(module, ()))
        rule = "no block of the model has it" + ("; routed experts take no adapters" if shape.moe else "")
        yield Problem("lora.targets", target, rule, f"of {', '.join(names)}")
    if job.precision.fp8 != "none":
        rule = "linears with adapters have no products in 8 bits"
        yield Problem("precision.fp8", job.precision.fp8, rule, "precision.fp8=none, or lora.rank=null")


STATE_RULES: tuple[Rule, ...] = (
    _shard_modes,
    _shard_sizes,
    _reduce_and_gather,
    _offload,
    _versions,
    _precision,
    _keep,
    _eight_bits,
    _freeze,
    _adapters,
)
