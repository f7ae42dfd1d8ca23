"""Megatron-LM's command line: what each argument takes, what those mean that no rule maps, and the scripts
that have it, which are written as a bash array of arguments and read as people write them.

The arguments are those of Megatron-LM core_v0.19.0 (2026-08-19), of whose parser
`frameworks/data/megatron_lm.csv` lists names, types and choices, and those of core_v0.16.1 that it dropped.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, nearest, shortened
from stretto_interop.frameworks.bash import (
    HINT,
    MARK,
    Command,
    batch_variables,
    commands,
    parameters,
    unknown_in,
)
from stretto_interop.frameworks.mapping import ParsedSettings, Settings, Start, Unset

VERSION = "core_v0.19.0"


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of Megatron-LM.

    Attributes:
        values: number of values it takes: "flag", "" (one), a number, "+" or "*".
        kind: type of each value: "int", "float" or "str".
        choices: allowed values; empty if any.
        default: value if it is absent, as text; empty if there is none.
        group: subject of an argument that no rule reads.
    """

    name: str
    values: str
    kind: str
    choices: tuple[str, ...]
    default: str
    group: str

    def read(self, argv: Sequence[str], place: str) -> Any:
        """Return the value of the words after the argument.

        Raises:
            StrettoError: too few or too many words, or a value that it does not take.
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
    """Return how to give the value of an unknown."""
    if unknown[1:].isdecimal():
        return f"it is word {unknown[1:]} behind the script's name"
    if not unknown.isidentifier():
        return HINT
    return f"write its value into the script: {unknown}=..."


@cache
def arguments() -> Mapping[str, Argument]:
    """Return every argument of Megatron-LM by each of its names."""
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
    """Read the arguments of a command line by name; the last of several wins, as with argparse.

    Args:
        priced: names of arguments whose values affect a price.

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
        instead = _FORMER.get(name)
        if isinstance(instead, dict):
            instead = instead.get(" ".join(values))
        if instead is not None:
            instead = instead.format(*values or [""])
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
    """Return the error for a name that is no argument."""
    if name.startswith("$"):
        hint = f"give it: {name[1:]}=..." if name[1:].isidentifier() else HINT
        return StrettoError(f"{source}: nothing tells what {name} holds", hint=hint)
    if (instead := _HINTS.get(name)) is not None:
        return StrettoError(f"{source}: --{name} is not of Megatron-LM {VERSION}", hint=instead)
    closest = nearest(name, arguments())
    hint = f"did you mean --{closest}?" if closest else "it is no argument of Megatron-LM"
    return StrettoError(f"{source}: Megatron-LM {VERSION} has no --{name}", hint=hint)


def _groups(argv: Sequence[str], source: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each argument with its values; a variable of unknown value that stands alone is named
    with a $.
    """
    name, values = "", list[str]()
    for word in argv:
        variable = unknown_in(word)
        if variable is not None and len(word) == len(variable) + 2 and not _awaits(name, values):
            yield shortened(variable if variable.startswith("$") else f"${variable}"), []
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


# what arguments of a class change, if no price
UNPRICED = {
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
NEEDLESS = {
    "data": "how files are opened and cached is Stretto's own",
    "checkpoints": "Stretto writes and reads checkpoints of its own",
    "start": "of a checkpoint to begin with, which `stretto checkpoint import --format megatron` brings over",
    "logging": "metrics.jsonl has every step's numbers, metrics.trace records one",
    "numerics": "the same mathematics, in Stretto's own precision",
    "detail": "kernels, messages and initialisation are Stretto's own",
    "faults": "Stretto saves and ends on a signal, and checkpoint.resume=auto continues",
}
# why arguments of a class are refused
UNREAD = {
    "no-costs": "it has no costs here",
    "other": "it is for other programs than training with pretrain_gpt.py",
    "removed": "Megatron-LM does not take it any more",
}


def with_reasons(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments of some classes with the class's reason, from `UNPRICED`, `UNREAD` or
    `NEEDLESS`.
    """
    return {
        argument.name: reasons[argument.group]
        for argument in arguments().values()
        if argument.group in reasons
    }


def lost(name: str, value: Any) -> str | None:
    """Return why an argument that is not mapped has no counterpart for this value; None if it needs none, or
    nothing is known.
    """
    if name in _REASONS:
        return _REASONS[name]
    group = arguments()[name].group
    if not group:  # a rule reads it
        return None
    return None if group in NEEDLESS or is_default(name, value) else _LOST[group]


def is_default(name: str, value: Any) -> bool:
    """True if the value is the argument's default."""
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
    "text": "Stretto has no such way to read text",
    "learning": "it changes training, and Stretto has no such choice",
    "maths": "it changes what the model computes, and Stretto has no such choice",
    **UNREAD,
    "no-costs": "Stretto has no such model, type or way to keep tensors",
}


# ------------------------------------------------------------------ scripts

_NODE = 8  # devices of a node, unless GPUS_PER_NODE says otherwise
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_GPT = "pretrain_gpt.py"
# other programs of Megatron-LM's, by patterns of their paths, and what they train
_PROGRAMS = {
    "*pretrain_bert.py": "BERT, an encoder of masked words",
    "*pretrain_t5.py": "T5, an encoder and a decoder of masked spans",
    "*pretrain_mamba.py": "Mamba, layers of state spaces",
    "*pretrain_hybrid.py": "hybrids of attention and Mamba",
    "*pretrain_retro.py": "Retro, which reads retrieved text",
    "*pretrain_vision_*.py": "models of images",
    "*pretrain_vlm.py": "models of text and images",
    "*multimodal/*.py": "models of text and images",
    "*mimo/*.py": "models of text and images",
    "*pretrain_ict.py": "encoders for retrieval",
    "*pretrain_biencoder.py": "encoders for retrieval",
    "*train_rl.py": "models by rewards",
}
_TALKING = ("echo", "printf", "cat", "cp", "ls", "test", "grep", "sed")  # commands that start no program
_SCRIPT_HINT = "give the script that starts pretrain_gpt.py, or its arguments alone: --num-layers 32 ..."
_OTHERS = {".toml": "torchtitan", ".py": "torchtitan", ".json": "deepspeed"}  # by a file's ending


def render(settings: Settings, notes: Sequence[str]) -> str:
    """Return a bash script that defines MEGATRON_ARGS and, unless it is sourced, starts training."""
    world = settings["world-size"]
    node: int = min(_NODE, world) if world % min(_NODE, world) == 0 else world
    lines = ["#!/usr/bin/env bash", f"# Megatron-LM {VERSION} on {world} processes, written by Stretto."]
    lines += [f"# {note}" for note in notes]
    lines += ["# Run it to train, or source it for the array of arguments.", "set -euo pipefail", ""]
    if "use-megatron-fsdp" not in settings:
        lines += [
            "export CUDA_DEVICE_MAX_CONNECTIONS=1  # the order of kernels, for overlap before Blackwell"
        ]
    lines += [""] * bool(lines[-1]) + ["MEGATRON_ARGS=("]
    lines += [f"  --{name}{_value(value)}" for name, value in settings.items() if name != "world-size"]
    nodes = world // node
    lines += [
        ")",
        "",
        'if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then',
        f'  torchrun --nproc-per-node "${{GPUS_PER_NODE:-{node}}}" --nnodes "${{NNODES:-{nodes}}}" \\',
        "    ${TORCHRUN_ARGS:-} \\",
        '    "${MEGATRON_LM:?the folder of Megatron-LM}/pretrain_gpt.py" "${MEGATRON_ARGS[@]}"',
        "fi",
    ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return an argument's value, quoted for bash if necessary."""
    if value is True:
        return ""
    if isinstance(value, Unset):
        variable = re.sub(r"\W", "_", value.name).upper()
        return f' "${{{variable}:?{value.name}, such as {_text(value.example)}}}"'
    values = value if isinstance(value, list | tuple) else [value]
    return "".join(f" {shlex.quote(_text(item))}" for item in values)  # pyright: ignore[reportUnknownArgumentType]


def _text(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def parse(text: str, source: str, start: Start, priced: Collection[str]) -> ParsedSettings:
    """Read the arguments of a script or of a command line, and `world-size` if it is known.

    Args:
        start: how the script is started.
        priced: arguments whose values affect a price.

    Raises:
        StrettoError: no such script, or an argument that Megatron-LM does not have.
    """
    notes = list[str]()
    variables = {**parameters(start.arguments), **start.variables}
    every = list(commands(text, source, variables, lambda command: _program(command) is not None, notes))
    launches = [(command, index) for command in every if (index := _program(command)) is not None]
    named = [item for item in launches if re.search(r"pretrain\w*\.py$", item[0].argv[item[1]])]
    if not launches:
        argv = [word for command in every for word in command.argv]
        if not argv or not all(command.argv[0].startswith("--") for command in every):
            other = _OTHERS.get(Path(source).suffix)
            of_other = f"`stretto predict --from {other} {source} --cluster h100:64` reads {other}'s configs"
            raise StrettoError(
                f"{source} starts no pretrain_gpt.py", hint=of_other if other else _SCRIPT_HINT
            )
        parsed, world = read_arguments(argv, source, priced), None
    else:
        command, script = (named or launches)[-1]
        _check_program(command.argv[script], start.program, f"{source}:{command.line}")
        parsed = read_arguments(command.argv[script + 1 :], f"{source}:{command.line}", priced)
        world = _world(command.argv[:script], batch_variables(text))
    sizes = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "max-position-embeddings")
    for name in sizes:
        if name in parsed.unsupported:
            raise parsed.unsupported[name][0]
    missing = [name for name in sizes if name not in parsed.settings]
    if missing:
        raise StrettoError(
            f"{source} lacks --{', --'.join(missing)}",
            hint="arguments from a checkpoint or a YAML file are not read: give them",
        )
    if len(launches) > 1:
        notes.append(f"{source} starts {len(launches)} trainings: the last is read")
    parsed.notes = notes
    size = start.devices if world is None or (start.wins and start.devices is not None) else world
    if size is not None:
        parsed.settings["world-size"] = size
    return parsed


def _program(command: Command) -> int | None:
    """Return the index of the program that a command starts, if its name or arguments are like
    Megatron-LM's.
    """
    argv = command.argv
    if argv[0] in _TALKING:
        return None
    for at, word in enumerate(argv):
        if re.search(r"pretrain\w*\.py$", word):
            return at
    for at, word in enumerate(argv):
        if word.endswith(".py"):
            behind = [item[2:] for item in argv[at + 1 :] if item.startswith("--")]
            return at if sum(item in arguments() for item in behind) > 5 else None
    return None


def _check_program(path: str, program: str | None, place: str) -> None:
    """Raise StrettoError for a program that does not, or may not, train a GPT."""
    for pattern, trained in _PROGRAMS.items():
        if fnmatchcase(f"/{path}", pattern):
            message = f"{place}: {path.rpartition('/')[2]} trains {trained}: only scripts of {_GPT} are read"
            raise StrettoError(message, hint=f"give a script that starts {_GPT}")
    if path.rpartition("/")[2] != _GPT and program != "gpt":
        raise StrettoError(
            f"{place}: what {path.replace(MARK, '')} trains is unknown; only {_GPT} is known by its name",
            hint=f"`stretto migrate ... --program gpt` if it trains a GPT, as {_GPT} does",
        )


def _world(argv: Sequence[str], batch: Mapping[str, str]) -> int | None:
    """Return the number of processes that a launcher starts, or None if its options do not tell.

    Args:
        batch: SLURM's variables.
    """
    options = dict[str, str]()
    for at, word in enumerate(argv):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-"):
            options[name.replace("_", "-")] = value if equals else "".join(argv[at + 1 : at + 2])
    commands = [word.rpartition("/")[2] for word in argv]
    if any(launcher in word for word in argv for launcher in _LAUNCHERS):
        counts = [options.get("nproc-per-node", "1"), options.get("nnodes", "1")]
    elif "deepspeed" in commands:
        counts = [options.get("num-gpus", ""), options.get("num-nodes", "1")]
    elif "mpirun" in commands or "mpiexec" in commands:
        counts = [options.get("np", options.get("n", "")), "1"]
    elif "srun" in commands:
        counts = [options.get("ntasks", options.get("n", batch.get("SLURM_NTASKS", ""))), "1"]
        if not counts[0]:
            each = options.get("ntasks-per-node", batch.get("SLURM_NTASKS_PER_NODE", ""))
            counts = [each, options.get("nodes", options.get("N", batch.get("SLURM_NNODES", "1")))]
    else:
        return None
    if not all(count.isdecimal() for count in counts):
        return None
    return int(counts[0]) * int(counts[1])
