"""What the words of a row mean: software's age, precision, recomputation, schedule, sharing of states."""

from __future__ import annotations

import re
from typing import Any, Literal

from stretto.errors import StrettoError, nearest
from stretto.planner.machines.device import Device
from stretto.planner.table.cells import Cells
from stretto.program import names
from stretto.spec.data_parallel import DataParallel, Precision
from stretto.spec.job import Wanted
from stretto.spec.shape import ModelShape

# FlashAttention came in June 2022 (arXiv 2205.14135) and into Megatron in March 2023
_FUSED_SINCE = 2023 + 2 / 12
# FlashAttention-2 came in July 2023 (arXiv 2307.08691)
_FASTER_SINCE = 2023 + 7 / 12
# and FlashAttention-3 in July 2024 (arXiv 2407.08608), cuDNN's kernels in between
_TUNED_SINCE = 2024 + 5 / 12
_EARLY_DEVICES = ("v100", "p100", "t4")
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


def year_of(text: str) -> float | None:
    """The date in a row's words, in years: that of an arXiv number, of NeMo's container, of a day, or a month
    by name.
    """
    arxiv = re.search(r"arxiv[: ]*(\d\d)(\d\d)\.\d{4,5}", text, re.IGNORECASE)
    if arxiv:
        return 2000 + int(arxiv[1]) + (int(arxiv[2]) - 1) / 12
    container = re.search(r"\bnemo ?(\d\d)\.(\d\d)\b", text, re.IGNORECASE)
    if container:
        return 2000 + int(container[1]) + (int(container[2]) - 1) / 12
    day = re.search(r"\b(20\d\d)-(\d\d)-\d\d", text)
    if day:
        return int(day[1]) + (int(day[2]) - 1) / 12
    named = re.search(rf"\b({'|'.join(_MONTHS)})[a-z]* (20\d\d)", text, re.IGNORECASE)
    if named:
        return int(named[2]) + _MONTHS.index(str(named[1]).lower()) / 12
    return None


def is_early(cells: Cells, device: Device) -> bool:
    """Whether the software was older than fused attention kernels: by the kernel, the device, the date, and
    at last the precision.
    """
    kernel = attention_words(cells)
    if kernel:
        return not _fused(kernel)
    if device.name.startswith(_EARLY_DEVICES) or _by_megatron(cells, device):
        return True
    year = year_of(f"{cells.words('source')} {cells.words('notes')}")
    if year is not None:
        return year < _FUSED_SINCE
    return cells.words("precision") in ("fp16", "float16") and device.name.startswith("a100")


def _by_megatron(cells: Cells, device: Device) -> bool:
    """Whether it is a GPT split by Megatron on A100, where fused attention had to be asked for."""
    split = any((cells.whole(axis) or 1) > 1 for axis in ("tp", "pp"))
    return split and device.name.startswith("a100") and cells.words("model").startswith("gpt")


def software_of(cells: Cells, device: Device, early: bool) -> str:
    """The name of its habits (`cost.time.habits`): by the kernel of attention, the date, and who wrote it. A
    page's date tells when it was last edited, not when its runs were; those on A100 whose date is not known
    are taken for older than FlashAttention-2.
    """
    if early:
        return "unfused"
    words = f"{cells.words('source')} {cells.words('notes')}"
    kernel = attention_words(cells)
    if any(new in kernel for new in ("3", "cudnn", "te")):
        return "tuned"
    year = year_of(re.sub(r"doc version \S+", "", words))
    old = device.name.startswith("a100") and bool(cells.words("source")) and "2" not in kernel
    if year is None and old:
        return "fused"
    if year is not None and year < _FASTER_SINCE:
        return "fused"
    if re.search(r"(?<!no )(?<!without )\b(torch\.?)?compiled?\b(?! ?[=:]? ?(n|no|off|false)\b)", words):
        return "compiled"
    vendor = re.search(r"nemo|megatron|transformer[ -]?engine", words)
    return "tuned" if vendor and (year is None or year >= _TUNED_SINCE) else "today"


def attention_words(cells: Cells) -> str:
    """The kernel of attention, from its cell or from the notes, as in "attn triton"."""
    if cells.words("attention"):
        return cells.words("attention")
    match = re.search(
        r"\battn[ =_](?:impl[ =])?([a-z0-9_]+)|\b(flash[- ]?attention|flash[- ]?attn)", cells.words("notes")
    )
    return (match[1] or match[2]) if match else ""


def _fused(kernel: str) -> bool:
    return any(
        word in kernel for word in ("flash", "triton", "fused", "cudnn", "sdpa", "fa2", "fa3", "ring", "te")
    )


def precision_of(cells: Cells, device: Device, early: bool) -> tuple[Precision, str]:
    """Types of weights and gradients, and in words what was read.

    Raises:
        StrettoError: no such precision.
    """
    words = cells.words("precision")
    if not words:
        half = "float16" if device.name.startswith(_EARLY_DEVICES) else "bfloat16"
        words = cells.take("precision", half, "of this device")
    flat = re.sub(r"[\s_\-]", "", words)
    if any(w in flat for w in ("fp8", "float8", "8bit")):
        return Precision(dtype="bfloat16", gradients=_gradients(cells), fp8="tensor"), "fp8"
    if "fp4" in flat:
        cells.take("precision", "fp8", f"no peak for {words}")
        return Precision(dtype="bfloat16", gradients=_gradients(cells), fp8="tensor"), "fp8"
    if "fp16" in flat or "float16" in flat.replace("bfloat16", "") or flat in ("half", "16"):
        both = "bf16" in flat  # Megatron's 16-bit training of 2022 adds gradients in float32
        return Precision(dtype="float16", gradients="float32" if both or not early else "same"), "float16"
    if "bf16" in flat or "bfloat16" in flat:
        return Precision(dtype="bfloat16", gradients=_gradients(cells)), "bfloat16"
    if any(w in flat for w in ("fp32", "float32", "tf32", "single")):
        return Precision(dtype="float32"), "float32"
    raise StrettoError(f"precision {words!r} is not known", hint="as in bf16, fp16, fp8 or fp32")


def _gradients(cells: Cells) -> Literal["float32", "same"]:
    """In what gradients are added up and reduced: 16 bits in pure FSDP and in NeMo's recipes."""
    pure = "mixed_precision pure" in cells.words("notes")
    if "nemo" in cells.words("source"):
        cells.take("gradients", "bfloat16", "of NeMo's recipes")
        return "same"
    return "same" if pure else "float32"


def recompute_of(cells: Cells) -> Wanted | None:
    """What the backward computes again; None: not told.

    Raises:
        StrettoError: no such way.
    """
    words = cells.words("recompute")
    if not words or "not stated" in words:
        return None
    first = re.split(r"[\s(:,]", words)[0]
    if first in ("none", "no", "off", "false", "0", "n"):
        return "none"
    if first in ("selective", "attention", "core_attn", "sel", "op", "sac", "selective_op"):
        return "selective"
    if first in ("full", "yes", "on", "true", "1", "y", "block", "uniform", "all", "layer"):
        return "full"
    near = nearest(first, ("none", "selective", "full"))
    raise StrettoError(
        f"recompute {words!r} is not known",
        hint=f"did you mean {near!r}?" if near else "none, selective or full",
    )


# as papers and frameworks call them: the name here
_SCHEDULES = {
    "zb-2p": "zb-h2",
    "zb-1p": "zb-h1",
    "zbv": "zb-v",
    "zbvzerobubble": "zb-v",
    "zbh1": "zb-h1",
    "zbh2": "zb-h2",
    "1f1b-i": "interleaved",
    "interleaved1f1b": "interleaved",
    "interleaved-1f1b": "interleaved",
    "interleavedzerobubble": "interleaved-zb",
    "afab": "gpipe",
    "allforwardallbackward": "gpipe",
    "vhalf": "v-half",
    "vmin": "v-min",
    "dualpipev": "dualpipe-v",
    "loopedbfs": "bfs",
    "non-interleaved": "1f1b",
}


def schedule_of(cells: Cells, shape: ModelShape, pp: int) -> tuple[str, dict[str, Any]]:
    """The schedule's name here and its options.

    Without one, pipelines are interleaved where the row has virtual stages, else 1f1b.

    Raises:
        StrettoError: no such schedule.
    """
    words = cells.words("schedule") or _from_notes(cells)
    chunks = _chunks(cells, shape, pp)
    if not words:
        hidden_factor = "interleaving factor not stated" in cells.words("notes") and pp > 1
        if hidden_factor and chunks is None:
            chunks = _least_chunks(shape.layers, pp)
            cells.take("vp", chunks, "interleaved, the fewest that divide the layers")
        if chunks is None and pp > 1 and "nemo" in cells.words("source"):
            chunks = cells.take("vp", max(1, shape.layers // pp), "a layer a chunk, as in NeMo's recipes")
        words = "interleaved" if (chunks or 1) > 1 and pp > 1 else "1f1b"
        if pp > 1:
            cells.take("schedule", words)
    name = _known(words)
    options: dict[str, Any] = {}
    if name in ("interleaved", "interleaved-zb", "bfs"):
        if chunks is None or chunks < 2:
            chunks = cells.take("vp", _least_chunks(shape.layers, pp), "the fewest that divide the layers")
        if chunks < 2 or pp == 1:
            return "1f1b", {}
        options["chunks"] = chunks
        group = cells.whole("group")
        if group:
            options["group"] = group
    if name == "hanayo" and chunks:
        options["waves"] = max(1, chunks // 2)
    return name, options


def _known(words: str) -> str:
    plain = re.sub(r"[\s_]+", "-", words.strip())
    for name in (plain, plain.removeprefix("schedule"), plain.replace("-", "")):
        if name in names():
            return name
        if name in _SCHEDULES:
            return _SCHEDULES[name]
        if name.removeprefix("schedule") in _SCHEDULES:
            return _SCHEDULES[name.removeprefix("schedule")]
    near = nearest(plain, (*names(), *_SCHEDULES))
    raise StrettoError(
        f"schedule {words!r} is not known",
        hint=f"did you mean {near!r}?" if near else "see stretto schedule --list",
    )


def _from_notes(cells: Cells) -> str:
    """The schedule that the notes name, if it is one."""
    match = re.search(r"\bschedule[ =:]+([a-z0-9][a-z0-9\-]*)", cells.words("notes"))
    if match is None:
        return ""
    try:
        _known(match[1])
    except StrettoError:
        return ""  # a word of the text
    return match[1]


def _chunks(cells: Cells, shape: ModelShape, pp: int) -> int | None:
    words = cells.words("vp")
    if words.startswith("max"):  # one layer a chunk, embedding and head each in place of one
        return cells.take("vp", max(1, (shape.layers + 2) // pp), "one layer a chunk")
    return cells.whole("vp")


def _least_chunks(layers: int, pp: int) -> int:
    """The fewest chunks a rank, above one, that have equally many layers, embedding and head counted or not;
    two where no number has; 1: there are too few layers.
    """
    for whole in (layers, layers + 2):
        each = whole // pp if whole % pp == 0 else 0
        found = next((n for n in range(2, each + 1) if each % n == 0), None)
        if found is not None:
            return found
    return 2 if layers + 2 >= 2 * pp else 1


def mode_of(cells: Cells) -> DataParallel | None:
    """How ranks with the same parameters share states; None: not told.

    Raises:
        StrettoError: no such mode.
    """
    words = cells.words("zero").removesuffix(".0")
    if not words:
        match = re.search(r"\bzero[- ]?(?:stage[- ]?)?([0-3])\b", cells.words("notes"))
        if match is None:
            return None
        words = cells.take("zero", match[1], "of the notes")
    plain = re.sub(r"[\s_\-]|stage", "", words)
    if plain in ("0", "ddp", "none", "zero0", "off", "false", "no"):
        mode = "ddp"
    elif plain in ("1", "2", "3"):
        mode = f"zero{plain}"
    elif plain in ("fsdp", "fsdp2", "fullshard", "yes", "true", "on", "hsdp"):
        mode = "zero3"
    elif plain in ("zero1", "zero2", "zero3", "server"):
        mode = plain
    elif plain in ("distributedoptimizer", "distopt"):
        mode = "zero1"
    else:
        raise StrettoError(f"zero is {words!r}", hint="0, 1, 2 or 3")
    shard = cells.whole("shard")
    field = {"zero1": "shard_states", "zero2": "shard_gradients", "zero3": "shard_parameters"}.get(mode)
    given = {field: shard} if shard and field else {}
    if field == "shard_parameters" and given:
        given |= {"shard_states": shard, "shard_gradients": shard}
    return DataParallel(mode=mode, **given)  # pyright: ignore[reportArgumentType]
