"""The software of a run: what a row states, else what its age tells, which is never the newest kernels.

A row that states no software is dated by its own date, by one in its source, or by the youngest of its model
and its device: a device is taken to run what was usual a year after it could be had. A publication is a year
younger than the software that it measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from published.cells import SpelledCells, data
from stretto.planner.assumptions import software_profiles
from stretto.planner.estimate import usual_dtype
from stretto.planner.machines.device import Device

# FlashAttention came to PyTorch (2.0) and to Megatron in the same month, FlashAttention 2 half a year later.
# NVIDIA's frameworks ran Transformer Engine's kernels by then, and cuDNN 9's since 2025.
FUSED = "2023-03"
FLASH_2 = "2023-09"
CUDNN = "2025-01"
HOPPER = "2022-09"  # from which on Transformer Engine is of use
# Megatron's backward computes during its all-reduces since August 2021, as it did for Korthikanti et al.
# (published in May 2022, so taken to be of 2021-05)
OVERLAPPED = "2021-05"
EARLY = ("serial", "unfused", "eager")
SEQUENCE_PARALLEL = "2022-05"  # Korthikanti et al. 2022; the same month brought sharded optimizer states
_LONG = 4096  # tokens; beyond it, scores that are stored were unusual
# the profile that has each kernel's speed
_SPEEDS = {"flash-1": "fused", "flash-2": "today", "flash-3": "tuned", "cudnn": "tuned"}
_NVIDIA = re.compile(r"nemo\b|nvidia|megatron[-_ ]?core|mcore|transformer[-_ ]?engine|\bte\b", re.IGNORECASE)
_COMPILED = re.compile(r"compile|torchtitan|inductor|\bxla\b|maxtext|\bjax\b", re.IGNORECASE)
_EAGER = re.compile(r"torch|hugging|transformers|fsdp|fairscale|accelerate", re.IGNORECASE)
_PAPERS = (
    "sc|iclr|mlsys|nsdi|osdi|asplos|isca|icml|neurips|nips|ppopp|eurosys|sosp|micro|hpca|atc|sigcomm|vldb|acl"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


class Software(NamedTuple):
    """The software of a run.

    Attributes:
        name: the profile.
        date: the month that decides what was usual, as "2023-10"; "" if a profile was named.
    """

    name: str
    date: str

    @property
    def early(self) -> bool:
        """True if it is like Megatron of 2020 to 2022: dropout, blocking messages, nothing overlaps."""
        return self.name in EARLY

    def is_before(self, month: str) -> bool:
        """True if it is known or taken to be older than that month."""
        return self.early and self.date < month


def fill_software(cells: SpelledCells, device: Device, sequence: int) -> Software:
    """Fill in the profile of a row's software and its kind of attention."""
    kernel, date = cells.get("attention", str), ""
    name = _named(cells.text("software"))
    if name is None:
        date, reason = _dated(cells, device)
        name = _of_date(cells, date, device, sequence, kernel)
        cells.report("software", name, reason)
    cells.values["software"] = name
    if kernel is None:
        unfused = name in EARLY or _old(device)
        cells.fill("attention", "unfused" if unfused else "fused", f"of software {name}")
    return Software(name, date)


def _old(device: Device) -> bool:
    """Return whether the device is older than Ampere: neither bfloat16 nor FlashAttention."""
    return usual_dtype(device) == "float16"


def _named(text: str) -> str | None:
    """Return the profile that a text starts with."""
    tokens = re.split(r"[\s(,;:]", text.strip().lower(), maxsplit=1)
    return tokens[0] if tokens[0] in software_profiles() else None


def _of_date(cells: SpelledCells, date: str, device: Device, sequence: int, kernel: str | None) -> str:
    """Return the profile that was usual in a month, if the kernel of attention fits it."""
    software = cells.text("software")
    nvidia = _NVIDIA.search(f"{software} {cells.text('source')}") is not None
    if kernel == "unfused" or (kernel is None and (_old(device) or date < FUSED)):
        stated = bool(software or cells.text("date"))
        long = sequence > _LONG and kernel is None and not stated and not _old(device)
        if long or (_EAGER.search(software) and not nvidia):
            return "fused" if long else "eager"
        return "serial" if date < OVERLAPPED else "unfused"
    if kernel in _SPEEDS and date < FLASH_2:
        return _SPEEDS[kernel]
    if nvidia and (date >= FLASH_2 or device.released >= HOPPER):
        return "tuned" if date >= CUDNN else "engine"
    if date < FLASH_2:
        return "fused"
    return "compiled" if _COMPILED.search(software) else "today"


# ------------------------------------------------------------------ dates


def _dated(cells: SpelledCells, device: Device) -> tuple[str, str]:
    """Return the month of a row's software, and where it comes from."""
    for column in ("date", "software", "source"):
        text = cells.text(column)
        month = month_in(text)
        if month >= device.released and month:
            return month, f"{month}, from {column} {_short(text)}"
    pattern = cells.text("model").lower().replace("_", "-").replace(" ", "-")
    model = next(
        (month for model_pattern, month in _releases()["models"] if re.search(model_pattern, pattern)), ""
    )
    text = cells.text("software") or cells.text("date")
    missing = f"{_short(text)} gives no date" if text else "no date"
    default = _later(device.released, 1) if device.released else FLASH_2
    if model > default:
        return model, f"{missing}; its model is of {model}"
    return default, f"{missing}; usual on this device in {default}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def month_in(text: str) -> str:
    """Return the month of software that a text names, as "2023-10": a date, a year (its middle), a version of
    known software, or, a year earlier, that of a publication. "": it names none.
    """
    lower = text.lower()
    for dated in (_version(lower), _calendar(lower)):
        if dated:
            return dated
    paper = re.search(r"arxiv[^\d]{0,12}(\d\d)(0[1-9]|1[0-2])\.\d{4,5}", lower)
    if paper:
        return _later(f"20{paper[1]}-{paper[2]}", -1)
    meeting = re.search(rf"\b(?:{_PAPERS})\s*'?(?:20)?(\d\d)\b", lower)
    if meeting:
        return _later(f"20{meeting[1]}-07", -1)
    year = re.search(r"(?<![\d.])(20[12]\d)(?![\d.])", lower)
    return f"{year[1]}-07" if year else ""


def _calendar(text: str) -> str:
    """Return a month that is written out: 2024-11-27, 2024-11, Nov 2024, 27 November 2024."""
    plain = re.search(r"(?<!\d)(20[12]\d)[-/](0[1-9]|1[0-2])(?!\d)", text)
    if plain:
        return f"{plain[1]}-{plain[2]}"
    turned = re.search(r"(?<!\d)(0?[1-9]|1[0-2])/(20[12]\d)(?!\d)", text)
    if turned:
        return f"{turned[2]}-{int(turned[1]):02}"
    date = re.search(rf"\b({'|'.join(_MONTHS)})[a-z]*\.?,?\s*(?:\d{{1,2}},\s*)?(20[12]\d)\b", text)
    return f"{date[2]}-{_MONTHS.index(date[1]) + 1:02}" if date else ""


def _version(text: str) -> str:
    """Return the month of a version: NeMo 24.07, nvcr.io pytorch:24.03-py3, PyTorch 2.4."""
    container = re.search(
        r"(?:nemo|nvcr|container|pytorch|megatron-bridge|ngc)[^\d]{0,16}(2\d)\.(0[1-9]|1[0-2])(?!\d)", text
    )
    if container:
        return f"20{container[1]}-{container[2]}"
    for software in _releases()["software"]:
        version = re.search(rf"(?:{software['pattern']})[^\d\n]{{0,6}}(\d+\.\d+)", text)
        if version and version[1] in software["versions"]:
            return software["versions"][version[1]]
    return ""


def _later(month: str, years: int) -> str:
    return f"{int(month[:4]) + years}{month[4:]}"


@cache
def _releases() -> Mapping[str, Any]:
    return data("releases")
