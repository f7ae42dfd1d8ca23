"""Published models by name, in any common spelling; their sizes are in `presets_data`."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from stretto.errors import StrettoError, UnknownName, nearest
from stretto.job.presets_data import OUT_OF_SCOPE, TABLE
from stretto.job.shape import ModelShape

PRESETS: tuple[str, ...] = tuple(TABLE)

# other names of the same sizes; those that differ by case, punctuation or `_NOISE` alone need none
ALIASES = {
    "llama3.3-70b": "llama3.1-70b",
    "llama3-405b": "llama3.1-405b",
    "llama-7b": "llama1-7b",
    "llama-13b": "llama1-13b",
    "llama-30b": "llama1-33b",
    "llama-33b": "llama1-33b",
    "llama-65b": "llama1-65b",
    "llama4-scout": "llama4-e16",
    "llama4-scout-17b-16e": "llama4-e16",
    "llama4-maverick": "llama4-e128",
    "llama4-maverick-17b-128e": "llama4-e128",
    "codellama-7b": "llama2-7b",
    "gpt-175b": "gpt3-175b",
    "gpt3": "gpt3-175b",
    "gpt2-small": "gpt2",
    "gpt2-124m": "gpt2",
    "gpt2-117m": "gpt2",
    "gpt2-355m": "gpt2-medium",
    "gpt2-345m": "gpt2-medium",
    "gpt2-774m": "gpt2-large",
    "gpt2-1.5b": "gpt2-xl",
    "gpt-22b": "korthikanti-22b",
    "gpt-530b": "korthikanti-530b",
    "mt-nlg-530b": "korthikanti-530b",
    "gpt-1t": "korthikanti-1000b",
    "korthikanti-1t": "korthikanti-1000b",
    "megatron-175b": "korthikanti-175b",
    "megatron-530b": "megatron-529.6b",
    "megatron-1t": "megatron-1008.0b",
    "megatron-1008b": "megatron-1008.0b",
    "nemotron-8b": "nemotron3-8b",
    "nemotron-15b": "nemotron4-15b",
    "nemotron-22b": "nemotron3-22b",
    "nemotron-340b": "nemotron4-340b",
    "mistral-nemo-2407": "mistral-nemo-12b",
    "mistral-large-2407": "mistral-large-123b",
    "mixtral": "mixtral-8x7b",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2-72b": "qwen2.5-72b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3-671b": "deepseek-v3",
    "olmo2-1124-7b": "olmo2-7b",
    "olmo2-1124-13b": "olmo2-13b",
    "gpt-oss": "gpt-oss-120b",
    "flan-t5-small": "t5-v1.1-small",
    "flan-t5-base": "t5-v1.1-base",
    "flan-t5-large": "t5-v1.1-large",
    "flan-t5-xl": "t5-v1.1-xl",
    "flan-t5-xxl": "t5-v1.1-xxl",
}

# parts of names that do not affect sizes
_NOISE = re.compile(r"[-_ ](?:meta|hf|chat|base|instruct|it|v0\.[123]|pretrain)(?=$|[-_ ])|^meta[-_ ]")


def preset(name: str) -> ModelShape:
    """Return the published shape with a name such as "llama3-8b", "LLAMA3-70B", "meta-llama/Llama-3.1-405B"
    or "mixtral_8x7b": case, punctuation, owner and words such as "instruct" are ignored.

    Raises:
        UnknownName: no model has this name.
        StrettoError: the model is of a kind that Stretto has no costs for.
    """
    wanted = normalised_name(name)
    names = _preset_names()
    if wanted in names:
        return _build(names[wanted])
    for other, feature in OUT_OF_SCOPE.items():
        if wanted == normalised_name(other):
            raise StrettoError(
                f"model {name!r} has {feature}, which Stretto has no costs for",
                hint="transformers of the kinds in `stretto catalogue` can be planned",
            )
    everything = [*PRESETS, *ALIASES]
    closest = nearest(name.lower().rpartition("/")[2], everything)
    hint = f"did you mean {closest!r}?" if closest else f"known models: {', '.join(PRESETS)}"
    raise UnknownName(f"model {name!r} is not known", hint=hint)


def find_shape(name: str | Path) -> ModelShape:
    """Return a model's shape, given its name, a Hugging Face `config.json` or the folder of one.

    Raises:
        StrettoError: no model has this name, or the file's model cannot be planned.
    """
    if is_name(name):
        return preset(str(name))
    from stretto.job.huggingface import read_shape

    return read_shape(Path(name))


def is_name(name: str | Path) -> bool:
    """True if this is a model's name, not a file or a folder with a `config.json`."""
    path = os.path.expanduser(name)
    # unlike a Path's, these are False for names that no file can have
    return not (path.endswith(".json") or (os.path.isdir(path) and os.path.isfile(f"{path}/config.json")))


def normalised_name(name: str) -> str:
    """Return the letters and digits of a name, without its owner and words that do not affect sizes."""
    base = name.lower().rpartition("/")[2].strip()
    return re.sub(r"[^a-z0-9]", "", _NOISE.sub("", base))


@cache
def _preset_names() -> dict[str, str]:
    """Return the preset's name for every normalised name."""
    return {
        normalised_name(alias): name
        for alias, name in [*ALIASES.items(), *zip(PRESETS, PRESETS, strict=True)]
    }


@cache
def _build(name: str) -> ModelShape:
    return TABLE[name]()
