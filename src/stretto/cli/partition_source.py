"""Where the layers of `stretto partition` come from: a user's file, measured, or a known model, predicted."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.planner.cutting.profile import ModelProfile
    from stretto.program import Program


@dataclass(frozen=True, kw_only=True)
class Source:
    """Layers, and what goes with where they come from; `others`: cuts to compare with."""

    profile: ModelProfile
    states: float = 4.0
    hop: float = 0.0
    bandwidth: float = inf
    others: Mapping[str, Sequence[range]] = field(default_factory=dict[str, Sequence[range]])


def measured(place: str) -> ModelProfile:
    """The layers that a function of a user's file returns, measured here.

    Raises:
        StrettoError: no such file or function, or it does not return layers and a sample.
    """
    made = _function(place)()
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    if len(parts) not in (2, 4):
        raise StrettoError(
            f"{place} returns {len(parts)} thing{'s' * (len(parts) > 1)}",
            hint="return (layers, sample) or (layers, sample, loss, target)",
        )
    from stretto.run.calibrate.modules import profile_layers

    return profile_layers(list(parts[0]), parts[1], *parts[2:])


def _function(place: str) -> Callable[[], Any]:
    """The function of a user's own file, which is imported as Python would."""
    path, colon, name = place.rpartition(":")
    file = Path(path)
    if not colon or not name.isidentifier():
        raise StrettoError(f"{place!r} names no function", hint="write it as model.py:build")
    if not file.is_file():
        raise StrettoError(f"there is no file {path}", hint="check the file's name")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise StrettoError(f"{path} is no Python file", hint="write it as model.py:build")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # dataclasses of the file look themselves up
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE` does, for what stands beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise StrettoError(
            f"{path} cannot be imported: {type(error).__name__}: {error}", hint=f"does python {path} run?"
        ) from error
    finally:
        sys.path.pop(0)
    found = getattr(module, name, None)
    if not callable(found):
        near = nearest(name, [key for key, value in vars(module).items() if callable(value)])
        raise StrettoError(
            f"{path} has no function {name!r}", hint=f"did you mean {near!r}?" if near else "check its name"
        )
    return found


def predicted(
    model: str,
    cluster: str,
    program: Program,
    schedule: str,
    tp: int,
    micro_batch: int,
    sequence: int | None,
) -> Source:
    """A known model's layers on a known device.

    Raises:
        StrettoError: no such model or cluster, or a job that is not legal.
    """
    from stretto.cli.predict_one import model_named
    from stretto.layout.cut import cut
    from stretto.layout.layout import Layout
    from stretto.planner.cutting.layer_times import predicted_profile
    from stretto.planner.execution import Running
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.time.step import hop_link
    from stretto.spec.data_parallel import Precision
    from stretto.spec.flops import layer_costs
    from stretto.spec.job import Job

    shape = model_named(model)
    job = Job(
        shape=shape,
        layout=Layout(tp=tp, pp=program.ranks),
        global_batch=micro_batch * program.microbatches,
        micro_batch=micro_batch,
        sequence=sequence or shape.sequence,
        schedule=schedule,
        options=dict(program.parameters),
        sequence_parallel=tp > 1,
        precision=Precision(dtype="bfloat16"),
    )
    machine = find_cluster(cluster, tp * program.ranks)
    profile, states = predicted_profile(job, machine, Running(vocab_multiple=64), program)
    link = hop_link(job, machine)
    # in equal parts of the work, as training cuts where nothing is said
    training = cut(layer_costs(shape, job.sequence), program.depth)
    return Source(
        profile=profile,
        states=states,
        hop=link.latency,
        bandwidth=link.bandwidth,
        others={"training": training},
    )
