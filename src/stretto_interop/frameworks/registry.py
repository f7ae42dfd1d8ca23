"""The frameworks that jobs can be written for, and read from, by name."""

from __future__ import annotations

from stretto.errors import StrettoError, nearest
from stretto_interop.frameworks.deepspeed import DEEPSPEED
from stretto_interop.frameworks.mapping import ExternalFramework
from stretto_interop.frameworks.megatron.framework import MEGATRON
from stretto_interop.frameworks.nemo import NEMO
from stretto_interop.frameworks.torchtitan import TORCHTITAN

FRAMEWORKS: dict[str, ExternalFramework] = {
    item.name: item for item in (MEGATRON, NEMO, TORCHTITAN, DEEPSPEED)
}


def framework(name: str) -> ExternalFramework:
    """Return the framework of that name.

    Raises:
        StrettoError: there is none.
    """
    if name not in FRAMEWORKS:
        closest = nearest(name.lower(), FRAMEWORKS)
        hint = f"did you mean {closest}?" if closest else "--table reads a CSV" * name.endswith(".csv")
        raise StrettoError(f"framework {name!r} is not one of {', '.join(FRAMEWORKS)}", hint=hint)
    return FRAMEWORKS[name]
