"""Reading one cell of a table as papers fill them in: "~1,024", "410 ms", "1 (all DP)", "bf16 mixed",
"n/a".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# cells that say nothing
_SILENT = "-|--|–|—|?|.|n/a|n.a.|na|nan|nr|null|tbd|unknown|unspecified|default"
_UNSTATED = "not stated|not given|not reported|not printed|not specified"
_BLANK = frozenset(("", *_SILENT.split("|"), *_UNSTATED.split("|")))
_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "y", "on", "enabled", "t", "✓", "with"), True),
    **dict.fromkeys(("0", "false", "no", "n", "off", "disabled", "none", "f", "✗", "without"), False),
}
_NUMBER = re.compile(
    r"^(?:[~≈∼]|ca\.?|about|approx\.?)?\s*"
    r"(?P<number>\d{1,3}(?:[,_ ']\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"
    r"(?P<rest>.*)$",
    re.IGNORECASE | re.DOTALL,
)
# what may follow a number: nothing, a remark, a tolerance, or words; no second number as in 70-75, 1/2, 8x8
_REMARK = re.compile(
    r"^\s*(?:$|[(\[;:±,]\s*\D|[(\[±]|\+/?-|(?P<word>[a-z%/][a-z/%]*)(?![a-z/%\d]))", re.IGNORECASE
)
_NO_UNITS = {"per", "a", "of", "in", "total", "each", "measured", "avg", "mean", "average", "max", "peak"}


def is_blank(cell: str) -> bool:
    """Return whether a cell says nothing: empty, a dash, "n/a", "not stated"."""
    return cell.strip().lower() in _BLANK


def is_out_of_memory(cell: str) -> bool:
    """Return whether a cell says in place of a figure that the run failed for lack of memory."""
    return re.match(r"(?:cuda )?(?:oom|out[- ]of[- ]memory)\b", cell.strip().lower()) is not None


def read_number(cell: str, units: Mapping[str, float] | None = None) -> tuple[float, str] | None:
    """Return the number at the start of a cell, in the units' first scale, and the unit; None: there is none.

    Args:
        units: what a word directly behind the number stands for; another word is refused. None: words are
            remarks.
    """
    match = _NUMBER.match(cell.strip())
    if match is None:
        return None
    remark = _REMARK.match(match["rest"])
    if remark is None:
        return None
    number, word = float(re.sub(r"[,_ ']", "", match["number"])), (remark["word"] or "").lower()
    if not word or units is None or word in _NO_UNITS or word.startswith("/"):
        return number, ""
    if word not in units:
        return None
    return number * units[word], word


def read_flag(cell: str) -> bool | None:
    """Return whether the first word says yes; None: it says neither yes nor no."""
    tokens = re.split(r"[\s(,;:]", cell.strip().lower(), maxsplit=1)
    return _FLAGS.get(tokens[0])


def squeezed(text: str) -> str:
    """Letters and digits in lower case."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def read_choice(cell: str, spellings: Mapping[str, str]) -> str | None:
    """Return the choice that a cell names: the whole of it, what stands before a bracket or a comma, or its
    first word. None: it names none.

    Args:
        spellings: choices by their squeezed spellings.
    """
    text = cell.strip()
    cuts = (r"[(\[]", r"[,;:]", r"[/+&|]", r"(?<=\d)\.\d", r"\s", r"-")  # also versions: FlashAttention 2.5
    parts = (text, *(re.split(cut, text, maxsplit=1)[0] for cut in cuts))
    return next((spellings[form] for part in parts if (form := squeezed(part)) in spellings), None)
