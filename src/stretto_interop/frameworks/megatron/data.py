"""Text, tokens and samples in Megatron-LM's arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stretto.errors import StrettoError, read_text
from stretto.run.config.sources import megatron_prefix
from stretto_interop.frameworks.fields import RUN, JobValues, name_of
from stretto_interop.frameworks.mapping import Rule, Settings, Unset, Values, next_token, refused, rule

_PARTED = ("train-data-path", "per-split-data-args-path")  # each split with prefixes of its own


def parted(settings: Settings) -> bool:
    """Whether training, validation and test have prefixes of their own."""
    return not settings.keys().isdisjoint(_PARTED)


def _write_data(values: JobValues) -> Settings:
    """The prefixes of indexed datasets, with the weights of a mixture; other sources are left to fill in."""
    source = values[RUN.data.source]
    names: list[str] = [source] if isinstance(source, str) else list(source)
    prefixes = [megatron_prefix(name) for name in names]
    if values.is_open(RUN.data.source) or not names or None in prefixes:
        return {"data-path": Unset(RUN.data.source, "PREFIX")}
    weights = source.values() if isinstance(source, Mapping) else [None] * len(names)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    pairs = zip(weights, prefixes, strict=True)  # pyright: ignore[reportUnknownArgumentType]
    return {"data-path": [word for pair in pairs for word in pair if word is not None]}


def _read_data(settings: Settings) -> Values:
    """One prefix, several, or several with weights; of splits that are given apart those of training."""
    argv = _argv(settings)
    if not argv:
        return {name_of(RUN.data.source): "python-stdlib"} if "mock-data" in settings else {}
    if len(argv) == 1:
        return {name_of(RUN.data.source): argv[0]}
    try:
        weights = [float(word) for word in argv[::2]]
    except ValueError:
        return {name_of(RUN.data.source): list(argv)}
    if len(argv) % 2:
        raise StrettoError(
            f"--data-path has {len(weights)} weights for {len(argv) // 2} prefixes",
            hint="a weight before each prefix, as in 0.7 a 0.3 b",
        )
    mixture = dict[str, float]()
    for weight, prefix in zip(weights, argv[1::2], strict=True):
        mixture[prefix] = mixture.get(prefix, 0.0) + weight
    return {name_of(RUN.data.source): mixture}


def _argv(settings: Settings) -> Sequence[str]:
    """The words of --data-path, wherever they stand.

    Raises:
        StrettoError: the file that has them is not here, or is not such a file.
    """
    for name in ("data-path", "train-data-path"):
        if settings.get(name):
            return settings[name]
    if (path := settings.get("data-args-path")) is not None:
        return read_text(Path(path).expanduser()).split()
    if (path := settings.get("per-split-data-args-path")) is None:
        return ()
    text = read_text(Path(path).expanduser())
    try:
        argv = json.loads(text)["train"]
    except (ValueError, KeyError, TypeError):
        message = f"--per-split-data-args-path: {path} has no list `train`"
        raise StrettoError(
            message, hint='a JSON object, as {"train": ["1.0", "PREFIX"], "valid": ...}'
        ) from None
    return argv.split() if isinstance(argv, str) else [str(word) for word in argv]


def _read_split(settings: Settings) -> Values:
    """All is trained on where other splits have other prefixes."""
    if parted(settings):
        return {RUN.data.split: "100,0,0"}
    split = settings.get("split")
    return {} if split is None else {RUN.data.split: _ratios(split)}


def _data_notes(values: JobValues) -> Iterable[str]:
    left = isinstance(_write_data(values)["data-path"], Unset)
    if left and RUN.data.source not in values.unsaid | values.open:
        source = values[RUN.data.source]
        yield f"data.source={source}: Megatron-LM reads PREFIX.bin and .idx of its tools/preprocess_data.py"


def _write_cache(values: JobValues) -> Settings:
    cache = values[RUN.data.cache]
    return {} if cache is None else {"data-cache-path": cache}


def _read_cache(settings: Settings) -> Values:
    return {RUN.data.cache: settings.get("data-cache-path", settings.get("object-storage-cache-path"))}


def _ratios(split: str) -> str:
    """Three numbers, as Megatron-LM finds them: quotes are left out, and those that are missing are 0."""
    numbers = re.findall(r"[.0-9]+", split)
    return ",".join([*numbers, "0", "0"][:3])


_DOCUMENTS = ("reset-position-ids", "reset-attention-mask", "eod-mask-loss")


def _write_packing(values: JobValues) -> Settings:
    packing = values[RUN.data.packing]
    if packing == "none":
        instead = "Megatron-LM's samples are filled with documents"
        raise refused(RUN.data.packing, packing, instead, ("stream", "documents"))
    return dict.fromkeys(_DOCUMENTS, True) if packing == "documents" else {}


def _read_packing(settings: Settings) -> Values:
    """All of the three; why one or two are nothing here is told by `arguments.lost`."""
    return {RUN.data.packing: "documents"} if all(name in settings for name in _DOCUMENTS) else {}


DATA: tuple[Rule, ...] = (
    rule(
        RUN.data.source,
        ("data-path", "data-args-path", *_PARTED, "mock-data", "dataloader-type"),
        _write_data,
        _read_data,
        notes=_data_notes,
    ),
    rule(RUN.data.cache, "data-cache-path object-storage-cache-path", _write_cache, _read_cache),
    rule(
        RUN.data.split,
        "split",
        lambda values: {"split": values[RUN.data.split].replace(" ", "")},
        _read_split,
    ),
    rule(RUN.data.packing, _DOCUMENTS, _write_packing, _read_packing),
    *next_token("pretrain_gpt.py predicts the next token"),
)
