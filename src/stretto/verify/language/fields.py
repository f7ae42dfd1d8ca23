"""Values of a language model's job at which its fields act in a proof, and the fields that are tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stretto.job.job import Execution, Job
from stretto.job.optimiser import Optimiser
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.job.user_shape import UserShape
from stretto.verify import fields
from stretto.verify.fields import Section
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
    if isinstance(shape, UserShape):
        return shape, []
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
# compared with the norms of the reference; a family's values are other fields
_SIZES = {"layers", "encoder_layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "sequence"}
_EVIDENT = _SIZES | {"experts", "shared_ffn", "rank", "lr", "clip", "family", "arguments"}


def set_fields(job: Job) -> Iterator[tuple[str, Any, Job | None]]:
    """The set fields of model, adapters, initial values and optimiser (`verify.fields.set_fields`)."""

    def in_shape(part: str) -> Section[Job]:
        name = part if part == "lora" else f"model.{part}"
        return Section(
            name,
            getattr(job.shape, part),
            lambda value: replace(job, shape=replace(job.shape, **{part: value})),
        )

    sections = []
    if not isinstance(job.shape, UserShape):
        parts = ("attention", "rope", "moe", "lora")  # the fields of latent attention are sizes
        sections = [
            Section("model", job.shape, lambda shape: replace(job, shape=shape)),
            *map(in_shape, parts),
            Section("model", job.initial, lambda initial: replace(job, initial=initial)),
        ]
    sections += [
        Section("train", Execution(loss=job.loss), lambda value: replace(job, loss=value.loss)),
        Section("optim", job.optimiser, lambda value: replace(job, optimiser=_with_arguments(value))),
    ]
    return fields.set_fields(
        sections, _EVIDENT, lambda job: not job.shape.unsupported_parts and not problems(job)
    )


def _with_arguments(optimiser: Optimiser) -> Optimiser:
    """Return the settings without arguments if the rule is no class of the user's, which alone has some."""
    return optimiser if optimiser.user_defined else replace(optimiser, arguments={})


def without_effect(job: Job, trial: Trial) -> list[str]:
    """Return the set fields that change nothing in the first two steps of a microbatch. Collective."""
    from stretto.verify.language.reference import run_reference

    samples = [batch.take(slice(0, job.micro_batch)) for batch in trial.batches[:2]]
    first = replace(trial, batches=samples)
    return fields.without_effect(
        job,
        set_fields(job),
        lambda job: run_reference(replace(job, global_batch=job.micro_batch), first),
        job.optimiser.clip,
    )


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
