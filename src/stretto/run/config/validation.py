"""What pydantic found wrong, as one error that a person can act on."""

from __future__ import annotations

import re
import sys
from types import NoneType
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from stretto.errors import StrettoError, joined, nearest
from stretto.run.config.describe import allowed, choices, takes_only_text
from stretto.run.config.override import suggest
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import Section, find, kinds_of
from stretto.run.config.source import Source

Path = tuple[Any, ...]

# what papers and other libraries call a value, in lower case without punctuation, and what it is called here
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "zero3": ("fsdp", "fsdp2", "fullyshardeddataparallel", "fullshard", "sharded", "zero", "stage3"),
    "zero2": ("shardgradop", "stage2"),
    "zero1": ("zeroredundancyoptimizer", "distributedoptimizer", "stage1"),
    "ddp": ("dp", "dataparallel", "distributeddataparallel", "replicated", "noshard", "stage0", "none"),
    "server": ("ps", "parameterserver"),
    "bfloat16": ("bf16", "brainfloat"),
    "float16": ("fp16", "half"),
    "float32": ("fp32", "float", "single"),
    "float64": ("fp64", "double"),
    "adamw": ("adam", "fusedadam"),
    "full": ("checkpointing", "activationcheckpointing", "gradientcheckpointing", "block", "true"),
    "sdpa": ("flash", "flashattention", "flashattn", "fused", "scaleddotproductattention"),
    "flex": ("flexattention",),
    "explicit": ("eager", "math", "unfused"),
    "ring": ("ringattention", "cp"),
    "ulysses": ("alltoall", "a2a", "deepspeedulysses"),
    "cpu": ("host", "ram", "dram", "memory"),
    "nvme": ("disk", "ssd", "file", "files"),
    "disk": ("nvme", "ssd", "file", "files"),
    "wsd": ("warmupstabledecay", "trapezoidal"),
    "gpt": ("gpt2", "gpt3"),
    "llama": ("llama2", "llama3", "mistral", "qwen"),
    "dot": ("dlrm",),
    "dcn": ("dcnv2", "cross"),
    "row": ("rowwise", "rows"),
    "column": ("columnwise", "columns"),
    "rowwise_adagrad": ("rowadagrad",),
    "hash": ("hashing",),
    "modulo": ("mod",),
    "quotient-remainder": ("qr", "compositional"),
}


def complain(
    error: ValidationError, values: dict[str, Any], source: Source, schema: type[Section] = TrainConfig
) -> StrettoError:
    """All problems in the order of the file, each with its place.

    `values` is what was read from `source`, whole.
    """
    by_field: dict[Path, dict[str, Any]] = {}
    for problem in error.errors(include_url=False):
        by_field.setdefault(_field(problem, schema), dict(problem))
    # lines of the file in their order, then what has none, such as overrides
    ordered = sorted(by_field.items(), key=lambda item: source.place(item[0]).line or sys.maxsize)
    problems = list[StrettoError]()
    for path, problem in ordered:
        message, hint = _words(path, problem, values, schema)
        problems.append(StrettoError(f"{source.place(path)}: {message}", hint=hint))
    return joined(problems)


def _field(problem: Any, schema: type[Section]) -> Path:
    """The path of the field, without what pydantic adds for members of unions and lists."""
    location: Path = problem["loc"]
    known, field = find(schema, location)
    return known if field is not None or known == location else location[: len(known) + 1]


def _words(
    path: Path, problem: dict[str, Any], values: dict[str, Any], schema: type[Section]
) -> tuple[str, str | None]:
    name = ".".join(map(str, path))
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"there is no field {name}", suggest(path, schema)
    if kind == "missing" and len(path) == len(problem["loc"]):
        return f"{name} is missing", "see docs/config.md, or `stretto config --reference`"
    if kind == "value_error":
        inner = problem["ctx"]["error"]
        assert isinstance(inner, StrettoError), inner
        return f"{name} {inner.message}", inner.hint
    _, field = find(schema, path)
    value = _value_at(values, path)
    shown = _show(value)
    if field is None:
        return f"{name} is {shown}, must be a mapping of fields", None
    if kind == "finite_number":
        return f"{name} is {shown}, must be finite", None
    return f"{name} is {shown}, must be {allowed(field)}", _fix(field, value)


def _value_at(values: dict[str, Any], path: Path) -> Any:
    """The field's whole value, of which pydantic may show an item only."""
    value: Any = values
    for name in path:
        value = value[name]
    return value


def _fix(field: FieldInfo, value: Any) -> str | None:
    if isinstance(value, str) and (near := _meant(value, choices(field))):
        return f"did you mean {near}?"
    if takes_only_text(field) and isinstance(value, int | float):
        return f"write it in quotes: '{value}'"
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        if bool in kinds_of(field):
            return "write true or false"
        if value.lower() in ("no", "off") and NoneType in kinds_of(field):
            return "write null"
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(_[0-9]+)+", value):
        return f"write {value.replace('_', '')}"
    if isinstance(value, float) and value.is_integer() and "whole number" in allowed(field):
        return f"write {int(value)}"
    return None


def _meant(value: str, allowed: list[str]) -> str | None:
    """The allowed word that is spelt alike, means the same elsewhere, or looks most like `value`."""
    plain = _plain(value)
    for word in allowed:
        if plain == _plain(word) or plain in _SYNONYMS.get(word, ()):
            return word
    return nearest(value, allowed)


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def _show(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
