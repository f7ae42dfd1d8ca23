"""An encoder and a decoder with layouts of their own on one run of ranks, the encoder's first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stretto.errors import StrettoError
from stretto.layout.layout import Layout


@dataclass(frozen=True)
class EncoderDecoder:
    """Two layouts with the same dp and cp; the decoder's ranks begin where the encoder's end.

    Pipelines run through both: a decoder rank's pipeline comes from the encoder ranks with its dp and cp
    coordinates and its tp coordinate modulo the encoder's tp. Where the encoder's tp is smaller, one of its
    ranks so feeds several decoder ranks and is in several pipeline groups.

    Raises:
        StrettoError: dp or cp differ, or the encoder's tp exceeds the decoder's.
    """

    encoder: Layout
    decoder: Layout

    def __post_init__(self) -> None:
        for axis in ("dp", "cp"):
            first, second = self.encoder.sizes[axis], self.decoder.sizes[axis]
            if first != second:
                raise StrettoError(
                    f"encoder {axis}={first} and decoder {axis}={second} differ",
                    hint=f"give both {axis}={second}",
                )
        if self.encoder.tp > self.decoder.tp:
            raise StrettoError(
                f"encoder tp={self.encoder.tp} is above decoder tp={self.decoder.tp}",
                hint=f"use at most tp={self.decoder.tp} for the encoder",
            )
        first = self.encoder.offset + self.encoder.world
        object.__setattr__(self, "decoder", replace(self.decoder, offset=first))

    @property
    def world(self) -> int:
        """Ranks of both."""
        return self.encoder.world + self.decoder.world

    def groups(self, axes: str) -> list[list[int]]:
        """All groups over `axes`: those with pp run through both, else the encoder's come first."""
        if "pp" not in axes.split("-"):
            return self.encoder.groups(axes) + self.decoder.groups(axes)
        return [self._before(group[0], axes) + group for group in self.decoder.groups(axes)]

    def group(self, rank: int, axes: str) -> list[int]:
        """The group over `axes` that holds `rank`; the first one where an encoder rank is in several."""
        inside = self.encoder if rank < self.decoder.offset else self.decoder
        own = inside.group(rank, axes)
        if "pp" not in axes.split("-"):
            return own
        if inside is self.decoder:
            return self._before(own[0], axes) + own
        return own + self.decoder.group(
            self.decoder.rank(**self.encoder.coordinates(own[0]) | {"pp": 0}), axes
        )

    def _before(self, rank: int, axes: str) -> list[int]:
        """The encoder's part of the group of decoder rank `rank`."""
        at = self.decoder.coordinates(rank)
        return self.encoder.group(self.encoder.rank(**at | {"tp": at["tp"] % self.encoder.tp, "pp": 0}), axes)
