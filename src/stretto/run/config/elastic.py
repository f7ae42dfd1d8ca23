"""Layouts of a job by number of ranks, for runs that go on with fewer or more of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.run.config.section import Section


class ElasticLayout(Section):
    """A layout of another number of ranks than `layout`'s. Sizes that are left out are 1; what is not said
    here is as in `layout`, `batch` and `schedule` of the config, whichever layout the job had before.
    """

    tp: int = Field(default=1, gt=0, description="As in `layout`.")
    cp: int = Field(default=1, gt=0, description="As in `layout`.")
    ep: int = Field(default=1, gt=0, description="As in `layout`.")
    dp: int = Field(default=1, gt=0, description="As in `layout`.")
    pp: int = Field(default=1, gt=0, description="As in `layout`.")
    expert_tp: int | None = Field(default=None, gt=0, description="As in `layout`.")
    stages: list[int] | None = Field(default=None, description="As in `layout`.")
    encoder_pp: int | None = Field(default=None, gt=0, description="As in `layout`.")
    micro_size: int | None = Field(
        default=None, gt=0, description="Samples per microbatch; null: `batch.micro_size`."
    )
    schedule: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the schedule, with its usual options; null: that of `schedule`.",
    )

    @property
    def ranks(self) -> int:
        """Processes of the layout; experts share those of other axes."""
        return self.tp * self.cp * self.dp * self.pp


class ElasticConfig(Section):
    """Fewer or more ranks: a run goes on from its checkpoint with the layout for the number that there is,
    with the same global batch and the same samples in the same order. `WORLD_SIZE` of torchrun chooses it, or
    `--ranks`; where a local rank dies twice in one step, or devices are gone, a restart takes the next
    smaller one.
    """

    layouts: list[ElasticLayout] | Literal["auto"] = Field(
        default_factory=list[ElasticLayout],
        examples=["[{dp: 3}, {pp: 2, micro_size: 2}]"],
        description="One layout for each further number of ranks; or `auto`: any number takes the fastest "
        "layout that fits it, as `stretto plan --cluster here` finds it, with its microbatches, schedule, "
        "sharding and recomputation.",
    )

    @property
    def listed(self) -> list[ElasticLayout]:
        """The layouts that are listed; none where they are planned."""
        return [] if self.layouts == "auto" else self.layouts
