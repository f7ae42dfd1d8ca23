"""What would make the fullest rank of a job smaller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stretto.planner.memory.job import block_modes
from stretto.planner.memory.ranks import MemoryJob, rank_memory


@dataclass(frozen=True)
class Advice:
    """One change of the config.

    Attributes:
        setting: as on the command line.
        saved: bytes that the fullest rank has less; negative where it has more.
    """

    setting: str
    saved: int

    @property
    def cheaper(self) -> bool:
        """Whether it saves at all."""
        return self.saved > 0


def advice(job: MemoryJob) -> list[Advice]:
    """Changes that are legal for the job, those that save most first."""
    now = max(rank.total for rank in rank_memory(job))
    found = [
        Advice(setting, now - max(rank.total for rank in rank_memory(other)))
        for setting, other in _others(job)
    ]
    return sorted(found, key=lambda one: -one.saved)


def _others(job: MemoryJob) -> Iterator[tuple[str, MemoryJob]]:
    how, modes = job.how, set(job.modes)
    if how.tp > 1 and not how.sequence_parallel:
        yield "layout.sequence_parallel=true", replace(job, how=replace(how, sequence_parallel=True))
    explicit = how.attention == "explicit" or job.shape.dropout > 0
    if modes == {"none"} and explicit:
        yield "recompute.mode=selective", block_modes(job, "selective")
    if modes != {"full"}:
        yield "recompute.mode=full", block_modes(job, "full")
    elif how.tp > 1 and not how.sequence_parallel and not how.shard_inputs:
        yield "recompute.shard_inputs=true", replace(job, how=replace(how, shard_inputs=True))
    if how.attention == "explicit" and not job.shape.dropout:
        yield "train.attention=flash", replace(job, how=replace(how, attention="flash"))
