"""Parsing names of devices in any spelling: "8xH100", "a100_80gb", "NVIDIA H100 80GB HBM3"."""

from __future__ import annotations

import re
from dataclasses import dataclass

# words that do not distinguish devices: vendors, generations, what a card sits in, who rents it
_NOISE_TEXT = (
    "nvidia amd tesla geforce instinct google huawei aws azure gcp volta ampere hopper blackwell ada cdna3 "
    "gpu gpus node nodes card module chip chips device devices accelerator accelerators server servers "
    "cluster machine cloud datacenter superchip grace dgx hgx nvlink nvswitch hbm hbm2 hbm2e hbm3 hbm3e "
    "gddr6 gddr6x memory ram tensor core graphics class series type variant single one each per a of"
)
_NOISE = frozenset(_NOISE_TEXT.split())
_COUNT = re.compile(
    r"^\s*(\d+)\s*(?:[x*×]\s*|\s(?=nvidia |amd |[a-z]{1,2}\d{2,}))(?=[a-z])"
    r"|\s[x*×]\s*(\d+)\s*$|(?<=\d)x(\d+)\s*$"
)
_GB = re.compile(r"(?<![a-z0-9.])(\d+)\s*-?\s*g(?:i?b)?(?![a-z0-9/])")
_FORM = re.compile(r"\b(?:sxm\d?|pcie|nvl|oam)\b")  # of a card, which may stand in brackets
_POWER = re.compile(r"\b\d+\s*w\b|\bpcie\s*(?:gen\s*)?\d(?:\.0)?\b")
_PART = re.compile(r"\b(?:mig|laptop|mobile|max-?q|slice|half)\b")  # no whole card of that name
_LINK = re.compile(r"[,;+@|]|\b(?:with|w/|on|in)\b")  # what follows is no part of a device's name


@dataclass(frozen=True)
class ParsedName:
    """The parts of a name.

    Attributes:
        tokens: letters and digits, without vendors and the like.
        gb: memory as the vendor states it, or None if the name has none.
        count: number of devices, or None if the name has none.
        aside: text in brackets, such as the system in "V100-32GB(DGX-2)".
    """

    tokens: tuple[str, ...]
    gb: int | None
    count: int | None
    aside: str | None

    def fits(self, chip: str, gbs: tuple[int, ...], forms: tuple[str, ...]) -> bool:
        """True if all parts fit a device of that chip, memory and form."""
        others = self._without(chip)
        return others is not None and others <= set(forms) and (self.gb is None or self.gb in gbs)

    def mentions(self, chip: str) -> bool:
        """True if the chip is among the words."""
        return self._without(chip) is not None

    def _without(self, chip: str) -> set[str] | None:
        """The words other than the chip's, or None if it is not among them. The chip "rtx4090" also matches
        the words "rtx", "4090".
        """
        for first in range(len(self.tokens)):
            for last in range(first + 1, len(self.tokens) + 1):
                if "".join(self.tokens[first:last]) in (chip, chip.removeprefix("tpu")):
                    return {*self.tokens[:first], *self.tokens[last:]}
        return None


def parse_name(name: str) -> ParsedName:
    """The parts of a name."""
    text = _POWER.sub(lambda match: "pcie" * match[0].startswith("pcie"), name.lower().replace("_", " "))
    text = re.sub(r"\b(v\d+[ep]?)-\d+\b", r"\1", text)  # slices of TPUs, as v5e-256
    text = re.sub(r"\b(910b)\d\b", r"\1", text)  # bins of one chip
    aside = re.search(r"\(([^)]*)\)", text)
    text = re.sub(r"\([^)]*\)?", " ", text)
    if aside:
        text = " ".join((text, *_FORM.findall(aside[1])))
    count = _COUNT.search(text)
    text = _COUNT.sub(" ", text)
    gb = _GB.search(text) or (_GB.search(aside[1]) if aside else None)
    text = _GB.sub(" ", text)
    tokens = tuple(word for word in re.findall(r"[a-z0-9]+", text) if word not in _NOISE)
    number = next((part for part in count.groups() if part), None) if count else None
    return ParsedName(
        tokens, int(gb[1]) if gb else None, int(number) if number else None, aside[1] if aside else None
    )


def normalised(name: str) -> str:
    """Letters and digits in lower case; names are equal if these are."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def head(name: str) -> str:
    """The text before the first comma, plus or "with": "H100 80GB, NVLink 900 GB/s" without its link.
    The name itself if it denotes a part of a card.
    """
    return name if _PART.search(name.lower()) else _LINK.split(name, maxsplit=1)[0].strip()
