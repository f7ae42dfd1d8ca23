"""Alternatives to a job's settings, on its fullest rank: what would save memory, and every data-parallel
mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stretto.layout.shards import Mode
from stretto.planner.counts.rank_parameters import elements_of
from stretto.planner.memory.job import block_modes
from stretto.planner.memory.ranks import MemoryJob, RankMemory, lasting_bytes, rank_memory


@dataclass(frozen=True)
class MemorySuggestion:
    """One change of the config that would change the memory of the fullest rank.

    Attributes:
        setting: the change as on the command line.
        saved: bytes that the fullest rank saves; negative if it needs more.
    """

    setting: str
    saved: int

    @property
    def cheaper(self) -> bool:
        """True if it saves memory."""
        return self.saved > 0


def memory_suggestions(job: MemoryJob) -> list[MemorySuggestion]:
    """Changes that are legal for the job, the largest saving first."""
    now = max(rank.total for rank in rank_memory(job))
    suggestions = [
        MemorySuggestion(setting, now - max(rank.total for rank in rank_memory(other)))
        for setting, other in _others(job)
    ]
    return sorted(suggestions, key=lambda suggestion: -suggestion.saved)


def _others(job: MemoryJob) -> Iterator[tuple[str, MemoryJob]]:
    compute, modes = job.compute, set(job.modes)
    if compute.tp > 1 and not compute.sequence_parallel:
        yield "layout.sequence_parallel=true", replace(job, compute=replace(compute, sequence_parallel=True))
    explicit = compute.attention == "explicit" or job.shape.dropout > 0
    if modes == {"none"} and explicit:
        yield "recompute.mode=selective", block_modes(job, "selective")
    if modes != {"full"}:
        yield "recompute.mode=full", block_modes(job, "full")
    elif compute.tp > 1 and not compute.sequence_parallel and not compute.shard_inputs:
        yield "recompute.shard_inputs=true", replace(job, compute=replace(compute, shard_inputs=True))
    if compute.attention == "explicit" and not job.shape.dropout:
        yield "train.attention=auto", replace(job, compute=replace(compute, attention="auto"))


_MASTER, _MOMENTS = 4, 8  # bytes of AdamW's master and moments: K = 12 of the paper


@dataclass(frozen=True, kw_only=True)
class ModeBytes:
    """One mode on the fullest rank, bytes.

    Attributes:
        masters: float32 weights in addition to those of 16 bits, or to those on another device.
        peak: peak bytes with activations, messages and temporaries.
        published: (2 + 2 + 12) bytes a parameter, of which the mode shards some over the ranks with the same
            parameters: Rajbhandari et al. 2020, "ZeRO", figure 1; None for the parameter server, which the
            paper does not cover.
    """

    mode: Mode
    weights: int
    gradients: int
    masters: int
    optimizer: int
    peak: int
    host: int = 0
    disk: int = 0
    published: float | None = None

    @property
    def states(self) -> int:
        """Bytes on the device all the time."""
        return self.weights + self.gradients + self.masters + self.optimizer


def compare_modes(modes: Sequence[Mode], job_of: Callable[[Mode], MemoryJob]) -> list[ModeBytes]:
    """Each mode, on the rank that is the fullest with it.

    Args:
        job_of: the job in a mode.
    """
    rows = list[ModeBytes]()
    for mode in modes:
        job = job_of(mode)
        fullest: RankMemory = max(rank_memory(job), key=lambda rank: rank.total)
        states = lasting_bytes(job, fullest.rank)
        rows.append(
            ModeBytes(
                mode=mode,
                weights=states.weights,
                gradients=states.gradients,
                masters=states.masters,
                optimizer=states.optimizer,
                peak=fullest.total,
                host=states.host,
                disk=states.disk,
                published=published(mode, parameters_of(job, fullest.rank), job.state_config.copies),
            )
        )
    return rows


def parameters_of(job: MemoryJob, rank: int) -> int:
    """Parameters of a pipeline rank before data-parallel ranks shard them."""
    return sum(elements_of(job.shape, job.layers_of(rank), job.shares).values())


def published(mode: Mode, parameters: int, copies: int) -> float | None:
    """The paper's bytes a rank with weights and gradients of 16 bits and AdamW; None for a server."""
    kinds = published_kinds(mode, parameters, copies)
    return sum(kinds.values()) if kinds else None


def published_kinds(mode: Mode, parameters: int, copies: int) -> dict[str, float]:
    """The same by kind: "weights", "gradients" and "states"; empty for a server."""
    if mode == "server":
        return {}
    share = 1 / copies
    return {
        "weights": 2 * parameters * (share if mode == "zero3" else 1),
        "gradients": 2 * parameters * (share if mode in ("zero2", "zero3") else 1),
        "states": (_MASTER + _MOMENTS) * parameters * (share if mode != "ddp" else 1),
    }
