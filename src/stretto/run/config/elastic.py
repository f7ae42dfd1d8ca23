"""Layouts of a job by number of ranks, for runs that go on with fewer or more of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stretto.spec.field import Field


@dataclass(frozen=True, kw_only=True)
class ElasticLayout:
    """A layout of another number of ranks than `layout`'s. Sizes that are left out are 1; what is not said
    here is as in `layout`, `batch` and `schedule` of the config, whichever layout the job had before.
    """

    tp: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    cp: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    ep: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    dp: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    pp: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    expert_tp: Annotated[int | None, Field("As in `layout`.", gt=0)] = None
    stages: Annotated[list[int] | None, Field("As in `layout`.")] = None
    encoder_pp: Annotated[int | None, Field("As in `layout`.", gt=0)] = None
    micro_size: Annotated[int | None, Field("Samples per microbatch; null: `batch.micro_size`.", gt=0)] = None
    schedule: Annotated[
        str | None,
        Field("Name of the schedule, with its usual options; null: that of `schedule`.", filled=True),
    ] = None

    @property
    def ranks(self) -> int:
        """Processes of the layout; experts share those of other axes."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Fewer or more ranks: a run goes on from its checkpoint with the layout for the number that there is,
    with the same global batch and the same samples in the same order. `WORLD_SIZE` of torchrun chooses it, or
    `--ranks`; where a local rank dies twice in one step, or devices are gone, a restart takes the next
    smaller one.
    """

    layouts: Annotated[
        list[ElasticLayout] | Literal["auto"],
        Field(
            "One layout for each further number of ranks; or `auto`: any number takes the fastest layout "
            "that fits it, as `stretto plan --cluster here` finds it, with its microbatches, schedule, "
            "sharding and recomputation.",
            examples=("[{dp: 3}, {pp: 2, micro_size: 2}]",),
        ),
    ] = field(default_factory=list[ElasticLayout])

    @property
    def listed(self) -> list[ElasticLayout]:
        """The layouts that are listed; none where they are planned."""
        return [] if self.layouts == "auto" else self.layouts
