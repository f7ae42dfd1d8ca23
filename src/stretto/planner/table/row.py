"""From a row of a table of measured runs to a job, its cluster, how it ran, and what was measured.

What a row leaves open takes the default of its time and software, and every default is told. A row that
cannot be predicted raises the reason; nothing is skipped silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.layout.shards import Mode
from stretto.planner.execution import Running
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Device
from stretto.planner.table.cells import Cells
from stretto.planner.table.layout import Batch, batch_of, gpus_of, layout_of
from stretto.planner.table.measured import Measured, device_precision, infer_recompute, measured_of
from stretto.planner.table.model import known_model, shape_of
from stretto.planner.table.words import (
    is_early,
    mode_of,
    precision_of,
    recompute_of,
    schedule_of,
    software_of,
)
from stretto.planner.time.software import habits_of
from stretto.spec.data_parallel import MODES, DataParallel, Precision
from stretto.spec.job import Job, Recompute, Wanted
from stretto.spec.parameters import count_parameters
from stretto.spec.rules import problems
from stretto.spec.shape import ModelShape

_MEGATRON = 128  # a rank's share of the vocabulary is a multiple of it
_SEQUENCE = 2048  # tokens of a sample of a model that is not known
_LONGEST = 1_000_000  # forwards of a replica's step that are replayed
# where the runs of a source took place, by a word of it and the start of the device's name
_PLACES = {
    ("bigscience", "v100-32gb"): "jean-zay-v100-32gb",
    ("bigscience", "v100-16gb"): "jean-zay-v100-16gb",
    ("mosaicml", "a100-80gb"): "mosaicml-a100-80gb",
    ("mosaicml", "a100-40gb"): "mosaicml-a100-40gb",
    ("torchtitan", "h100-96gb"): "torchtitan-h100-96gb",
    ("kwai", "h800"): "kwai-h800",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row that can be predicted.

    Attributes:
        cells: as the table has them, by its own column names.
        measured: of the run; its seconds are of this job's batch.
        defaults: name to what was taken and why, for all that the row leaves open.
        repeat: what has to be equal for two rows to be measurements of one layout.
        group: what has to be equal for two layouts to be alternatives.
    """

    cells: Mapping[str, str]
    job: Job
    cluster: Cluster
    running: Running
    measured: Measured
    defaults: Mapping[str, str]

    @property
    def group(self) -> tuple[object, ...]:
        job, cluster = self.job, self.cluster
        whole = (job.global_batch, job.sequence, job.layout.world, job.precision)
        return (job.shape, cluster.name, *whole)

    @property
    def repeat(self) -> tuple[object, ...]:
        job = self.job
        return (
            job.layout,
            job.micro_batch,
            job.schedule,
            tuple(sorted(job.options.items())),
            job.sequence_parallel,
            job.recompute,
            job.dp,
            job.context,
            self.running,
        )

    @property
    def hardware(self) -> str:
        """The device's name."""
        return self.cluster.device.name


def read_row(
    cells: Mapping[str, str], cluster: Cluster | None = None, shape: ModelShape | None = None
) -> Row:
    """What a row means.

    Args:
        cells: by the tables' column names or other names that are known.
        cluster: in place of the row's device in its usual node.
        shape: in place of the row's model.

    Raises:
        StrettoError: why it cannot be predicted.
    """
    given = Cells(cells)
    _refuse(given)
    gpus = gpus_of(given)
    machine = _cluster(given, gpus) if cluster is None else cluster.sized(gpus)
    early = is_early(given, machine.device)
    sequence = given.whole("seq") or _sequence(given)
    model = shape_of(given, sequence, early) if shape is None else _stretched(shape, sequence)
    layout = layout_of(given, gpus, machine.node, model)
    batch = batch_of(given, layout, sequence)
    precision, words = precision_of(given, machine.device, early)
    mode = _recompute(given, model, sequence, batch, gpus)
    schedule, options = schedule_of(given, model, layout.pp)
    dp = _sharing(cells=given, shape=model, layout=layout, cluster=machine, precision=precision, early=early)
    measured = measured_of(
        cells=given,
        shape=model,
        sequence=sequence,
        batch=batch.told,
        gpus=gpus,
        mode=mode,
        peak=machine.device.peak(device_precision(words)),
    )
    if measured.seconds is not None and batch.samples != batch.told:
        measured = replace(measured, seconds=measured.seconds * batch.samples / batch.told)
    job = Job(
        shape=model,
        layout=layout,
        global_batch=batch.samples,
        micro_batch=batch.micro,
        sequence=sequence,
        schedule=schedule,
        options=options,
        expert_tp=layout.expert_tp,
        sequence_parallel=_split_sequence(given, layout, mode, early),
        context="ulysses" if "ulysses" in given.words("context") else "ring",
        recompute=Recompute(mode, shard_inputs=_split_inputs(given, layout, mode, dp, early)),
        dp=dp,
        precision=precision,
    )
    running = _running(given, job, machine.device, early)
    _check(job)
    return Row(
        cells=cells, job=job, cluster=machine, running=running, measured=measured, defaults=dict(given.taken)
    )


def _refuse(cells: Cells) -> None:
    """Raise for what no step of training is."""
    notes = f"{cells.words('notes')} {cells.words('model')}"
    if re.search(r"\blayer time\b|single layer", notes):
        raise StrettoError("the time is of one layer, not of a step", hint="predict takes whole steps")
    if re.search(r"\b(q?lora|peft|adapter)\b", notes):
        raise StrettoError(
            "most weights are frozen (LoRA), which is not modelled",
            hint="predict takes training of all weights",
        )
    if re.search(r"\b(mamba|ssm|state[- ]space|zamba|jamba)\b|nemotron-?h\b", notes):
        raise StrettoError(
            "it has state-space layers, which are not modelled",
            hint="predict takes transformers of equal blocks",
        )
    if re.search(r"\b(inference|decoding|generation) (run|time|throughput)\b", notes):
        raise StrettoError("the row is no training run", hint="predict takes training steps")


def _cluster(cells: Cells, gpus: int) -> Cluster:
    name = cells.text("gpu")
    if name is None:
        raise StrettoError("the row has no GPU", hint="fill in gpu, as in A100-80GB-SXM")
    found = find_cluster(name)
    for (word, device), place in _PLACES.items():
        if word in cells.words("source") and found.device.name.startswith(device):
            found = find_cluster(place)
    node = cells.whole("node_size")
    if node is None:
        match = re.search(r"(\d+) gpus (?:per|a|/) ?node", cells.words("notes"))
        node = int(match[1]) if match else None
    if node is not None and node != found.node:
        found = replace(
            found, node=node, outer=replace(found.outer, bandwidth=found.outer.bandwidth * found.node / node)
        )
    return found.sized(gpus)


def _sequence(cells: Cells) -> int:
    """What a known model was pretrained with; of others the usual one."""
    known = known_model(cells.text("model") or "")
    return cells.take("seq", _SEQUENCE if known is None else known.sequence, "of the model")


def _stretched(shape: ModelShape, sequence: int) -> ModelShape:
    return replace(shape, sequence=sequence) if sequence > shape.sequence else shape


def _recompute(cells: Cells, shape: ModelShape, sequence: int, batch: Batch, gpus: int) -> Wanted:
    told = recompute_of(cells)
    if told is not None:
        return told
    counted = infer_recompute(cells, shape, sequence, batch.told, gpus)
    if counted is not None:
        return cells.take("recompute", counted, "its TFLOP/s count it")
    return cells.take("recompute", "none")


def _split_sequence(cells: Cells, layout: Layout, mode: Wanted, early: bool) -> bool:
    """Sequence parallelism came with selective recomputation (arXiv 2205.05198)."""
    told = cells.flag("sp")
    if told is not None:
        return told
    if layout.tp == 1:
        return False
    return bool(cells.take("sp", int(mode == "selective" or not early), "of its time"))


def _split_inputs(cells: Cells, layout: Layout, mode: Wanted, dp: DataParallel, early: bool) -> bool:
    """Megatron-DeepSpeed with ZeRO 3 kept the inputs of recomputed blocks in parts (Rajbhandari et al. 2020,
    section 6.1).
    """
    split = early and dp.mode == "zero3" and layout.tp > 1 and mode == "full" and not cells.flag("sp")
    if split:
        cells.take("inputs", "split over tp", "partitioned activations")
    return split


def _sharing(
    cells: Cells, shape: ModelShape, layout: Layout, cluster: Cluster, precision: Precision, early: bool
) -> DataParallel:
    """How states are shared. What is not told: Megatron-Core's sharded optimiser where software is of its
    time; and where states would not fit a device, the least sharing with which they do, since it did run.
    """
    mode = mode_of(cells)
    if mode is None:
        copies = layout.cp * layout.dp
        named: Mode = "ddp" if early or copies == 1 else "zero1"
        if "megatron" not in cells.words("notes") and "zero" in cells.words("notes") and layout.pp == 1:
            named = "zero3"
        least = _least_sharing(shape, layout, cluster, precision)
        chosen = named if MODES.index(named) >= MODES.index(least) else least
        mode = DataParallel(mode=chosen)
        if copies > 1:
            cells.take("zero", MODES.index(chosen) - 1, "of its time" if chosen == named else "what fits")
    offload = cells.words("offload")
    notes = cells.words("notes")
    full = "full offload" in notes and "offl=" not in notes
    if offload not in ("", "none", "no", "0", "false") or "opt offl=y" in notes or full:
        mode = replace(mode, offload="cpu")
    if mode.mode == "zero3" and ("par offl=y" in notes or full):
        mode = replace(mode, offload_parameters="cpu")
    return mode


def _least_sharing(shape: ModelShape, layout: Layout, cluster: Cluster, precision: Precision) -> Mode:
    """The least sharing of states that leaves three tenths of a device's memory to all else."""
    parameters = count_parameters(shape).total / (layout.tp * layout.pp * layout.ep)
    copies = layout.cp * layout.dp
    gradient = 2 if precision.gradients == "same" else 4
    room = 0.7 * cluster.device.memory / parameters
    if room >= 14 + gradient:
        return "ddp"
    if room >= 2 + gradient + 12 / copies:
        return "zero1"
    return "zero2" if room >= 2 + (gradient + 12) / copies else "zero3"


def _running(cells: Cells, job: Job, device: Device, early: bool) -> Running:
    """How it ran: attention, padding of the vocabulary, reductions beside the backward."""
    attention = "explicit" if early else "flash"
    if not cells.words("attention"):
        cells.take("attention", attention, "of its time")
    words = cells.words("notes")
    sharded = job.dp.mode == "zero3"
    overlap = sharded or not early
    if re.search(r"not overlapped|no gradient bucketing|no overlap", words):
        overlap = False
    return Running(
        attention=attention,
        vocab_multiple=1 if sharded else _MEGATRON,
        fused_loss=_fuses_loss(cells, early),
        overlap=overlap,
        blocking=early,
        scattered=True,
        habits=habits_of(cells.take("habits", software_of(cells, device, early), "of its time")),
    )


def _fuses_loss(cells: Cells, early: bool) -> bool:
    """Whether the loss keeps logits in 16 bits only. llm-foundry's does, by default since March 2023
    (mosaicml/examples, pull request 251); Megatron's and NeMo's keeps probabilities in float32, fused or not.
    """
    return not early and bool(
        re.search(r"llm-foundry|\bmpt-", f"{cells.words('source')} {cells.words('model')}")
    )


def _check(job: Job) -> None:
    """Raise the first rule that the job breaks; before its program is made, whether that has an end."""
    actions = (job.microbatches or 1) * job.layout.pp * int(job.options.get("chunks") or 1)
    if actions > _LONGEST:
        raise StrettoError(
            f"{actions:,} forwards in a step of {job.microbatches:,} microbatches",
            hint=f"at most {_LONGEST:,}: check global_batch and micro_batch",
        )
    found = problems(job)
    if found:
        raise found[0]
