"""A checkpoint of torchtitan or Megatron as a run, whose training goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.engine.checkpoint.folder import step_name
from stretto.job.optimiser import Optimiser
from stretto.job.shape import ModelShape
from stretto.run.train.imported import Imported, config_text, make_run, new_run
from stretto_interop.checkpoints.dcp.importing import DcpImport
from stretto_interop.checkpoints.dcp.written import OpenImport, Progress
from stretto_interop.checkpoints.megatron.importing import MegatronImport


def import_dcp(
    source: Path, run: Path, shape: ModelShape, *, states: bool = True, progress: Progress | None = None
) -> Imported:
    """Make a run of a checkpoint of torch.distributed.checkpoint as torchtitan writes them. Its training goes
    on with the optimiser's states and from its step, where they are there.

    Args:
        source: the folder of a step, or of all of them.
        shape: of the model, of which the folder says nothing.
        states: whether the optimiser's states are taken.
        progress: as for `import_model`.

    Raises:
        StrettoError: as `DcpImport`; the run's folder has a run already, or too little room.
    """
    with DcpImport(source, shape, states=states) as model:
        changes: dict[str, dict[str, Any]] = {}
        notes = list(model.notes)
        if model.optimiser is not None:
            changes["optim"] = {**_settings(model.optimiser), "rate": {"schedule": "constant"}}
            changes["train"] = {"steps": model.step + 100}
            notes.append("the course of the learning rate is not in it: set optim.rate and train.steps")
        return _written(model, run, changes, notes, progress)


def import_megatron(
    source: Path,
    run: Path,
    shape: ModelShape,
    changes: Mapping[str, Mapping[str, Any]],
    *,
    states: bool = True,
    progress: Progress | None = None,
) -> Imported:
    """Make a run of a distributed checkpoint of Megatron-core. Its training goes on with the optimiser's
    states, from its step and its number of samples, where they are there.

    Args:
        source: the folder of an iteration, or of all of them.
        shape: of the model.
        changes: by section of the config, what the checkpoint's arguments say of the run.
        states: whether the optimiser's states are taken.
        progress: as for `import_model`.

    Raises:
        StrettoError: as `MegatronImport`; the run's folder has a run already, or too little room.
    """
    with MegatronImport(source, shape, states=states) as model:
        sections = {name: dict(section) for name, section in changes.items()}
        sequence = sections.get("data", {}).get("sequence")
        if sequence is not None and sequence > shape.sequence:
            del sections["data"]["sequence"]
        notes = list(model.notes)
        if model.optimiser is not None:
            sections["optim"] = {**_settings(model.optimiser), **sections.get("optim", {})}
            sections["optim"]["no_decay"] = list(model.optimiser.no_decay)
            train = sections.setdefault("train", {})
            if train.get("steps", 0) <= model.step:
                train["steps"] = model.step + 100
                notes.append(f"train.steps is {train['steps']}: the run there had ended")
            if model.samples:
                notes.append(
                    f"{model.samples:,} samples were seen there: training goes on with the next, in "
                    "the order of samples here, which is not Megatron's"
                )
        else:
            sections = {name: sections[name] for name in ("data",) if name in sections}
        return _written(model, run, sections, notes, progress)


def _settings(optimiser: Optimiser) -> dict[str, Any]:
    """AdamW's settings as a config has them."""
    settings = asdict(optimiser)
    sections = {name: settings[name] for name in ("lr", "betas", "eps", "weight_decay", "no_decay")}
    return {**sections, "betas": list(sections["betas"]), "no_decay": list(sections["no_decay"])}


def _written(
    model: OpenImport,
    run: Path,
    changes: dict[str, dict[str, Any]],
    notes: list[str],
    progress: Progress | None,
) -> Imported:
    """Write the run of a checkpoint of another framework: its config, and the checkpoint."""
    if "tokenizer" not in changes.get("data", {}):
        notes = [*notes, "no tokenizer lies with it: name the model's own as data.tokenizer"]
    if model.optimiser is not None:
        changes["checkpoint"] = {"resume": str(run / "checkpoints" / step_name(model.step))}
    text = config_text(model, run, None, changes)
    with new_run(run):
        return make_run(model, run, text, notes, write=lambda: model.write(run, progress=progress))
