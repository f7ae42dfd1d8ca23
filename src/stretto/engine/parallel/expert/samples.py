"""Per-sample statistics of samples whose tokens are spread over several ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.parallel.collectives import all_sum, gather
from stretto.engine.parallel.tensor.sequence import SequenceSplit

if TYPE_CHECKING:
    from stretto.engine.parallel.mesh import Mesh


class _OnDevice(NamedTuple):
    valid: Tensor | None
    natural: Tensor
    here: Tensor


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The tokens of each sample on this rank, and the ranks with its other tokens.

    length: tokens of a sample.
    positions: [tokens here] int64; `length` and above are padding.
    group: ranks that share a sample; each has as many tokens, padding counted.
    natural: [length] int64: where each position is, when the group's tokens stand one rank after the other.
    """

    length: int
    positions: Tensor
    group: ProcessGroup | None
    natural: Tensor
    _moved: dict[torch.device, _OnDevice] = field(
        default_factory=dict[torch.device, "_OnDevice"], compare=False, repr=False
    )

    @classmethod
    def of(cls, mesh: Mesh, length: int, *, sequence: bool, apart: bool) -> Samples:
        """This rank's part of samples of `length` tokens.

        Args:
            sequence: the sequence is split over tp already, outside of here.
            apart: tp ranks work on different tokens here; otherwise all on the same.
        """
        axes = "tp-cp" if apart else "cp"
        ranks = mesh.layout.group(mesh.rank, axes)
        parts = [_positions(mesh, rank, length, sequence, apart) for rank in ranks]
        every = torch.cat(parts)
        natural = every.argsort(stable=True)[:length]
        return cls(
            length=length, positions=parts[ranks.index(mesh.rank)], group=mesh.group(axes), natural=natural
        )

    @property
    def alone(self) -> bool:
        """Whether this rank has all tokens of its samples, in order, however many these are."""
        return self.group is None and len(self.positions) == self.length

    def valid(self, device: torch.device) -> Tensor | None:
        """[tokens here] bool, False where a token is padding; None where none is."""
        return self._on(device).valid

    def whole(self, x: Tensor) -> Tensor:
        """x [b, tokens here, ...] of all ranks: [b, length, ...], by position. Not differentiable."""
        return x if self.alone else gather(x, self.group, 1).index_select(1, self._on(x.device).natural)

    def here(self, x: Tensor) -> Tensor:
        """This rank's part of x [b, length, ...]; of padding, that of the last position."""
        return x if self.alone else x.index_select(1, self._on(x.device).here)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks that share a sample, in new memory."""
        return x if self.group is None else all_sum(x.clone(), self.group)

    def _on(self, device: torch.device) -> _OnDevice:
        """The tables on a device, copied there once."""
        if device not in self._moved:
            real = self.positions < self.length
            self._moved[device] = _OnDevice(
                None if bool(real.all()) else real.to(device),
                self.natural.to(device),
                self.positions.clamp(max=self.length - 1).to(device),
            )
        return self._moved[device]


def _positions(mesh: Mesh, rank: int, length: int, sequence: bool, apart: bool) -> Tensor:
    """Positions of the tokens that a rank works on."""
    at, tp = mesh.layout.coordinates(rank), mesh.size("tp")
    split = SequenceSplit(
        length=length,
        cp=mesh.size("cp"),
        cp_index=at["cp"],
        tp=tp if sequence else 1,
        tp_index=at["tp"] if sequence else 0,
    )
    if not apart:
        return split.positions
    if sequence:
        return split.shard
    parts = even_parts(split.positions.unsqueeze(0), tp, split.padded)
    return parts.squeeze(0).chunk(tp)[at["tp"]]


def even_parts(x: Tensor, parts: int, fill: int | float) -> Tensor:
    """x [b, s, ...] with s made a multiple of `parts` by `fill` at the end."""
    missing = -x.shape[1] % parts
    return x if not missing else torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), fill)], 1)
