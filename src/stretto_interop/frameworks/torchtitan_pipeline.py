"""torchtitan's pipelines: microbatches, stages, and schedules by the names that torch has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

from stretto.errors import Problem, StrettoError
from stretto.program import PLAIN
from stretto.program.text import check_torch, from_csv, to_csv
from stretto.program.text.torchtitan import modules_of_stages, schedule_class
from stretto.run.config.job import program_file
from stretto.spec.data_parallel import DataParallel
from stretto.spec.job import Job
from stretto_interop.frameworks.fields import JOB, MODEL, RUN, JobValues, name_of
from stretto_interop.frameworks.mapping import Settings, Values, refused
from stretto_interop.frameworks.torchtitan_model import read_model

OPTIONS = "chunks group waves vertical_sync memory placement split objective effort"
PIPELINE = (
    "pipeline_parallel_schedule pipeline_parallel_schedule_csv module_fqns_per_model_part "
    "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
    "pipeline_parallel_layers_per_stage pipeline_parallel_split_points"
)


def replicas(settings: Settings) -> int:
    shard = settings.get("parallelism.data_parallel_shard_degree", 1)
    return settings.get("parallelism.data_parallel_replicate_degree", 1) * shard


def read_batch(settings: Settings) -> Values:
    dp, local = replicas(settings), settings.get("training.local_batch_size", 8)
    global_batch = settings.get("training.global_batch_size", -1)
    if global_batch < 0:
        global_batch = local * dp
    pp = settings.get("parallelism.pipeline_parallel_degree", 1)
    if global_batch % (local * dp):
        rule = f"is no multiple of local_batch_size={local} x {dp} replicas"
        nearest_batch = max(1, round(global_batch / (local * dp))) * local * dp
        raise StrettoError(
            f"training.global_batch_size={global_batch} {rule}", hint=f"nearest: {nearest_batch}"
        )
    if pp > 1 and global_batch != local * dp:
        raise StrettoError(
            f"a step is {global_batch // (local * dp)} pipelines one after the other, "
            "which is not modelled here",
            hint=f"training.local_batch_size={global_batch // dp}: one pipeline of all microbatches",
        )
    micro = settings.get("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    return {JOB.global_batch: global_batch, JOB.micro_batch: micro}


_SINGLE = {"1f1b": "1F1B", "gpipe": "GPipe"}
_MULTI = {
    "bfs": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
_V = ("ZBVZeroBubble", "DualPipeV")


def write_pipeline(values: JobValues) -> Settings:
    job, file = values.job, values[RUN.schedule.file]
    if isinstance(file, str):
        try:
            job = replace(job, custom_program=program_file(file))
        except Problem as problem:
            raise problem.within("schedule") from None
    if job.layout.pp == 1:
        if job.custom_program is not None or job.schedule != PLAIN:
            raise refused(
                JOB.schedule, job.schedule_name, "without a pipeline microbatches run in turn", [PLAIN]
            )
        return {}
    if job.microbatches is None:
        return {}  # the rule of batches refuses it
    program = replace(job, dp=DataParallel()).program()  # torch gathers by itself
    try:
        check_torch(program)
        kind = schedule_class(program)
    except StrettoError as error:
        raise Problem("schedule.name", job.schedule_name, error.message, error.hint) from None
    name = _torchs_name(job)
    counts = [len(stage) for stage in job.stages(program.depth)]
    if counts[0] == 1 and job.optimiser.weight_decay:
        rule = "torchtitan's optimiser wants a norm in each stage, and the first has the embedding alone"
        raise Problem("layout.stages", counts, rule, "another block in the first stage")
    return {
        "parallelism.pipeline_parallel_schedule": name or kind,
        **({} if name else {"parallelism.pipeline_parallel_schedule_csv": to_csv(program)}),
        "parallelism.module_fqns_per_model_part": modules_of_stages(counts),
    }


def _torchs_name(job: Job) -> str | None:
    """The name under which torch makes the same program; None: it has none."""
    pp, count = job.layout.pp, job.microbatches or 0
    if job.custom_program is not None:
        return None
    name = job.schedule
    if name in _SINGLE:
        return _SINGLE[name]
    if name == "dualpipe-v" and count < 2 * pp:
        return None
    if name in ("interleaved", "interleaved-zb"):
        rounds = max(1, count // pp)
        group = job.options.get("group") or min(pp, count)
        if count % rounds or group != count // rounds:
            return None
    return _MULTI.get(name)


def read_pipeline(settings: Settings) -> Values:
    pp = settings.get("parallelism.pipeline_parallel_degree", 1)
    if pp == 1:
        return {}
    csv = settings.get("parallelism.pipeline_parallel_schedule_csv")
    name = settings.get("parallelism.pipeline_parallel_schedule", "1F1B")
    layers = _layers(settings)
    stages = _stages(
        settings, layers, pp, single=not csv and name.lower() in {s.lower() for s in _SINGLE.values()}
    )
    values: dict[Any, Any] = {JOB.stage_layers: tuple(stages)}
    if csv:
        return {**values, RUN.schedule.file: from_csv(csv, name="csv")}
    schedules = {torchs.lower(): schedule_here for schedule_here, torchs in (_SINGLE | _MULTI).items()}
    if name.lower() not in schedules:
        raise StrettoError(
            f"parallelism.pipeline_parallel_schedule is {name}",
            hint=f"what is known: {', '.join(_MULTI.values())}",
        )
    values[JOB.schedule] = schedule_here = schedules[name.lower()]
    if schedule_here in ("bfs", "interleaved", "interleaved-zb"):
        values[RUN.schedule.chunks] = len(stages) // pp
    if schedule_here in ("interleaved", "interleaved-zb"):
        batch = read_batch(settings)
        count = batch[JOB.global_batch] // (replicas(settings) * batch[JOB.micro_batch])
        rounds = max(1, count // pp)
        if count // rounds != min(pp, count):
            values[RUN.schedule.group] = count // rounds
    return values


def _layers(settings: Settings) -> int:
    """Blocks of the model; 0: it is said beside the config."""
    return int(read_model(settings).get(name_of(MODEL.layers), settings.get("model.layers", 0)))


def _stages(settings: Settings, layers: int, pp: int, *, single: bool) -> list[int]:
    """Layers of each stage, embedding and head among them, as torchtitan cuts the model."""
    names: Sequence[Sequence[str]] | None = settings.get("parallelism.module_fqns_per_model_part")
    if names is not None:
        return _counted(names)
    first = settings.get("parallelism.pipeline_parallel_first_stage_less_layers", 1)
    last = settings.get("parallelism.pipeline_parallel_last_stage_less_layers", 1)
    each = settings.get("parallelism.pipeline_parallel_layers_per_stage")
    points = settings.get("parallelism.pipeline_parallel_split_points")  # until 0.1
    if points:
        starts = [0, *(1 + int(point.rpartition(".")[2]) for point in points), layers + 2]
        return [stop - start for start, stop in pairwise(starts)]
    global_batch = layers + first + last
    count = pp * (1 if single else 2) if each is None else ceil(global_batch / each)
    size, more = divmod(global_batch, count)
    sizes = [size + (at < more) for at in range(count)]
    sizes[0] += 1 - first
    sizes[-1] += 1 - last
    return sizes


def _counted(names: Sequence[Sequence[str]]) -> list[int]:
    """Layers of each stage by its modules' names, which must be the model in order."""
    counts = list[int]()
    for stage in names:
        blocks = [name for name in stage if name.startswith("layers.")]
        ends = ("tok_embeddings" in stage) + bool({"lm_head", "output"} & set(stage))
        counts.append(len(blocks) + ends)
    order = [name for stage in names for name in stage if name.startswith("layers.")]
    if order != [f"layers.{layer}" for layer in range(len(order))]:
        raise StrettoError(
            "parallelism.module_fqns_per_model_part has layers out of order",
            hint="layers.0, layers.1, ... each once, stage after stage",
        )
    return counts
