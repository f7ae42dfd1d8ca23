"""The style of causal attention over a sequence that is split over context-parallel ranks, and the modules
that replace the plain attention core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.documents import Packing
from stretto.engine.kernels import DropoutMask, ScoreOptions, rows
from stretto.engine.parallel.context.ring import RingMember, attend
from stretto.engine.parallel.context.ulysses import to_heads, to_positions
from stretto.engine.parallel.styles import ParallelStyle, ParameterShard
from stretto.engine.parallel.tensor.dropout import Cut, KeyedDropout
from stretto.engine.parallel.tensor.sequence import zigzag
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.engine.parallel.mesh import Mesh

METHODS = ("ring", "ulysses")


@dataclass(frozen=True)
class ContextAttention(ParallelStyle):
    """Causal attention over a sequence whose positions are spread over the cp ranks in zigzag order.

    The module is `CausalAttention`, or one with its arguments and its `drop`, `explicit`, `packing` and
    `scores`.

    Args:
        method: "ring": keys and values circulate; "ulysses": ranks exchange positions for heads.
        length: tokens of a sample without padding.

    Raises:
        StrettoError: the method is unknown.
    """

    method: str
    length: int

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise StrettoError(
                f"layout.context is {self.method!r}", hint=f"it must be one of {', '.join(METHODS)}"
            )

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        for attribute in ("drop", "explicit", "packing", "scores"):
            if not hasattr(module, attribute):
                raise StrettoError(
                    f"{name} ({type(module).__name__}) has no {attribute}",
                    hint="ContextAttention style is for CausalAttention and cores with its interface",
                )
        return {}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        cp, group = mesh.size("cp"), mesh.group("cp")
        if group is None:
            # if samples are padded for tensor-parallel ranks, masks are still those of unpadded samples
            padded_masks = isinstance(module.drop, KeyedDropout) and self.length % mesh.size("tp")
            return UlyssesAttention(module, None, 0, 1, self.length) if padded_masks else module
        attention = RingAttention if self.method == "ring" else UlyssesAttention
        return attention(module, group, mesh.index("cp"), cp, self.length).train(module.training)


class _Attention(nn.Module):
    """Base of both methods: the plain core's dropout, this rank's index, and checks."""

    def __init__(self, core: nn.Module, group: ProcessGroup | None, index: int, cp: int, length: int) -> None:
        super().__init__()
        self.drop = cast(nn.Module, core.drop)
        self.packing = cast(Packing, core.packing)
        self.group = group
        self.index = index
        self.cp = cp
        self.length = length

    def extra_repr(self) -> str:
        return f"rank {self.index} of {self.cp}, length={self.length}"

    @property
    def _dropout(self) -> KeyedDropout | None:
        """The dropout module, or None if it is inactive."""
        drop = self.drop
        if isinstance(drop, KeyedDropout):
            return drop if drop.active else None
        if self.training and getattr(drop, "p", 0.0):
            raise StrettoError(
                f"attention has {type(drop).__name__}, whose masks would not match those of other ranks",
                hint="call key_dropout(model, keys) before parallelize",
            )
        return None

    def _check(self, n: int) -> None:
        if n * self.cp < self.length or (self.cp > 1 and n % 2):
            raise StrettoError(
                f"attention got {n} positions of a sample of {self.length} tokens on each of {self.cp} ranks",
                hint="give every rank its SequenceSplit.positions",
            )


class RingAttention(_Attention):
    """Causal attention of this rank's queries to all keys, which circulate (`ring.py`).

    Attributes:
        explicit: compute attention without fused kernels.
    """

    def __init__(self, core: nn.Module, group: ProcessGroup | None, index: int, cp: int, length: int) -> None:
        super().__init__(core, group, index, cp, length)
        self.explicit = bool(core.explicit)
        self.scores = cast("Callable[[int], ScoreOptions]", core.scores)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [b, heads, n, d], k [b, kv_heads, n, d] and v [b, kv_heads, n, dv] of this rank's positions, and
        the sinks of these heads, if any, to [b, heads, n, dv].
        """
        self._check(q.shape[2])
        assert self.group is not None
        ring = RingMember(
            group=self.group,
            index=self.index,
            size=self.cp,
            scores=self.scores(q.shape[-1]),
            explicit=self.explicit,
            documents=self.packing.documents,
        )
        kind, masks = q.device.type, self._masks(q, ring)
        if not torch.is_autocast_enabled(kind):
            return attend(rows(q), rows(k), rows(v), ring, masks=masks, sinks=sinks)
        q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in (q, k, v))
        with torch.autocast(kind, enabled=False):
            return attend(rows(q), rows(k), rows(v), ring, masks=masks, sinks=sinks)

    def _masks(self, q: Tensor, ring: RingMember) -> list[DropoutMask] | None:
        """Return the dropout masks of each round, or None without dropout."""
        drop = self._dropout
        if drop is None:
            return None
        n = q.shape[2]
        positions = [zigzag(n * self.cp, self.cp, rank) for rank in range(self.cp)]
        rounds = ring.rounds(n)
        keys = torch.cat([positions[round_.owner][round_.keys] for round_ in rounds])
        cuts = [*drop.cuts, Cut(2, self.length, positions[self.index]), Cut(3, self.length, keys)]
        mask = drop.mask((*q.shape[:2], n, len(keys)), q.device, cuts)
        blocks = mask.split([round_.keys.stop - round_.keys.start for round_ in rounds], 3)
        scale = 1.0 / (1.0 - drop.p)
        # cloned, so that the backward does not keep the mask of all queries and keys alive
        return [DropoutMask(m[:, :, r.queries].clone(), scale) for m, r in zip(blocks, rounds, strict=True)]


class UlyssesAttention(_Attention):
    """Causal attention of some of the heads over the entire sequence, by the plain core (`ulysses.py`)."""

    def __init__(self, core: nn.Module, group: ProcessGroup | None, index: int, cp: int, length: int) -> None:
        super().__init__(core, group, index, cp, length)
        self.core = core
        self._dropout_for: tuple[nn.Module, int, int] | None = None  # what the core's dropout was built for

    @property
    def explicit(self) -> bool:
        """True if the core computes attention without fused kernels."""
        return bool(self.core.explicit)

    @explicit.setter
    def explicit(self, value: bool) -> None:
        setattr(self.core, "explicit", value)  # noqa: B010

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [b, heads, n, d], k [b, kv_heads, n, d] and v [b, kv_heads, n, dv] of this rank's positions, and
        the sinks of these heads, if any, to [b, heads, n, dv].
        """
        self._check(q.shape[2])
        self._set_dropout(q)
        if self.group is None:
            return self.core(q, k, v, sinks)
        local = None if sinks is None else sinks.chunk(self.cp)[self.index]
        y = self.core(*to_heads(q, k, v, self.group, self.cp), local)
        return to_positions(y, self.group, self.cp)

    def _set_dropout(self, q: Tensor) -> None:
        """Set the core's dropout to this module's, for this rank's heads and all positions."""
        heads = q.shape[1]
        padded = q.shape[2] * self.cp
        drop = self.drop
        if self._dropout_for == (drop, heads, padded):
            return
        self._dropout_for = (drop, heads, padded)
        _ = self._dropout  # raises for dropout without keys
        if isinstance(drop, KeyedDropout):
            before = next((cut for cut in drop.cuts if cut.dim == 1), Cut.even(1, heads, 0, 1))
            local = before.indices.chunk(self.cp)[self.index]
            cuts = [Cut(1, before.size, local), *(cut for cut in drop.cuts if cut.dim != 1)]
            if padded > self.length:
                positions = torch.arange(padded)
                cuts += [Cut(2, self.length, positions), Cut(3, self.length, positions)]
            drop = KeyedDropout(drop.p, drop.name, drop.keys, cuts).train(drop.training)
        self.core.drop = drop


__all__ = ["METHODS", "ContextAttention", "RingAttention", "UlyssesAttention"]
