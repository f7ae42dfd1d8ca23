"""Specification of a synthetic click log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stretto.errors import StrettoError

MOST_IDS = 1 << 31
MOST_HOT = 1 << 12


@dataclass(frozen=True, kw_only=True)
class SyntheticFeature:
    """A categorical feature.

    rows: number of distinct ids, 0 to rows - 1.
    hot: mean pooling factor (ids per sample); the same for every sample unless `varying`.
    skew: exponent of the power law: the k-th most popular id has popularity 1 / k^skew; 0 is uniform.
    varying: True if the pooling factor varies between samples, uniformly from 0 to 2 hot.
    """

    name: str
    rows: int
    hot: float = 1.0
    skew: float = 1.05
    varying: bool = False

    def __post_init__(self) -> None:
        def wrong(field: str, rule: str) -> StrettoError:
            return StrettoError(f"feature {self.name}: {field} is {getattr(self, field)}", hint=rule)

        if not 1 <= self.rows <= MOST_IDS:
            raise wrong("rows", f"1 to {MOST_IDS:,}")
        if not 0 < self.hot <= MOST_HOT:
            raise wrong("hot", f"above 0 and at most {MOST_HOT}")
        if not self.varying and self.hot != int(self.hot):
            raise wrong("hot", "a whole number, or let the number of ids vary")
        if not 0 <= self.skew <= 10:
            raise wrong("skew", "0 to 10; click logs have about 1")

    @property
    def max_hot(self) -> int:
        """Maximum pooling factor."""
        floor = int(self.hot)
        return 2 * floor + (self.hot > floor) if self.varying else floor


@dataclass(frozen=True, kw_only=True)
class SyntheticSpec:
    """A click log as a pure function: these fields and i determine sample i.

    features: categorical features.
    samples: total number of samples, including held-out ones.
    valid: fraction of samples held out, taken from the end.
    dense: number of dense features.
    base_rate: fraction of samples that are clicked.
    strength: standard deviation of the true logit: 0 is pure noise, above 3 there is hardly any noise.
    seed: random seed.
    """

    features: tuple[SyntheticFeature, ...]
    samples: int = 1_000_000
    valid: float = 0.1
    dense: int = 13
    base_rate: float = 0.25
    strength: float = 1.5
    seed: int = 0

    def __post_init__(self) -> None:
        def wrong(field: str, rule: str) -> StrettoError:
            return StrettoError(f"synthetic clicks: {field} is {getattr(self, field)}", hint=rule)

        if not self.features:
            raise wrong("features", "one feature or more")
        if len({feature.name for feature in self.features}) < len(self.features):
            raise wrong("features", "names of features must be unique")
        if not 0 <= self.valid < 1:
            raise wrong("valid", "a share of the samples, from 0 to below 1")
        if not 1 <= self.samples < 1 << 60:
            raise wrong("samples", "1 or more")
        if not 0 < self.base_rate < 1:
            raise wrong("base_rate", "a share of the samples between 0 and 1")
        if not 0 <= self.strength <= 10:
            raise wrong("strength", "0 to 10")
        if self.dense < 0:
            raise wrong("dense", "0 or more")

    @property
    def held_out(self) -> int:
        """Number of samples in the `valid` split; the `train` split has at least one."""
        return min(round(self.samples * self.valid), self.samples - 1)

    def as_dict(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return asdict(self)


def geometric_features(
    count: int, low: int, high: int, *, hot: float = 1.0, skew: float = 1.05, varying: bool = False
) -> tuple[SyntheticFeature, ...]:
    """Features C1, C2, ... with `low` to `high` rows, evenly spaced on a logarithmic scale.

    Raises:
        StrettoError: `count` or `low` below 1, or `low` above `high`.
    """
    if count < 1 or not 1 <= low <= high:
        raise StrettoError(
            f"{count} features of {low} to {high} rows", hint="1 feature or more, 1 row or more, low first"
        )
    last = max(1, count - 1)
    rows = [round(low * (high / low) ** (i / last)) for i in range(count)]
    return tuple(
        SyntheticFeature(name=f"C{i + 1}", rows=feature_rows, hot=hot, skew=skew, varying=varying)
        for i, feature_rows in enumerate(rows)
    )
