"""The rules of legal jobs, which relate model, layout, schedule and batch.

A config is checked against them before a process starts, and the planner proposes only legal jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from stretto.errors import Problem, StrettoError, nearest
from stretto.job.data_parallel import KEEP, MODES, SHARDS, Precision
from stretto.job.job import Job, Rule, batch_problem, either, nearest_values
from stretto.job.lora import PROJECTIONS
from stretto.job.optimiser import optimiser_problems
from stretto.job.parameters import block_shapes, parameter_shapes, stays_float32
from stretto.job.program import stages_of
from stretto.job.reduction import reduction
from stretto.job.shape import ModelShape
from stretto.job.user_shape import UserShape
from stretto.program.checks.in_turn import in_turn
from stretto.program.program import Program
from stretto.program.schedules.traits import is_searched

MOST_ACTIONS, MOST_STAGES = 1 << 21, 1 << 10  # of one kind in a step; ranks of a pipeline


def problems(job: Job) -> list[Problem]:
    """Return a problem for every broken rule; empty for a legal job."""
    rules = RULES
    if isinstance(job.shape, UserShape):
        if refused := list(_user_model(job)):
            return refused
        rules = [rule for rule in RULES if rule not in _RULES_OF_SIZES]
    return [problem for rule in rules for problem in rule(job)]


def fits_tp(shape: ModelShape, tp: int) -> bool:
    """True if heads, key/value heads, vocabulary and MLP (or the shared expert) can be split over `tp`
    ranks.
    """
    return (
        shape.heads % tp == 0
        and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
        and all(width % tp == 0 for _, width in _mlps(shape))
        and shape.vocab >= tp
    )


def _mlps(shape: ModelShape) -> list[tuple[str, int]]:
    """Return for each kind of block the MLP that every token passes: the field of its width, and the width, 0
    if no such MLP exists.
    """
    return [
        ("ffn", kind.ffn) if kind.moe is None else ("moe.shared_ffn", kind.moe.shared_ffn)
        for kind, _ in shape.kinds()
    ]


def _ranks(job: Job) -> Iterator[Problem]:
    layout = job.layout
    product = f"tp={layout.tp} x cp={layout.cp} x dp={layout.dp} x pp={layout.pp} is {layout.world} ranks"
    if job.world is not None and job.world != layout.world:
        model_parallel = layout.world // layout.dp
        fits = job.world % model_parallel == 0
        yield Problem(
            "layout",
            layout.describe(),
            f"{product}, but {job.world} processes were started",
            f"start {layout.world} processes" + (f", or dp={job.world // model_parallel}" if fits else ""),
        )
    if job.devices is not None and layout.world > job.devices:
        yield Problem(
            "layout",
            layout.describe(),
            f"{product}, but there are {job.devices} devices, and each rank needs its own",
            "use a smaller layout, more machines, or train.device=cpu",
        )


def _tensor(job: Job) -> Iterator[Problem]:
    shape, tp = job.shape, job.layout.tp
    if fits_tp(shape, tp):
        return
    legal = [n for n in range(1, shape.heads + 1) if fits_tp(shape, n)]
    fix = either("layout.tp", nearest_values(tp, legal))
    for name, size in dict((("heads", shape.heads), *_mlps(shape))).items():
        if size % tp:
            yield Problem("layout.tp", tp, f"it must divide model.{name}, which is {size}", fix)
    if shape.kv_heads % tp and tp % shape.kv_heads:
        rule = f"it must divide model.kv_heads, which is {shape.kv_heads}, or be a multiple of it"
        yield Problem("layout.tp", tp, rule, fix)
    if shape.vocab < tp:
        rule = f"each rank needs a part of the vocabulary, which has {shape.vocab} entries"
        yield Problem("layout.tp", tp, rule, fix)


def _expert_axes(job: Job) -> Iterator[Problem]:
    layout, moe = job.layout, job.shape.moe
    if moe is None:
        sizes = {"ep": layout.ep if layout.ep > 1 else None, "expert_tp": job.expert_tp}
        for name, size in sizes.items():
            if size is not None:
                fix = f"layout.{name}={'1' if name == 'ep' else 'null'}, or model.moe.experts={max(2, size)}"
                yield Problem(f"layout.{name}", size, "the model has no experts", fix)
    elif moe.experts % layout.ep:
        legal = [n for n in range(1, moe.experts + 1) if _fits_ep(job, n)]
        rule = f"it must divide model.moe.experts, which is {moe.experts}"
        yield Problem("layout.ep", layout.ep, rule, either("layout.ep", nearest_values(layout.ep, legal)))
    elif layout.ep == 1 and job.expert_tp not in (None, layout.tp):
        rule = f"with layout.ep=1 experts are split over layout.tp={layout.tp}, like all other weights"
        yield Problem("layout.expert_tp", job.expert_tp, rule, "layout.expert_tp=null, or layout.ep above 1")


def _fits_ep(job: Job, ep: int) -> bool:
    layout, moe = job.layout, job.shape.moe
    tp = layout.tp if job.expert_tp is None else job.expert_tp
    return moe is not None and moe.experts % ep == 0 and layout.tp * layout.cp * layout.dp % (tp * ep) == 0


def _expert_width(job: Job) -> Iterator[Problem]:
    if job.shape.moe is None:
        return
    separate = job.layout.ep > 1 and job.expert_tp is not None
    name, size = ("expert_tp", job.expert_tp or 1) if separate else ("tp", job.layout.tp)
    width, field = job.shape.expert_ffn, "ffn" if job.shape.moe.ffn is None else "moe.ffn"
    if width % size:
        legal = [n for n in range(1, width + 1) if width % n == 0 and (separate or fits_tp(job.shape, n))]
        yield Problem(
            f"layout.{name}",
            size,
            f"it must divide the width of an expert, model.{field}={width}",
            either(f"layout.{name}", nearest_values(size, legal)),
        )


def _context(job: Job) -> Iterator[Problem]:
    heads = job.shape.heads
    tp = job.layout.tp
    cp = job.layout.cp
    if job.context == "ulysses" and heads % tp == 0 and heads % (tp * cp):
        legal = [n for n in range(1, heads // tp + 1) if heads // tp % n == 0]
        nearest_cp = " or ".join(map(str, nearest_values(cp, legal)))
        yield Problem(
            "layout.context",
            "ulysses",
            f"layout.tp={tp} x layout.cp={cp} must divide model.heads, which is {heads}: ranks do not share "
            "heads",
            f"layout.context=ring, or nearest: layout.cp={nearest_cp}",
        )


def _attention(job: Job) -> Iterator[Problem]:
    kernel, special = job.attention, job.shape.attention
    if kernel not in ("sdpa", "flex"):
        return
    rules = {
        "attention dropout needs the probabilities, which no fused kernel stores": job.shape.dropout > 0.0,
        f"torch's fused kernels do not support model.attention.softcap={special.softcap}": (
            kernel == "sdpa" and special.softcap is not None
        ),
        "FlexAttention is not used for encoders and biases by distance": (
            kernel == "flex" and bool(job.shape.encoder_layers or job.shape.relative or not special.causal)
        ),
        "layout.context=ring has its own kernels; ulysses can use FlexAttention": (
            kernel == "flex" and job.layout.cp > 1 and job.context == "ring"
        ),
    }
    for rule, broken in rules.items():
        if broken:
            yield Problem("train.attention", kernel, rule, "train.attention=auto")


def _recompute(job: Job) -> Iterator[Problem]:
    recompute = job.recompute
    if recompute.blocks is not None and recompute.mode != "full":
        yield Problem(
            "recompute.blocks",
            recompute.blocks,
            f"recompute.mode={recompute.mode} does not select a number of blocks",
            "recompute.blocks=null, or recompute.mode=full",
        )
    if recompute.memory_gib is not None and recompute.mode != "auto":
        yield Problem(
            "recompute.memory_gib",
            recompute.memory_gib,
            f"recompute.mode={recompute.mode} has no memory budget",
            "recompute.memory_gib=null, or recompute.mode=auto",
        )
    if recompute.memory_gib is None and recompute.mode == "auto":
        rule = "it needs the memory that a rank may use, and recompute.memory_gib is not set"
        yield Problem("recompute.mode", "auto", rule, "recompute.memory_gib=16, or recompute.mode=full")


def _shard_inputs(job: Job) -> Iterator[Problem]:
    recompute = job.recompute
    if not recompute.shard_inputs:
        return
    off = "recompute.shard_inputs=false"
    if recompute.mode != "full":
        rule = f"recompute.mode={recompute.mode} does not store inputs of whole blocks"
        yield Problem("recompute.shard_inputs", "true", rule, f"{off}, or recompute.mode=full")
    elif job.sequence_parallel and job.layout.tp > 1:
        rule = "layout.sequence_parallel already splits the inputs of blocks over tp"
        yield Problem("recompute.shard_inputs", "true", rule, off)


def _batch(job: Job) -> Iterator[Problem]:
    if (problem := batch_problem(job)) is not None:
        yield problem


def _pipeline(job: Job) -> Iterator[Problem]:
    if batch_problem(job) is not None:
        return  # which schedules fit depends on the batch
    pp, custom = job.layout.pp, job.custom_program
    if custom is not None and custom.steps > 1:
        yield Problem(
            "schedule.file",
            custom.name,
            f"its program is a window of {custom.steps} steps, but training itself decides when to drain",
            "a program of one step, written without --steps",
        )
        return
    if custom is not None and (custom.ranks, custom.microbatches) != (pp, job.microbatches):
        yield Problem(
            "schedule.file",
            custom.name,
            f"its program has {custom.ranks} ranks and {custom.microbatches} microbatches, the job has "
            f"layout.pp={pp} and {job.microbatches} microbatches",
            f"layout.pp={custom.ranks} and "
            f"batch.global_size={custom.microbatches * job.micro_batch * job.layout.dp}",
        )
        return
    sizes = [job.options.get(name) or 1 for name in ("chunks", "waves", "steps")]
    actions = prod([pp, job.microbatches or 1, *(size for size in sizes if isinstance(size, int))])
    if actions > MOST_ACTIONS or pp > MOST_STAGES:  # each is a Python object
        rule = f"{pp:,} ranks with {actions:,} actions, of at most {MOST_STAGES:,} with {MOST_ACTIONS:,}"
        yield Problem("schedule", job.schedule_name, rule, "a smaller layout.pp or fewer chunks")
        return
    try:
        program = job.program()
    except StrettoError as error:
        settings = {"pp": job.layout.pp, "microbatches": job.microbatches, **job.options}
        shown = ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)
        yield Problem("schedule", f"{job.schedule_name} with {shown}", error.message, error.hint)
        return
    if not program.trains:
        yield Problem("schedule", job.schedule_name, "it has no backwards, so it cannot train", "use 1f1b")
        return
    # each stage needs at least one of embedding, blocks and head
    layers, stages = job.shape.chain, program.depth
    chunks = max(1, stages // pp)
    if stages > layers:
        yield Problem(
            "layout.pp",
            pp,
            f"{stages} stages (pp x {chunks} chunks) for {layers} layers, each stage needs one "
            f"({_described(job.shape)})",
            f"largest that fits: layout.pp={layers // chunks}" if layers >= chunks else "use fewer chunks",
        )
    elif job.stage_layers is not None:
        yield from _stage_layers(job, stages)
    elif job.encoder_pp is not None and pp > 1:
        yield from _encoder_ranks(job, program)
    if program.versions:
        yield from _updates_within(job, stages)
    if job.optimiser.rate.rescheduling_steps is not None and max(job.delays()) < 2:
        late = "at most one update" if program.versions else "not"
        yield Problem(
            "optim.rate.rescheduling_steps",
            job.optimiser.rate.rescheduling_steps,
            f"gradients of schedule {job.schedule_name} on {pp} ranks are {late} late, so no rate needs "
            "rescheduling",
            "optim.rate.rescheduling_steps=null, or schedule.name=pipedream on 3 ranks or more",
        )


def _stage_layers(job: Job, stages: int) -> Iterator[Problem]:
    counts, layers = job.stage_layers or (), job.shape.chain
    shown = list(counts)
    even = [len(stage) for stage in stages_of(job.shape, job.sequence, stages, target=job.target_sequence)]
    fix = f"layout.stages={even}, or null: cut evenly"
    if min(counts, default=1) < 1:
        yield Problem("layout.stages", shown, "each stage needs at least one layer", fix)
    elif len(counts) != stages:
        rule = f"there are {len(counts)} counts and the schedule has {stages} stages"
        yield Problem("layout.stages", shown, rule, fix)
    elif sum(counts) != layers:
        rule = f"they add up to {sum(counts)}, the model has {layers} layers: "
        # embedding and head were forgotten
        if not isinstance(job.shape, UserShape) and sum(counts) == job.shape.layers:
            counted = list(counts)
            counted[0] += 1
            counted[-1] += 1
            fix = f"layout.stages={counted}, if the embedding and the head go with the first and last blocks"
        yield Problem("layout.stages", shown, rule + _described(job.shape), fix)
    elif job.encoder_pp is not None:
        rule = "layout.encoder_pp already determines how the stacks are cut"
        yield Problem("layout.stages", shown, rule, "layout.stages=null, or layout.encoder_pp=null")


def _described(shape: ModelShape) -> str:
    """Describe the layers that are cut into stages."""
    if isinstance(shape, UserShape):
        return f"those of {shape.build}"
    if not shape.encoder_layers:
        return f"embedding, {shape.layers} blocks, head"
    stacks = f"{shape.encoder_layers} of the encoder, the decoder's embedding, {shape.layers} of the decoder"
    return f"embedding, blocks: {stacks}; and head"


def _encoder_ranks(job: Job, program: Program) -> Iterator[Problem]:
    """Check that the first pipeline ranks can hold the encoder and nothing else."""
    pp, first = job.layout.pp, job.encoder_pp or 0
    if program.stages > pp:
        rule = (
            f"schedule {job.schedule_name} gives each rank {program.stages // pp} stages, some of the "
            "encoder and some of the decoder"
        )
        fix = "layout.encoder_pp=null, or a schedule with one stage a rank, such as 1f1b"
        yield Problem("layout.encoder_pp", first, rule, fix)
        return
    fewest, largest = max(1, pp - job.shape.layers - 2), min(pp - 1, job.shape.encoder_layers + 1)
    if not fewest <= first <= largest:
        rule = f"of layout.pp={pp} ranks it may have {fewest}" + (
            f" to {largest}" if largest > fewest else ""
        )
        fix = f"nearest: layout.encoder_pp={min(max(first, fewest), largest)}, or null"
        yield Problem("layout.encoder_pp", first, rule, fix)


def _updates_within(job: Job, stages: int) -> Iterator[Problem]:
    """Check what asynchronous schedules require: that each stage can update separately."""
    if stages > 1 and job.shape.encoder_layers:
        yield Problem(
            "schedule",
            job.schedule_name,
            "it updates each stage separately, but the stages of an encoder and its decoder share embeddings",
            "layout.pp=1, or a schedule that updates after the step, such as 1f1b",
        )
    elif stages > 1 and job.shape.tied:
        yield Problem(
            "model.tied",
            "true",
            f"schedule {job.schedule_name} updates each stage separately, but the first and the last would "
            "share the embedding",
            "model.tied=false, layout.pp=1, or a schedule that updates after the step, such as 1f1b",
        )
    if job.optimiser.clip is not None:
        yield Problem(
            "optim.clip",
            job.optimiser.clip,
            f"schedule {job.schedule_name} updates each stage separately, so the norm of all gradients is "
            "not available",
            "optim.clip=null, or a schedule that updates after the step, such as 1f1b",
        )


def _loss(job: Job) -> Iterator[Problem]:
    if job.loss is not None and job.loss_chunk:
        rule = f"{job.loss} takes the logits of a whole microbatch"
        yield Problem("train.loss_chunk", job.loss_chunk, rule, "train.loss_chunk=0")


def _encoder(job: Job) -> Iterator[Problem]:
    """Check settings that an encoder rules out, and those that need one."""
    layout, stacks = job.layout, job.shape.encoder_layers > 0
    if not stacks:
        if job.encoder_pp is not None:
            yield Problem(
                "layout.encoder_pp", job.encoder_pp, "the model has no encoder", "layout.encoder_pp=null"
            )
        return
    if job.encoder_pp is not None and layout.pp == 1:
        rule = "with layout.pp=1 one rank holds both stacks"
        yield Problem("layout.encoder_pp", job.encoder_pp, rule, "layout.encoder_pp=null, or layout.pp=2")
    if layout.cp > 1:
        rule = "attention of an encoder and cross-attention are not split over context-parallel ranks"
        yield Problem(
            "layout.cp", layout.cp, rule, "layout.cp=1, and layout.tp with layout.sequence_parallel"
        )
    if job.dp.mode == "server":
        rule = "a server sends samples of one sequence, but a model with an encoder has two"
        yield Problem("dp.mode", "server", rule, "dp.mode=zero1")
    if job.sequence_parallel and layout.tp > 1:
        lengths = {"data.sequence": job.sequence, "data.target_sequence": job.target_sequence}
        for name, length in lengths.items():
            if length % layout.tp:
                legal = [length // layout.tp * layout.tp, -(-length // layout.tp) * layout.tp]
                rule = f"with layout.sequence_parallel it must be a multiple of layout.tp={layout.tp}"
                yield Problem(name, length, rule, either(name, [n for n in legal if n]))


def _sequence(job: Job) -> Iterator[Problem]:
    lengths = {"data.sequence": job.sequence, "data.target_sequence": job.target_sequence}
    for name, length in list(lengths.items())[: 2 if job.shape.encoder_layers else 1]:
        if length > job.shape.sequence and not job.shape.relative:  # relative positions are unbounded
            yield Problem(
                name,
                length,
                f"the model has {job.shape.sequence} positions",
                f"{name}={job.shape.sequence}, or model.positions={length}",
            )


_SHARDED = ("zero1", "zero2", "zero3")
_TILE = 16  # rows and columns of an 8-bit product are multiples of it
_ELSE = "or a schedule that updates after the step, such as 1f1b"


def _shard_modes(job: Job) -> Iterator[Problem]:
    """Check that sizes are set only for tensors that the mode shards."""
    mode = job.dp.mode
    for field, first_mode in SHARDS.items():
        size = job.dp.shards[field]
        if size is not None and MODES.index(mode) < MODES.index(first_mode):
            sharded = field.removeprefix("shard_")
            yield Problem(
                f"dp.{field}",
                size,
                f"dp.mode={mode} shards no {sharded}",
                f"dp.{field}=null, or dp.mode={first_mode}",
            )


def _shard_sizes(job: Job) -> Iterator[Problem]:
    """Check that states are sharded over a divisor of the copies, gradients over a divisor of those ranks,
    and parameters over a divisor of those.
    """
    dp, layout = job.dp, job.layout
    if dp.mode not in _SHARDED:
        return
    largest, product = job.copies, f"layout.cp={layout.cp} x layout.dp={layout.dp}"
    for field, first_mode in SHARDS.items():
        size = dp.shards[field]
        if MODES.index(dp.mode) < MODES.index(first_mode) or size is None:
            continue
        if largest % size:
            legal = [n for n in range(1, largest + 1) if largest % n == 0]
            rule = f"it must divide {product}" + (f", which is {largest}" if " x " in product else "")
            yield Problem(f"dp.{field}", size, rule, either(f"dp.{field}", nearest_values(size, legal)))
            return  # the bound of the next size is unknown
        largest, product = size, f"dp.{field}={size}"


def _reduce_and_gather(job: Job) -> Iterator[Problem]:
    dp = job.dp
    if dp.reduce == "microbatch" and dp.mode not in ("zero2", "zero3"):
        yield Problem(
            "dp.reduce",
            "microbatch",
            f"with dp.mode={dp.mode} ranks store all gradients, which are reduced once a step",
            "dp.reduce=auto, or dp.mode=zero2",
        )
    if dp.gather != "auto" and dp.mode != "zero3":
        rule = f"dp.mode={dp.mode} does not shard parameters"
        yield Problem("dp.gather", dp.gather, rule, "dp.gather=auto, or dp.mode=zero3")


def _offload(job: Job) -> Iterator[Problem]:
    dp = job.dp
    if dp.offload_parameters != "none" and dp.mode != "zero3":
        yield Problem(
            "dp.offload_parameters",
            dp.offload_parameters,
            f"dp.mode={dp.mode} does not shard parameters and uses them all the time",
            "dp.offload_parameters=none, or dp.mode=zero3",
        )
    away = [f"dp.{name}" for name in ("offload", "offload_parameters") if getattr(dp, name) == "nvme"]
    if away and not dp.path:
        yield Problem("dp.path", "null", f"{away[0]}=nvme needs a folder", "dp.path=/a/folder/on/a/fast/disk")


def _versions(job: Job) -> Iterator[Problem]:
    """Check settings that conflict with a schedule that updates each stage in the middle of the step."""
    dp = job.dp
    needs_whole_weights = dp.mode == "zero3" or dp.reduce == "microbatch"
    if not needs_whole_weights or not _has_versions(job):
        return
    within = f"schedule {job.schedule_name} updates each stage separately, in the middle of the step,"
    if dp.mode == "zero3":
        yield Problem(
            "dp.mode",
            "zero3",
            f"{within} and also computes with older weights, which cannot be gathered from shards",
            f"dp.mode=zero2, {_ELSE}",
        )
    elif dp.mode == "zero2" and dp.reduce == "microbatch":
        rule = f"{within} and reduces gradients for each update"
        yield Problem("dp.reduce", "microbatch", rule, f"dp.reduce=auto, {_ELSE}")


def _has_versions(job: Job) -> bool:
    try:
        return bool(job.program().versions)
    except StrettoError:
        return False  # the rules of batches and schedules report the error


def _precision(job: Job) -> Iterator[Problem]:
    """Check fields that are meaningful only for 16-bit types; float64 is for proofs and accepts any job."""
    precision, plain = job.precision, Precision()
    if precision.dtype == "float32":
        rule = "with train.dtype=float32 weights and gradients have one type"
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
                rule = f"train.dtype={precision.dtype} needs no loss scaling"
                yield Problem(
                    f"precision.{field}", value, rule, f"precision.{field}={default}, or train.dtype=float16"
                )


def _keep(job: Job) -> Iterator[Problem]:
    """Check that every pattern in addition to the defaults matches a parameter."""
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
    """Check the sizes of a rank's 8-bit products, and reject layouts whose scales would differ from those of
    one process: key heads that several ranks hold, and padding.
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
        rule = f"data.sequence={job.sequence} must be a multiple of {unit}: padding would affect the scales"
        yield Problem("precision.fp8", "tensor", rule, "precision.fp8=row, or another data.sequence")
        return
    # input and output features of a block's linears on one rank; rounded if tp does not divide them
    keys = max(shape.kv_heads // tp, 1) * shape.head_dim
    heads = shape.attention_width // tp
    ffn = shape.ffn if shape.moe is None else shape.moe.shared_ffn
    width = {"inner width of the MLP": ffn // tp} if ffn else {}
    sides = {
        "model.hidden": shape.hidden,
        "width of attention": heads,
        "queries, keys and values together": heads + 2 * keys,
        **width,
    }
    for field, size in sides.items():
        if size % _TILE:
            yield Problem(
                "precision.fp8",
                job.precision.fp8,
                f"the {field} of a rank must be a multiple of {_TILE} and is {size}",
                f"precision.fp8=none, other sizes of the model, or another layout.tp than {tp}",
            )
            return


def _freeze(job: Job) -> Iterator[Problem]:
    """Check that every pattern freezes a parameter and that some parameter remains trained."""
    if job.trained.everything:
        return
    names = list(parameter_shapes(job.shape))
    for pattern in job.trained.unmatched(names):
        closest = nearest(pattern, names)
        fix = f"did you mean {closest}?" if closest else "patterns are like embed.* or blocks.0.*"
        yield Problem("finetune.freeze", pattern, "it matches no parameter of the model", fix)
    if not any(map(job.trained, names)):
        rule = "it leaves no parameter to train"
        yield Problem("finetune.freeze", list(job.trained.freeze), rule, "freeze fewer, such as embed.*")


def _adapters(job: Job) -> Iterator[Problem]:
    """Check that every target is a linear of some block."""
    shape, lora = job.shape, job.shape.lora
    if lora is None:
        return
    modules = {name.rpartition(".")[0] for kind, _ in shape.kinds() for name in block_shapes(kind)}
    for target in lora.unmatched(modules):
        names = dict.fromkeys(name for module in sorted(modules) for name in PROJECTIONS.get(module, ()))
        rule = "no block of the model has it" + ("; routed experts take no adapters" if shape.moe else "")
        yield Problem("lora.targets", target, rule, f"choose from {', '.join(names)}")
    if job.precision.fp8 != "none" and not job.framework.torch_loss:  # Transformer Engine's do
        rule = "linears with adapters do not support 8-bit products"
        yield Problem("precision.fp8", job.precision.fp8, rule, "precision.fp8=none, or lora.rank=null")


def _graphs(job: Job) -> Iterator[Problem]:
    """Check that a graph can be captured: it has the memory of one microbatch, and nothing in it waits for
    the host or depends on values.
    """
    if job.graphs != "off":
        for rule, fix in _graph_obstacles(job):
            yield Problem("train.graphs", job.graphs, rule, f"train.graphs=off, or {fix}")


def _graph_obstacles(job: Job) -> Iterator[tuple[str, str]]:
    """Yield each broken rule and a setting that would satisfy it."""
    layout, shape = job.layout, job.shape
    if layout.pp > 1:
        yield (
            f"layout.pp={layout.pp} has several microbatches in flight, and a graph captures one",
            "layout.pp=1",
        )
    elif batch_problem(job) is None:
        yield from _program_obstacles(job)
    if layout.cp > 1:
        yield (
            f"layout.cp={layout.cp} exchanges keys and values in messages, which are not captured",
            "layout.cp=1",
        )
    if shape.moe is not None:
        yield (
            "the host counts the tokens of each expert, and a graph cannot wait for the host",
            "a dense model",
        )
    if shape.encoder_layers:
        yield "the decoder reads samples of another length with each microbatch", "a model without an encoder"
    if shape.drops:
        yield (
            "the host computes the seed of each sample's dropout, which a graph would repeat",
            "model.dropout=0 and lora.dropout=0",
        )
    if job.dp.mode == "zero3":
        yield "dp.mode=zero3 frees gathered weights, and a graph needs fixed memory", "dp.mode=zero2"
    if job.dp.mode == "server":
        yield (
            "dp.mode=server was never tested with graphs",
            "dp.mode=ddp",
        )


def _program_obstacles(job: Job) -> Iterator[tuple[str, str]]:
    """Yield obstacles in the order of a step's actions and in the time of gradient reductions."""
    try:
        program = job.program()
    except StrettoError:
        return  # the rule of schedules reports the error
    if not in_turn(program):
        yield (
            f"schedule {job.schedule_name} does not finish a microbatch before it begins the next",
            "schedule.name=1f1b",
        )
    elif job.dp.mode == "zero2" and reduction(program, "zero2", job.dp.reduce) == "microbatch":
        yield (
            "dp.mode=zero2 reduces gradients in the backward of each microbatch by hooks, which a graph does "
            "not run",
            "dp.reduce=step",
        )


def _user_model(job: Job) -> Iterator[Problem]:
    """Refuse what needs more of a model than its layers, if it is from a user's file."""
    layout, mode = job.layout, job.recompute.mode
    nvme = "nvme" in (job.dp.offload, job.dp.offload_parameters)
    split = "its layers are not split within: that needs their kind and sizes"
    inside = "it is a setting of Stretto's own layers"
    stored = "what its layers store is unknown; `full` recomputes whole layers"
    files = "the space that files need is counted from sizes that are unknown"
    matrices = "it is for matrices of blocks, and which parameters are these is unknown"
    searched = "it is searched for with the times of the layers, which are unknown"
    late = "it updates each stage separately, and some layers share parameters"
    searches = job.custom_program is None and is_searched(job.schedule)
    shares = job.shape.tied and layout.pp > 1 and _has_versions(job)
    # the field, its value, whether it is refused, why, and the nearest value
    settings: list[tuple[str, object, bool, str, str]] = [
        ("layout.tp", layout.tp, layout.tp > 1, split, "1, with layout.dp or layout.pp"),
        ("layout.cp", layout.cp, layout.cp > 1, split, "1, with layout.dp or layout.pp"),
        ("layout.ep", layout.ep, layout.ep > 1, split, "1, with layout.dp or layout.pp"),
        ("layout.expert_tp", job.expert_tp, job.expert_tp is not None, split, "null"),
        ("layout.encoder_pp", job.encoder_pp, job.encoder_pp is not None, "it has no encoder", "null"),
        ("precision.fp8", job.precision.fp8, job.precision.fp8 != "none", inside, "none"),
        ("train.attention", job.attention, job.attention != "auto", inside, "auto"),
        ("train.compile", job.compile, job.compile != "off", inside, "off"),
        ("train.graphs", job.graphs, job.graphs != "off", "it was never tested with graphs", "off"),
        ("train.loss_chunk", job.loss_chunk, bool(job.loss_chunk), inside, "null"),
        ("recompute.mode", mode, mode in ("selective", "auto"), stored, "full"),
        ("dp.offload", "nvme", nvme, files, "cpu"),
        ("optim.name", "muon", job.optimiser.name == "muon", matrices, "adamw, or a class of your own"),
        ("schedule.name", job.schedule, searches, searched, "1f1b, or zb-h1"),
        ("schedule.name", job.schedule_name, shares, late, "1f1b, or another that updates after the step"),
    ]
    for field, value, refused, rule, fix in settings:
        if refused:
            from_file = f"the model is from a file, {job.shape.title}: "
            yield Problem(field, value, f"{from_file}{rule}", f"{field}={fix}")


def _optimiser(job: Job) -> Iterator[Problem]:
    yield from optimiser_problems(job.optimiser)


RULES: tuple[Rule, ...] = (
    _ranks,
    _tensor,
    _expert_axes,
    _expert_width,
    _context,
    _attention,
    _recompute,
    _shard_inputs,
    _batch,
    _pipeline,
    _loss,
    _encoder,
    _sequence,
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
    _graphs,
    _optimiser,
)
# those that read sizes of a transformer
_RULES_OF_SIZES: tuple[Rule, ...] = (
    _tensor,
    _expert_axes,
    _expert_width,
    _context,
    _attention,
    _eight_bits,
    _adapters,
    _graphs,
)
