"""The position of a run, and how it is saved in a checkpoint and restored from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from stretto.engine.checkpoint.folder import HELD_OUT_LOSS, Retention, checkpoints, clean, is_checkpoint
from stretto.engine.checkpoint.load import latest, load
from stretto.engine.checkpoint.metadata import COUNTED_FROM
from stretto.engine.device import random_states, set_random_states
from stretto.engine.parallel.control import run_on_first
from stretto.errors import StrettoError
from stretto.run.config.schema import JobConfig, TrainConfig
from stretto.run.config.section import plain_section
from stretto.run.data.dataset import shuffled_within
from stretto.run.data.token_source import TokenData
from stretto.run.launch.lease import check_lease
from stretto.run.launch.restart import restart_count
from stretto.run.train.loop import Position, Save
from stretto.run.train.replica import (
    MODEL,
    OPTIM,
    Replica,
    prepare_optimizer,
    tensors_of,
)
from stretto.run.train.resume import check_fits, is_base, none_at, place_of
from stretto.spec.lora import is_adapter
from stretto.spec.shape import shape_to_record

Report = Callable[[str], object]
_ORDER = "shuffle_windows"  # of the text: within how many tokens the samples of each stream are shuffled


@dataclass(kw_only=True)
class TextPosition(Position):
    """How far a language model's run is."""

    tokens: int = 0
    targets: int = 0  # of the tokens, those that the loss counted
    weight_updates: int = 0  # as many as steps, or more where a step updates the weights several times


def save_run(
    config: TrainConfig, replica: Replica, source: TokenData, position: TextPosition, save: Save
) -> Path:
    """Write a checkpoint of the run with `save`, or begin to. Collective over all ranks."""
    meta: dict[str, Any] = {
        "step": position.step,
        "samples": position.samples,
        COUNTED_FROM: position.counted_from,
        "tokens": position.tokens,
        "targets": position.targets,
        "loss": position.loss,
        HELD_OUT_LOSS: position.held_out_loss,
        "updates": position.weight_updates,
        "skipped": position.skipped,
        "history": position.history,
        "seed": config.train.seed,
        "loss_scale": None if replica.loss_scale is None else replica.loss_scale.state(),
        "model": shape_to_record(replica.shape),
        "layout": replica.mesh.layout.describe(),
        "schedule": replica.pipeline.program.name,
        "tokenizer": source.fingerprint,
        "end_of_text": source.endoftext,
        "begin_of_text": source.begin_of_text,
        "text": _text(config, source, position.samples),
        "config": plain_section(config),
    }
    return save(
        folder=config.run.folder / "checkpoints",
        step=position.step,
        tensors=tensors_of(replica),
        meta=meta,
        per_rank=random_states(replica.mesh.device),
        keep=retention(config),
        permit=lambda: check_lease(config.run.folder),
    )


def retention(config: JobConfig) -> Retention:
    """Which older checkpoints stay."""
    kept = config.checkpoint
    return Retention(last=kept.keep, every=kept.keep_every, best=kept.keep_best)


def find_checkpoint(config: JobConfig, report: Report) -> Path | None:
    """The checkpoint that `checkpoint.resume` names: a given one, the newest whole one of a run, or none. A
    job that was started again goes on from its own newest one, if it has any. Before that, what crashed saves
    have left in the run's folder is removed. Collective.

    Args:
        report: called on rank 0 with a line for each damaged checkpoint that is skipped.

    Raises:
        StrettoError: checkpoints that are all damaged, or a named place without one.
    """
    wanted = config.checkpoint.resume
    run_on_first(lambda: clean(config.run.folder / "checkpoints"))
    if restart_count():
        newest = _newest(config.run.folder / "checkpoints", report)
        if newest is not None:
            return newest
    if wanted == "never":
        return None
    place = place_of(config)
    if is_checkpoint(place):
        return place
    newest = _newest(place, report)
    if newest is None and wanted != "auto":
        raise none_at(wanted)
    return newest


def _newest(place: Path, report: Report) -> Path | None:
    """The newest whole checkpoint of a folder; None where there is none at all. Collective."""
    newest = latest(place, report)
    if newest is None and checkpoints(place):
        raise StrettoError(
            f"no checkpoint in {place} is whole",
            hint="`stretto checkpoint verify` says more; a new run.name starts afresh",
        )
    return newest


def report_resumed(
    config: JobConfig, path: Path, meta: Mapping[str, Any], report: Report, changed: str | None
) -> None:
    """Say where the run was resumed, and warn of what changes its samples from there on.

    Args:
        changed: what of the data differs from the checkpoint's; None: nothing.
    """
    report(f"resumed from {path} at step {meta['step']}")
    if changed is not None:
        report(f"warning: {changed} differ from the checkpoint's; samples go on by number in the new data")
    if meta.get("seed", config.train.seed) != config.train.seed:
        report(
            f"warning: train.seed is {config.train.seed}, the run began with {meta['seed']}: another order"
        )


def go_on(
    config: TrainConfig,
    replica: Replica,
    source: TokenData,
    path: Path,
    report: Report,
    check: bool | None = None,
) -> TextPosition:
    """Fill the replica from a checkpoint, whatever layout wrote it. Collective.

    One that was imported may have weights only: training starts with them at step 0, and so it does with the
    base of new adapters. One that was imported with an optimiser's states goes on from its step, with the
    first samples.

    Args:
        check: read every byte first; None: only where the config names this checkpoint, unread so far.

    Raises:
        StrettoError: damaged, or of another model or tokenizer.
    """
    meta = check_fits(path, config, replica.shape, source)
    base = is_base(meta, replica.shape)
    if "step" not in meta or base:
        load_weights(replica, path, check=config.checkpoint.resume != "auto", adapters=not base)
        report(f"starting from the weights of {path}")
        return TextPosition()
    weight_updates = meta.get("updates", meta["step"])  # older checkpoints are of one update a step
    prepare_optimizer(replica, weight_updates)
    # `latest` has checked every byte already; a checkpoint named by its path is checked here
    check = is_checkpoint(place_of(config)) if check is None else check
    loaded = load(path, tensors_of(replica), check=check)
    replica.refresh()
    if replica.loss_scale is not None and meta.get("loss_scale"):
        replica.loss_scale.load(meta["loss_scale"])
    # what other ranks or another kind of device have drawn cannot be gone on with, nor is it to come again
    torch.manual_seed(crc32(f"{config.train.seed} {meta['step']}".encode()))
    set_random_states(replica.mesh.device, loaded.per_rank)
    if not loaded.per_rank:
        report(f"random generators begin anew, from the seed and step {meta['step']}: other ranks wrote it")
    text = _text(config, source, meta["samples"])
    theirs = meta.get("text", text)  # of an imported run it is not known
    report_resumed(config, path, meta, report, None if theirs == text else _changed(theirs, text))
    return TextPosition(
        step=meta["step"],
        samples=meta["samples"],
        counted_from=counted_from(meta, config.batch.global_size),
        tokens=meta["tokens"],
        targets=meta.get("targets", meta["tokens"]),  # older checkpoints are of text without a mask
        loss=meta.get("loss"),
        weight_updates=weight_updates,
        skipped=[(first, last) for first, last in meta.get("skipped", [])],
        history=[(loss, norm) for loss, norm in meta.get("history", [])],
    )


def counted_from(meta: Mapping[str, Any], batch: int) -> dict[str, int]:
    """Since when every step of a run that resumes with this batch takes it: as before, or from here on."""
    before = meta.get("config", {}).get("batch", {}).get("global_size")
    if COUNTED_FROM in meta and before == batch:
        return {**meta[COUNTED_FROM]}
    return {"step": meta["step"], "samples": meta["samples"]}


def load_weights(replica: Replica, path: Path, check: bool = True, adapters: bool = True) -> None:
    """Fill the replica's weights from a checkpoint of any layout, and nothing of its optimisers. Collective.

    Args:
        check: read every byte first; not needed after `find_checkpoint`.
        adapters: those of adapters too; else they keep their values.

    Raises:
        StrettoError: damaged, or of another model.
    """
    tensors = {
        name: place
        for name, place in tensors_of(replica).items()
        if name.startswith(MODEL) and (adapters or not is_adapter(name))
    }
    load(path, tensors, ignore=[OPTIM], check=check)
    replica.refresh()


def _text(config: TrainConfig, source: TokenData, samples: int) -> dict[str, Any]:
    """What identifies the first `samples` samples of a run, independent of paths."""
    data = config.data
    text = {**source.identity(), "sequence": data.sequence}
    begun = [phase for phase in data.phases if phase.from_step * config.batch.global_size < samples]
    if begun:
        text["phases"] = [
            {"samples": phase.from_step * config.batch.global_size, "weights": list(phase.weights.values())}
            for phase in begun
        ]
    if any(windows := [shuffled_within(one, data) for one in source.streams.values()]):
        text[_ORDER] = windows  # an order without is that of older checkpoints
    if (lengths := config.denoising) is not None:
        text["denoising"] = asdict(lengths)
    if source.trained is None and data.packing in (None, "stream"):
        return text
    return {"trained": None, **text, "packing": data.packing, "too_long": data.too_long}


def _changed(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What of the data differs from a checkpoint's."""

    def without_weights(text: Mapping[str, Any]) -> dict[str, Any]:
        parts = [{**part, "weight": None} for part in text.get("mixture", ())]
        return {**text, "mixture": parts, "phases": None}

    if {**theirs, _ORDER: None} == {**ours, _ORDER: None}:
        return "data.shuffle or data.shuffle_window, the order of the samples,"
    if without_weights(theirs) == without_weights(ours):
        return "the mixture's weights of steps that are done (data.phases changes those of later ones)"
    if {**theirs, "denoising": None} == {**ours, "denoising": None}:
        return "data.objective, data.noise_density or data.mean_span_length"
    return "the text or data.sequence"
