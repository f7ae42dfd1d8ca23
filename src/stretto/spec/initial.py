"""How the weights of a new model begin."""

from __future__ import annotations

from dataclasses import dataclass

_INTO_RESIDUAL = (
    "attn.proj.weight",
    "cross.proj.weight",
    "mlp.down.weight",
    "mlp.experts.down",
    "mlp.shared.down.weight",
)


@dataclass(frozen=True, kw_only=True)
class Initial:
    """The spread of the normal initial values of matrices.

    Attributes:
        init_std: standard deviation.
        scaled_init: that of projections into the residual stream is divided by sqrt(2 layers) (Radford et
            al. 2019, section 2.3), as Megatron-LM's `scaled_init_method_normal` does.
    """

    init_std: float = 0.02
    scaled_init: bool = True

    def std(self, name: str, layers: int) -> float:
        """The standard deviation of a matrix by its name in a plain model of so many blocks."""
        if self.scaled_init and name.endswith(_INTO_RESIDUAL):
            return self.init_std / (2 * layers) ** 0.5
        return self.init_std
