"""Fields of a job that its proof would not see: values at which they change no result.

A layout that forgot a sliding window is equal to one process if the window is as long as a sample. So a proof
takes other values where those of the job hide a field, and prints which fields still change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from stretto.errors import StrettoError
from stretto.job.field import Declared, declared
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.verify.run import Impossible

if TYPE_CHECKING:
    from stretto.verify.language.reference import Trial

_SOFTCAP = 0.05
"""Scores and logits of new weights are about this large; a larger cap would hardly bend them."""


def with_effect(shape: ModelShape, sequence: int) -> tuple[ModelShape, list[str]]:
    """The shape with values at which its parts change results, and what was changed, in words.

    A window is shorter than a sample, soft caps bend, the scale of adapters is not 1, positions reach beyond
    those of the first training, and each kind of block occurs.

    Args:
        sequence: tokens of a sample.
    """
    attention, moe = shape.attention, shape.moe
    rope, lora = shape.rope, shape.lora
    changes: dict[str, tuple[Any, Any]] = {}  # by field: the value, and the one for the proof
    if attention.window is not None and attention.window >= sequence > 3:
        changes["model.attention.window"] = attention.window, sequence // 3
    if attention.full_every > shape.layers > 1:
        changes["model.attention.full_every"] = attention.full_every, max(2, shape.layers // 2)
    if attention.softcap is not None and attention.softcap > _SOFTCAP:
        changes["model.attention.softcap"] = attention.softcap, _SOFTCAP
    if shape.logit_softcap > _SOFTCAP:
        changes["model.logit_softcap"] = shape.logit_softcap, _SOFTCAP
    if moe is not None and moe.dense_layers >= shape.layers > 1:
        changes["model.moe.dense_layers"] = moe.dense_layers, shape.layers // 2
    if rope is not None and rope.original_positions is not None and rope.original_positions >= sequence > 3:
        changes["model.rope.original_positions"] = rope.original_positions, sequence // 2
    if lora is not None and lora.alpha == (lora.rank**0.5 if lora.rslora else lora.rank):
        changes["lora.alpha"] = lora.alpha, 1.5 * lora.alpha
    for name, (_, value) in changes.items():
        *path, field = name.removeprefix("model.").split(".")
        if not path:
            shape = replace(shape, **{field: value})
        else:
            shape = replace(shape, **{path[0]: replace(getattr(shape, path[0]), **{field: value})})
    return shape, [f"{name} is {value:g} in place of {old:g}" for name, (old, value) in changes.items()]


# sizes of tensors, of which any other value makes another model; the peak rate; and clipping, which is
# compared with the norms of the reference
_SIZES = {"layers", "encoder_layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "sequence"}
_EVIDENT = _SIZES | {
    "experts",
    "shared_ffn",
    "rank",
    "lr",
    "clip",
    "family",
}  # a family's values are other fields


def set_fields(job: Job) -> Iterator[tuple[str, Any, Job | None]]:
    """The fields of model, adapters, initial values and optimiser that are set to another value than their
    default, with the value, each with the job in which it has another one; None if no other is legal.
    """

    def in_shape(part: str) -> Callable[[Any], Job]:
        return lambda value: replace(job, shape=replace(job.shape, **{part: value}))

    parts: list[tuple[str, Any, Callable[[Any], Job]]] = [
        ("model", job.shape, lambda shape: replace(job, shape=shape)),
        *(
            (f"model.{part}", getattr(job.shape, part), in_shape(part))
            for part in ("attention", "rope", "moe")  # the fields of latent attention are sizes
        ),
        ("lora", job.shape.lora, in_shape("lora")),
        ("model", job.initial, lambda initial: replace(job, initial=initial)),
        ("optim", job.optimiser, lambda optimiser: replace(job, optimiser=optimiser)),
    ]
    for section, part, put in parts:
        if part is None:
            continue
        for name, item in declared(type(part)).items():
            value = getattr(part, name)
            if name in _EVIDENT or value == item.default or item.field is None:
                continue
            if is_dataclass(value):  # a part: its fields are looked at
                continue
            legal = None
            for alternative in _alternatives(value, item):
                try:
                    changed = put(replace(part, **{name: alternative}))
                except (StrettoError, ValueError, TypeError):
                    continue
                if changed != job and not changed.shape.unsupported_parts and not problems(changed):
                    legal = changed
                    break
            if legal is not None or "follows" not in item.metadata:  # else it follows from other fields
                yield f"{section}.{name}", value, legal


def _alternatives(value: Any, item: Declared) -> Iterator[Any]:
    """Other values of a field, the most telling first: its default, with which a layout computes that has
    forgotten the field; another near by; the other choices.
    """
    if item.default is not MISSING:
        yield item.default
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value * (1.25 if value >= 1.0 else 0.75) if value else 0.25
    elif isinstance(value, tuple) and value and all(isinstance(element, float) for element in value):
        yield tuple(element * 0.75 for element in value)
    for kind in item.kinds:
        if get_origin(kind) is Literal:
            yield from get_args(kind)


def without_effect(job: Job, trial: Trial) -> list[str]:
    """Return the set fields whose change changes nothing in the first two steps of a microbatch in one
    process, those without another legal value, and clipping if no norm reaches its bound. Collective: each
    rank tries some of them.
    """
    from stretto.engine.parallel.control import gather_json, this_rank, world_size
    from stretto.verify.compare import scales_of
    from stretto.verify.diagnose import TOLERANCE
    from stretto.verify.language.reference import LanguageSnapshot, run_reference

    def run(changed: Job) -> list[LanguageSnapshot]:
        microbatch_job = replace(changed, global_batch=job.micro_batch)
        samples = [batch.take(slice(0, job.micro_batch)) for batch in trial.batches[:2]]
        return run_reference(microbatch_job, replace(trial, batches=samples))

    def differs(changed: Job) -> bool:
        for actual, reference in zip(run(changed), expected, strict=True):
            for others, tensors in (
                (actual.weights, reference.weights),
                (actual.gradients, reference.gradients),
            ):
                if {n: t.shape for n, t in others.items()} != {n: t.shape for n, t in tensors.items()}:
                    return True
                for name, scale in scales_of(tensors).items():
                    if not float((others[name] - tensors[name]).abs().max()) <= TOLERANCE * scale:
                        return True
            if not abs(float(actual.loss) / float(reference.loss) - 1.0) <= TOLERANCE:
                return True
        return False

    fields = list(set_fields(job))[this_rank() :: world_size()]
    expected = run(job) if fields or this_rank() == 0 else []
    silent = [
        f"{name}={_word(value)}" + (" (no other value is legal here)" if changed is None else "")
        for name, value, changed in fields
        if changed is None or not differs(changed)
    ]
    clip = job.optimiser.clip
    if this_rank() == 0 and clip is not None and all(float(snapshot.norm) < clip for snapshot in expected):
        silent.append(f"optim.clip={clip:g}")
    gathered: list[list[str]] = gather_json(silent)
    return sorted(name for names in gathered for name in names)


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_word, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def without_ranks(cases: Sequence[Job]) -> Iterator[Impossible]:
    """Ways to spread a model that all cases together do not use, for want of ranks."""
    if cases[0].layout.world < 4:
        if not any(size is not None for case in cases for size in case.dp.shards.values()):
            parts = "shards over some of the ranks with the same parameters need 4 ranks"
            yield Impossible(parts, ["dp.shard_states", "dp.shard_gradients", "dp.shard_parameters"])
        if cases[0].shape.moe is not None:
            yield Impossible(
                "several ranks with the same experts need 4 ranks", ["layout.ep beside layout.dp"]
            )
