"""Megatron-LM's command line: what each argument takes, and what those say that no rule maps.

The arguments are those of Megatron-LM core_v0.19.0 (2026-08-19), of whose parser
`frameworks/data/megatron_lm.csv` lists names, types and choices, and those of core_v0.16.1 that it dropped.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto_interop.frameworks.bash import HINT, unknown_in
from stretto_interop.frameworks.mapping import ParsedSettings

VERSION = "core_v0.19.0"


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument by its name without dashes.

    Attributes:
        values: how many it takes: "flag", "" (one), a number, "+" or "*".
        kind: of each value: "int", "float" or "str".
        choices: the values that it takes; empty: any.
        default: its value if it is absent, as text; empty if it has none.
        group: of those that no rule reads, what they are about.
    """

    name: str
    values: str
    kind: str
    choices: tuple[str, ...]
    default: str
    group: str

    def read(self, argv: Sequence[str], place: str) -> Any:
        """The value of the words behind it.

        Raises:
            StrettoError: too few or too many, or a value that it does not take.
        """
        if self.values == "flag":
            if argv:
                raise StrettoError(f"{place}: --{self.name} takes no value, not {argv[0]!r}")
            return True
        if not argv and self.values != "*":
            raise StrettoError(f"{place}: --{self.name} lacks its value")
        if self.values == "" and len(argv) > 1:
            raise StrettoError(f"{place}: --{self.name} takes one value, not {' '.join(argv)!r}")
        if self.values.isdecimal() and len(argv) != int(self.values):
            raise StrettoError(f"{place}: --{self.name} takes {self.values} values, not {len(argv)}")
        values = [self._value_of(word, place) for word in argv]
        return values[0] if self.values == "" else values

    def _value_of(self, word: str, place: str) -> int | float | str:
        if (missing := unknown_in(word)) is not None:
            raise StrettoError(
                f"{place}: --{self.name} is {missing}, whose value nothing here tells",
                hint=_say(missing),
            )
        if self.choices and word not in self.choices:
            closest = nearest(word, self.choices)
            hint = f"did you mean {closest}? " * bool(closest) + f"allowed: {', '.join(self.choices)}"
            raise StrettoError(f"{place}: --{self.name} is {word}", hint=hint)
        try:
            return {"int": int, "float": float}.get(self.kind, str)(word)
        except ValueError:
            kind = "a whole number" if self.kind == "int" else "a number"
            raise StrettoError(f"{place}: --{self.name} is {word!r}, not {kind}") from None


def _say(unknown: str) -> str:
    """How to say the value of what nothing tells."""
    if unknown[1:].isdecimal():
        return f"it is word {unknown[1:]} behind the script's name"
    if not unknown.isidentifier():
        return HINT
    return f"write its value into the script: {unknown}=..."


@cache
def arguments() -> Mapping[str, Argument]:
    """Every argument of Megatron-LM by each of its names."""
    text = files("stretto_interop.frameworks").joinpath("data/megatron_lm.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    result = dict[str, Argument]()
    for row in csv.DictReader(lines):
        argument = Argument(
            name=row["option"],
            values=row["values"],
            kind=row["type"],
            choices=tuple(row["choices"].split()),
            default=row["default"],
            group=row["class"],
        )
        result |= dict.fromkeys([argument.name, *row["aliases"].split()], argument)
    return result


def read_arguments(argv: Sequence[str], source: str, priced: Collection[str]) -> ParsedSettings:
    """The arguments of a command line by their names; of those given twice the last, as argparse takes it.

    Args:
        priced: names whose values matter to a price.

    Raises:
        StrettoError: a first word that is no argument.
    """
    all_arguments, parsed = arguments(), ParsedSettings()
    for name, values in _groups(argv, source):
        argument = all_arguments.get(name)
        key = (
            JSON_FILE if name.replace("-", "_") == JSON_FILE else name if argument is None else argument.name
        )
        for earlier in (parsed.settings, parsed.unsupported, parsed.files):
            earlier.pop(key, None)
        if (instead := _former(name, values)) is not None:
            parsed.settings |= read_arguments(instead.split(), source, priced).settings
            parsed.deprecated[name] = instead or "nothing: it is Stretto's own way"
        elif key == JSON_FILE and values:
            if (variable := unknown_in(values[0])) is None:
                parsed.files[JSON_FILE] = values[0]
            else:
                error = StrettoError(
                    f"{source}: nothing tells which file --{name} names", hint=_say(variable)
                )
                parsed.unsupported[JSON_FILE] = error, True
        elif argument is None:
            parsed.unsupported[name] = _unknown(name, values, source), not name.startswith("$")
        else:
            try:
                parsed.settings[key] = argument.read(values, source)
            except StrettoError as error:
                has_unknown = any(unknown_in(value) is not None for value in values)
                parsed.unsupported[key] = error, not has_unknown or key in priced
    return parsed


def _unknown(name: str, values: Sequence[str], source: str) -> StrettoError:
    """Why a name is no argument."""
    if name.startswith("$"):
        hint = f"give it: {name[1:]}=..." if name[1:].isidentifier() else HINT
        return StrettoError(f"{source}: nothing tells what {name} holds", hint=hint)
    if (instead := _HINTS.get(name)) is not None:
        return StrettoError(f"{source}: --{name} is not of Megatron-LM {VERSION}", hint=instead)
    closest = nearest(name, arguments())
    hint = f"did you mean --{closest}?" if closest else "it is no argument of Megatron-LM"
    return StrettoError(f"{source}: Megatron-LM {VERSION} has no --{name}", hint=hint)


def _groups(argv: Sequence[str], source: str) -> Iterator[tuple[str, list[str]]]:
    """Each argument with the values behind it; a variable that stands alone, whose value nothing tells, by
    its name behind a $.
    """
    name, values = "", list[str]()
    for word in argv:
        variable = unknown_in(word)
        if variable is not None and len(word) == len(variable) + 2 and not _awaits(name, values):
            yield f"${variable}", []
            continue
        negative = word[1:2].isdigit() or word[1:2] == "."
        if word.startswith("-") and not negative and word != "-":
            if name:
                yield name, values
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-") if name.replace("_", "-") in arguments() else name
            values = [value] if equals else []
        elif name:
            values.append(word)
        elif unknown_in(word) is None:
            hint = "arguments begin with --"
            raise StrettoError(f"{source}: {word!r} is no argument of Megatron-LM", hint=hint)
    if name:
        yield name, values


def _awaits(name: str, values: Sequence[str]) -> bool:
    """True if an argument takes a further value."""
    argument = arguments().get(name)
    if argument is None:
        return bool(name) and not values
    if argument.values.isdecimal():
        return len(values) < int(argument.values)
    return argument.values in ("+", "*") or (argument.values == "" and not values)


JSON_FILE = "deepspeed_config"  # the argument of Megatron-DeepSpeed that names DeepSpeed's JSON
# what earlier versions and Megatron-DeepSpeed call otherwise, with {} for the value; where that is empty,
# nothing here depends on it
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
_FORMER = {
    "checkpoint-activations": _RECOMPUTED,
    "deepspeed-activation-checkpointing": _RECOMPUTED,
    "num-key-value-heads": "--group-query-attention --num-query-groups {}",
    "ds-sequence-parallel-size": "--context-parallel-size {} --cp-comm-type a2a",
    "zero-stage": {
        "0": "",
        "1": "--use-distributed-optimizer",
        "2": f"{_FSDP} optim_grads",
        "3": f"{_FSDP} optim_grads_params",
    },
    "no-pipeline-parallel": "",
    "deepspeed": "",
    "DDP-impl": "",
    "no-query-key-layer-scaling": "",
}
# the same, where only a person can tell
_HINTS = {
    "activations-checkpoint-method": f"such as {_RECOMPUTED}",
    "train-tokens": "--train-samples, tokens divided by --seq-length",
    "lr-decay-tokens": "--lr-decay-samples, tokens divided by --seq-length",
    "lr-warmup-tokens": "--lr-warmup-samples, tokens divided by --seq-length",
    "enable-gpt-oss": "its positions are --position-embedding-type yarn --rotary-scaling-factor 32 "
    "--no-yarn-correction-range-round-to-int",
}


def _former(name: str, values: Sequence[str]) -> str | None:
    """The arguments that replace one of another version, or None if it is none of these."""
    instead = _FORMER.get(name)
    if isinstance(instead, dict):
        instead = instead.get(" ".join(values))
    return None if instead is None else instead.format(*values or [""])


# what arguments of a class change, if no price
_UNPRICED = {
    "data": "what is read, not how long a step takes",
    "text": "what is read, not how long a step takes",
    "checkpoints": "checkpoints",
    "start": "checkpoints",
    "logging": "logging, profiling and evaluation",
    "learning": "what is learnt, not what a step costs",
    "maths": "numerics with hardly a cost",
    "numerics": "numerics with hardly a cost",
    "detail": "details of kernels and communication, priced as is usual",
    "faults": "fault handling",
}
# why a run here does without arguments of a class
_NEEDLESS = {
    "data": "how files are opened and cached is Stretto's own",
    "checkpoints": "Stretto writes and reads checkpoints of its own",
    "start": "of a checkpoint to begin with, which `stretto checkpoint import --format megatron` brings over",
    "logging": "metrics.jsonl has every step's numbers, metrics.trace records one",
    "numerics": "the same mathematics, in Stretto's own precision",
    "detail": "kernels, messages and initialisation are Stretto's own",
    "faults": "Stretto saves and ends on a signal, and checkpoint.resume=auto continues",
}
# why arguments of a class are refused
_UNREAD = {
    "no-costs": "it has no costs here",
    "other": "it is for other programs than training with pretrain_gpt.py",
    "removed": "Megatron-LM does not take it any more",
}


def unpriced() -> dict[str, str]:
    """Arguments that change no price, and what they change."""
    return {
        argument.name: _UNPRICED[argument.group]
        for argument in arguments().values()
        if argument.group in _UNPRICED
    }


def unread() -> dict[str, str]:
    """Arguments that change a price in ways that nothing here knows, and why."""
    return {
        argument.name: _UNREAD[argument.group]
        for argument in arguments().values()
        if argument.group in _UNREAD
    }


def needless() -> dict[str, str]:
    """Arguments that a run here does without and is the same, and why."""
    return {
        argument.name: _NEEDLESS[argument.group]
        for argument in arguments().values()
        if argument.group in _NEEDLESS
    }


def lost(name: str, value: Any) -> str | None:
    """Why an argument that is not mapped, with that value, has no counterpart here; None: it needs none, or
    nothing more is known.
    """
    if name in _REASONS:
        return _REASONS[name]
    group = arguments()[name].group
    if not group:  # a rule reads it
        return None
    return None if group in _NEEDLESS or is_default(name, value) else _LOST[group]


def is_default(name: str, value: Any) -> bool:
    """True if an argument's value is what it is where it is left out."""
    argument = arguments()[name]
    default = (
        argument.read([argument.default], name) if argument.default and argument.values != "flag" else None
    )
    return default is not None and value in (default, [default])


_DOCUMENTS = (
    "--reset-position-ids, --reset-attention-mask and --eod-mask-loss together are data.packing: documents; "
    "one without the others has no counterpart"
)
_OTHER_TEXT = (
    "evaluations read what data.split holds out of data.source; on other text, `stretto evaluate RUN "
    "--data PREFIX` after training"
)
# why single arguments have no counterpart
_REASONS = {
    **dict.fromkeys(("reset-position-ids", "reset-attention-mask", "eod-mask-loss"), _DOCUMENTS),
    "dataloader-inter-document-masking": (
        "it keeps attention inside documents; data.packing=documents does, with positions and targets"
    ),
    **dict.fromkeys(("valid-data-path", "test-data-path"), _OTHER_TEXT),
}
# why arguments of a class have no counterpart
_LOST = {
    "text": "Stretto does not read text so",
    "learning": "it changes training, and Stretto has no such choice",
    "maths": "it changes what the model computes, and Stretto has no such choice",
    **_UNREAD,
    "no-costs": "Stretto has no such model, type or way to keep tensors",
}
