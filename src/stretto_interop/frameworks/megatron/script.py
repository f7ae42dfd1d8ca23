"""Scripts that start Megatron-LM: written as a bash array of arguments, read from what people have."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from stretto.errors import StrettoError
from stretto_interop.frameworks.bash import MARK, Command, batch_variables, commands, parameters
from stretto_interop.frameworks.mapping import ParsedSettings, Settings, Start, Unset
from stretto_interop.frameworks.megatron.arguments import VERSION, arguments, read_arguments

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
_HINT = "give the script that starts pretrain_gpt.py, or its arguments alone: --num-layers 32 ..."


def render(settings: Settings, notes: Sequence[str]) -> str:
    """A bash script that defines MEGATRON_ARGS and, unless it is sourced, starts training."""
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
    """A value behind its argument, quoted for bash where it must be."""
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
    """The arguments of a script or of a command line, and `world-size` if it is known.

    Args:
        start: how the script is started.
        priced: arguments whose values matter to a price.

    Raises:
        StrettoError: no such script, or an argument that Megatron-LM does not have.
    """
    notes = list[str]()
    variables = {**parameters(start.arguments), **start.variables}
    every = list(commands(text, source, variables, lambda command: _program(command) is not None, notes))
    launch = _launch(every)
    if launch is None:
        argv = [word for command in every for word in command.argv]
        if not argv or not all(command.argv[0].startswith("--") for command in every):
            raise StrettoError(f"{source} starts no pretrain_gpt.py", hint=_HINT)
        parsed, world = read_arguments(argv, source, priced), None
    else:
        command, script = launch
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
    if (count := sum(_program(command) is not None for command in every)) > 1:
        notes.append(f"{source} starts {count} trainings: the last is read")
    parsed.notes = notes
    size = start.devices if world is None or (start.wins and start.devices is not None) else world
    if size is not None:
        parsed.settings["world-size"] = size
    return parsed


def _launch(every: Sequence[Command]) -> tuple[Command, int] | None:
    """The command that starts training, and the place of the script among its words."""
    begun = [(command, at) for command in every if (at := _program(command)) is not None]
    named = [item for item in begun if re.search(r"pretrain\w*\.py$", item[0].argv[item[1]])]
    return next(reversed(named or begun), None)


def _program(command: Command) -> int | None:
    """The place of the program that a command starts, if that has a name or arguments as Megatron-LM's."""
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
    """Raise StrettoError for a program that trains something else than a GPT, or perhaps."""
    for pattern, trained in _PROGRAMS.items():
        if fnmatchcase(f"/{path}", pattern):
            message = f"{place}: {path.rpartition('/')[2]} trains {trained}: only scripts of {_GPT} are read"
            raise StrettoError(message, hint=f"give a script that starts {_GPT}")
    if path.rpartition("/")[2] != _GPT and program != "gpt":
        raise StrettoError(
            f"{place}: nothing tells what {path.replace(MARK, '')} trains: {_GPT} is known",
            hint=f"`stretto migrate ... --program gpt` if it trains a GPT, as {_GPT} does",
        )


def _world(argv: Sequence[str], batch: Mapping[str, str]) -> int | None:
    """Number of processes that a launcher starts, or None if its options do not say.

    Args:
        batch: variables of SLURM.
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
