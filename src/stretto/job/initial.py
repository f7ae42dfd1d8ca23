"""Initial values of a new model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from stretto.job.field import Field

_INTO_RESIDUAL = (
    "attn.proj.weight",
    "cross.proj.weight",
    "mlp.down.weight",
    "mlp.experts.down",
    "mlp.shared.down.weight",
)


@dataclass(frozen=True, kw_only=True)
class Initial:
    """Initial values of new weights: matrices are normally distributed."""

    init_std: Annotated[
        float, Field("Standard deviation of the normal initial values of matrices.", gt=0)
    ] = 0.02
    scaled_init: Annotated[
        bool,
        Field(
            "Projections into the residual stream have `init_std / sqrt(2 layers)` (Radford et al. 2019, "
            "section 2.3; Megatron-LM's `scaled_init_method_normal`); false: `init_std`."
        ),
    ] = True

    def std(self, name: str, layers: int) -> float:
        """Return the standard deviation of a matrix, given its name in a plain model of `layers` blocks."""
        if self.scaled_init and name.endswith(_INTO_RESIDUAL):
            return self.init_std / (2 * layers) ** 0.5
        return self.init_std
