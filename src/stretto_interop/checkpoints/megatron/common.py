"""The folders of Megatron's checkpoints, and `common.pt`: what all ranks share, as plain data.

`SAVE/latest_checkpointed_iteration.txt` names the newest `SAVE/iter_0000100`, which holds `metadata.json`
(the kind of checkpoint), `common.pt` (arguments, iteration, the optimiser's groups, the course of the
learning rate) and the files of torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stretto.engine.checkpoint.files import DamageError, open_plain
from stretto.engine.checkpoint.plain_pickle import Record
from stretto.errors import StrettoError
from stretto.job.optimiser import Optimiser
from stretto_interop.checkpoints.dcp.reader import METADATA, read_saved

_LONGEST = 1 << 16  # bytes of the small text files
LATEST = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
KIND = "metadata.json"
BACKEND = "torch_dist"
_NAMESPACE = "argparse.Namespace"
# modules whose names may occur in common.pt; nothing of them is looked up
_MODULES = ("argparse", "collections", "pathlib", "torch", "megatron", "nemo", "transformer_engine", "signal")
_BUILTINS = ("builtins.getattr", "__builtin__.getattr", "builtins.set", "__builtin__.set", "builtins.slice")


class _Names(Container[str]):
    """Names that Megatron's objects may have: its arguments hold enumerations and types."""

    def __contains__(self, name: object) -> bool:
        text = str(name)
        return text.partition(".")[0] in _MODULES or text in _BUILTINS


NAMES = _Names()


@dataclass(frozen=True, kw_only=True)
class Common:
    """The contents of a common.pt.

    Attributes:
        args: Megatron's arguments by attribute name, without values that are no plain data; empty if there
            are none.
        iteration: training steps.
        optimiser: state of the optimiser except its tensors, or None if there is none.
        scheduler: the course of the learning rate, in samples.
    """

    args: Mapping[str, Any]
    iteration: int
    optimiser: Any
    scheduler: Mapping[str, Any]


def find_iteration(path: Path) -> Path:
    """Return the checkpoint at a path: the folder of one iteration, or the newest in the folder that Megatron
    saves to.

    Raises:
        StrettoError: there is none, or it has a format that is not read.
    """
    folder = path
    if (path / LATEST).is_file():
        text = _short_text(path, LATEST)
        if not (text == "release" or (text.isascii() and text.isdecimal())):
            raise StrettoError(f"{path / LATEST} is {text[:40]!r}, no number of an iteration")
        folder = path / (text if text == "release" else f"iter_{int(text):07d}")
        if not folder.is_dir():
            raise StrettoError(
                f"{path / LATEST} names {folder.name}, which is not there",
                hint="name a folder iter_... that is",
            )
    _check_kind(folder)
    return folder


def _short_text(folder: Path, name: str) -> str:
    """Read a small text file of the checkpoint; links are refused."""
    try:
        with open_plain(folder, name) as file:
            text = file.read(_LONGEST + 1)
    except DamageError as error:
        raise StrettoError(f"{folder / name} cannot be read: {error}", hint="is the copy complete?") from None
    if len(text) > _LONGEST:
        raise StrettoError(f"{folder / name} has more than {_LONGEST} bytes", hint="is the copy complete?")
    return text.decode("utf-8", errors="replace").strip()


def _check_kind(folder: Path) -> None:
    if folder.is_dir() and any(folder.glob("mp_rank_*")):
        raise StrettoError(
            f"{folder} is in Megatron's old format, a file mp_rank_.. for each rank, which is not read",
            hint="convert it there: the script that trained it with --ckpt-convert-format torch_dist "
            "--ckpt-convert-save NEW",
        )
    if not (folder / KIND).is_file():
        raise StrettoError(
            f"{folder} is no distributed checkpoint of Megatron: it has no {KIND}",
            hint=f"name a folder iter_..., or the one with {LATEST}"
            if not (folder / METADATA).is_file()
            else "of torchtitan: --format dcp. Of Megatron-FSDP (fsdp_dtensor): not read; export its weights "
            "to Hugging Face's format with Megatron-Bridge",
        )
    try:
        kind: Any = json.loads(_short_text(folder, KIND))
    except (ValueError, RecursionError) as error:
        if isinstance(error, StrettoError):
            raise
        kind = None
    backend: Any = cast("dict[str, Any]", kind).get("sharded_backend") if isinstance(kind, dict) else None
    if backend != BACKEND:
        save = "load and save it once with --ckpt-format torch_dist"
        raise StrettoError(
            f"{folder} is of the format {backend!r}, as its {KIND} says; {BACKEND} is read",
            hint=f"{save}, in Megatron-Core before 0.13, which still reads zarr"
            if backend == "zarr"
            else save,
        )


def read_common(folder: Path) -> Common:
    """Read common.pt; nothing in it is run.

    Raises:
        StrettoError: there is none, it is damaged, or names code that no such file has.
    """
    if not (folder / COMMON).is_file():
        raise StrettoError(
            f"{folder} has no {COMMON}, where Megatron keeps its arguments and the optimiser's settings",
            hint="copy the whole folder again",
        )
    value = read_saved(folder / COMMON, NAMES)
    if not isinstance(value, dict):
        raise StrettoError(f"{folder / COMMON} is no state of Megatron")
    state = cast("dict[str, Any]", value)
    args = state.get("args")
    plain: dict[str, Any] = {}
    if isinstance(args, Record) and args.name == _NAMESPACE and isinstance(args.state, dict):
        plain = {
            key: item
            for key, item in cast("dict[Any, Any]", args.state).items()
            if isinstance(key, str) and _is_plain(item)
        }
    iteration = state.get("iteration", 0)
    scheduler = state.get("opt_param_scheduler")
    if type(iteration) is not int or not 0 <= iteration < 1 << 53:
        raise StrettoError(f"{folder / COMMON}: its iteration is {iteration!r}")
    return Common(
        args=plain,
        iteration=iteration,
        optimiser=state.get("optimizer"),
        scheduler=cast("dict[str, Any]", scheduler) if isinstance(scheduler, dict) else {},
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    return value is None or isinstance(value, bool | int | float | str)


def groups_of(common: Common, folder: Path) -> tuple[list[Mapping[str, Any]], int]:
    """Return the optimiser's parameter groups, and the number of updates that it counts.

    Several optimisers, one of them for the experts, are a dict by number.

    Raises:
        StrettoError: their form is not read, or their counts differ.
    """
    several = common.optimiser
    if not isinstance(several, dict) or not several:
        raise StrettoError(
            f"{folder / COMMON} has no optimiser, but the checkpoint has its states",
            hint="--weights-only imports the model without its optimiser",
        )
    every = cast("dict[Any, Any]", several)
    each = list(every.values()) if all(type(key) is int for key in every) else [every]
    groups, counts = list[Mapping[str, Any]](), set[Any]()
    for item in each:
        inner = item.get("optimizer", item) if isinstance(item, dict) else None
        if not isinstance(inner, dict):
            raise StrettoError(f"{folder / COMMON}: its optimiser is in a form that is not known here")
        fields = cast("dict[str, Any]", inner)
        state = fields.get("state")
        common_step = cast("dict[str, Any]", state).get("common_step") if isinstance(state, dict) else None
        for group in fields.get("param_groups") or ():
            if isinstance(group, dict):
                groups.append(cast("dict[str, Any]", group))
                counts.add(common_step if common_step is not None else groups[-1].get("step"))
    counts.discard(None)
    if not groups or len(counts) > 1 or any(count != int(count) or count < 0 for count in counts):
        raise StrettoError(
            f"{folder / COMMON}: the optimiser's groups count {sorted(counts) or 'no'} updates",
            hint="--weights-only imports the model without its optimiser",
        )
    return groups, int(counts.pop()) if counts else common.iteration


def optimiser_of(common: Common, groups: Sequence[Mapping[str, Any]], notes: list[str]) -> Optimiser:
    """Return AdamW's settings: the peak rate, betas, eps, and the weight decay of the parameters that decay.

    Raises:
        StrettoError: the groups do not agree.
    """
    decaying = [group for group in groups if _number(group, "wd_mult", 1.0) > 0.0] or list(groups)
    first = decaying[0]
    rates = {_number(group, "max_lr", _number(group, "lr", 0.0)) for group in groups}
    rate = _number(common.args, "lr", 0.0) or max(rates)
    if not rate:
        rate = Optimiser.lr
        notes.append(f"it does not say its learning rate: here it is {rate}")
    if "clip_grad" not in common.args:
        notes.append(
            "it does not say how gradients were clipped: here they are to a norm of 1.0, as is usual"
        )
    if len(rates) > 1:
        notes.append(
            f"the learning rate differed among parameters: {sorted(rates)}; here it is {rate} for all"
        )
    betas = first.get("betas") or (common.args.get("adam_beta1"), common.args.get("adam_beta2"))
    pair = tuple(cast("Sequence[Any]", betas)) if isinstance(betas, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(beta, float) and 0 <= beta < 1 for beta in pair):
        raise StrettoError(f"common.pt: betas of the optimiser are {betas!r}, no pair of numbers below 1")
    clip = _number(common.args, "clip_grad", 1.0)
    sources = {"lr": (common.args, *groups), "weight_decay": (common.args, first), "eps": (first,)}
    unknown = [name for name, places in sources.items() if not any(name in place for place in places)]
    if "lr" in unknown and any("max_lr" in group for group in groups):
        unknown.remove("lr")
    if unknown:
        notes.append(f"the optimiser's {', '.join(unknown)} are not in it: optim has the usual values")
    return Optimiser(
        lr=rate,
        betas=(pair[0], pair[1]),
        eps=_number(first, "eps", 1e-8),
        weight_decay=_number(first, "weight_decay", 0.0) or _number(common.args, "weight_decay", 0.0),
        clip=clip or None,
    )


def _number(fields: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) and value == value else otherwise
