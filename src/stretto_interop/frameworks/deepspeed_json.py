"""The text of DeepSpeed's JSON, written and read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from stretto.errors import StrettoError
from stretto_interop.frameworks.mapping import ParsedSettings, Settings, Start, Unset
from stretto_interop.frameworks.others import others

_COMMENT = "//"  # no key of DeepSpeed's


def render(settings: Settings, notes: Sequence[str]) -> str:
    """The JSON, with comments under the key `//`: the notes, and what is still to be filled in, marked
    `auto`.
    """
    tree: dict[str, Any] = {}
    missing = list[str]()
    for name, value in settings.items():
        if isinstance(value, Unset):
            missing.append(f"fill in {name} ({value.name}), such as {value.example}")
        *sections, last = name.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = _AUTO if isinstance(value, Unset) else value
    return json.dumps({_COMMENT: [*notes, *missing], **tree}, indent=2) + "\n"


_AUTO = "auto"
# what DeepSpeed's pydantic models call otherwise, or used to
_RENAMED = {"bfloat16.": "bf16.", "zero_optimization.stage3_": "zero_optimization."}
_PRICED_IF_AUTO = (
    "train_",
    "gradient_accumulation_steps",
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.stage",
)


def parse(text: str, source: str, start: Start) -> ParsedSettings:
    """The JSON's settings by dotted names, without those that switch something off that is off anyway.

    Raises:
        StrettoError: no JSON object, a key twice, `auto` where a price depends on it, or nothing that says
            how many devices there are.
    """
    tree = _loaded(text, source)
    tree.pop(_COMMENT, None)
    settings = dict(_flat(tree))
    for name in [name for name, value in settings.items() if value == _AUTO]:
        if name.startswith(_PRICED_IF_AUTO):
            rule = f"{source}: {name} is auto, which the Trainer of transformers fills in"
            raise StrettoError(rule, hint="write the number (or true or false) in its place")
        del settings[name]
    for name, device in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if settings.pop(f"zero_optimization.{name}", False):  # until 0.3.16
            settings[f"zero_optimization.{device}.device"] = "cpu"
    disabled = [f"{section}." for section, inside in tree.items() if _is_off(inside)]
    unread = tuple(pattern.removesuffix("*") for pattern in others("deepspeed", "unread"))
    for name in [name for name in settings if name.startswith(unread)]:
        if not settings[name] or name.startswith(tuple(disabled)):
            del settings[name]
    if settings.get(_RATIO) == 1:
        del settings[_RATIO]
    _check_types(settings, source)
    return ParsedSettings(settings=_sized(settings, source, start.devices))


_RATIO = "zero_optimization.offload_optimizer.ratio"


def _is_off(section: object) -> bool:
    return isinstance(section, dict) and cast(dict[str, Any], section).get("enabled") is False


def _loaded(text: str, source: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict[str, Any]()
        for name, value in pairs:
            if name in tree:
                raise StrettoError(f"{source}: {name} is there twice", hint="DeepSpeed refuses that too")
            tree[name] = value
        return tree

    try:
        tree = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise StrettoError(
            f"{source} line {error.lineno}: {error.msg}", hint="is it DeepSpeed's JSON?"
        ) from None
    if not isinstance(tree, dict):
        raise StrettoError(f"{source} is no JSON object", hint="is it DeepSpeed's JSON?")
    loaded = cast(dict[str, Any], tree)
    if isinstance(loaded.get("zero_optimization"), bool):  # as it was until 0.3
        loaded["zero_optimization"] = {"stage": int(loaded["zero_optimization"])}
    return loaded


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _flat(cast(dict[str, Any], value), f"{name}.")
        else:
            old = next((old for old in _RENAMED if name.startswith(old)), None)
            yield (name if old is None else _RENAMED[old] + name.removeprefix(old)), value


_KINDS: Mapping[str, tuple[type, ...]] = {
    "train_batch_size": (int,),
    "train_micro_batch_size_per_gpu": (int,),
    "gradient_accumulation_steps": (int,),
    "tensor_parallel.autotp_size": (int,),
    "sequence_parallel_size": (int,),
    "data_parallel_size": (int,),
    "expert_parallel.autoep_size": (int,),
    "zero_optimization.stage": (int,),
    "zero_optimization.zero_hpz_partition_size": (int,),
    "zero_optimization.reduce_bucket_size": (int, float),
    "gradient_clipping": (int, float),
}


def _check_types(settings: dict[str, Any], source: str) -> None:
    """Raise StrettoError for a number that is none."""
    for name, kinds in _KINDS.items():
        value = settings.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kinds) or value < 0:
            expected = "a whole number" if kinds == (int,) else "a number"
            raise StrettoError(f"{source}: {name} is {value!r}", hint=f"{expected}, 0 or more")


def _sized(settings: dict[str, Any], source: str, devices: int | None) -> dict[str, Any]:
    """With the number of replicas, which follows from the devices where the JSON does not say it."""
    tp = max(1, settings.get("tensor_parallel.autotp_size", 1))
    model_parallel = tp * settings.get("sequence_parallel_size", 1)
    dp = settings.get("data_parallel_size")
    if dp is None and devices is None:
        raise StrettoError(
            f"{source} does not say how many devices there are", hint="--cluster with :N, as in h100:64"
        )
    if dp is None and devices is not None:
        dp, remainder = divmod(devices, model_parallel)
        if remainder:
            rule = f"{source}: {devices} devices are not a multiple of {model_parallel} model-parallel ranks"
            raise StrettoError(rule, hint=f"nearest: {max(1, dp) * model_parallel} devices")
    return {**settings, "data_parallel_size": dp}
