"""`stretto checkpoint export` and `import` for torchtitan's and Megatron-LM's formats."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.cli.output import byte_progress
from stretto.cli.report import CommandReport
from stretto.engine.checkpoint.folder import step_name
from stretto.job.optimiser import Optimiser
from stretto.job.shape import ModelShape
from stretto.run.train.imported import Imported, config_text, make_run, new_run
from stretto_interop.checkpoints.dcp.titan import DcpImport, export_dcp
from stretto_interop.checkpoints.dcp.transfer import OpenImport, Progress
from stretto_interop.checkpoints.megatron.common import COMMON, find_iteration, read_common
from stretto_interop.checkpoints.megatron.exporting import export_megatron
from stretto_interop.checkpoints.megatron.importing import MegatronImport
from stretto_interop.checkpoints.torchrec import export_torchrec as export_torchrec
from stretto_interop.frameworks.megatron.framework import TRIED_WITH, read_saved, saved_arguments

# ------------------------------------------------------------------ runs of imported checkpoints


def import_dcp(
    source: Path, run: Path, shape: ModelShape, *, states: bool = True, progress: Progress | None = None
) -> Imported:
    """Create a run from a checkpoint that torchtitan wrote. If it has the optimiser's states, training
    continues with them, from its step.

    Args:
        source: the folder of a step, or of all of them.
        shape: shape of the model, which the folder does not record.
        states: import the optimiser's states too.
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
    shape: ModelShape | None,
    *,
    states: bool = True,
    progress: Progress | None = None,
) -> Imported:
    """Create a run from a distributed checkpoint of Megatron-core. If it has the optimiser's states, training
    continues with them, from its step and its number of samples.

    Args:
        source: the folder of an iteration, or of all of them.
        shape: shape of the model, or None to take model and settings from the checkpoint's arguments.
        states: import the optimiser's states too.
        progress: as for `import_model`.

    Raises:
        StrettoError: as `MegatronImport`; the run's folder has a run already, or too little room.
    """
    folder, notes = find_iteration(source), list[str]()
    sections: dict[str, dict[str, Any]] = {}
    if shape is None:
        saved = read_saved(read_common(folder).args, str(folder / COMMON))
        shape, notes = saved.shape, list(saved.notes)
        sections = {name: dict(section) for name, section in saved.changes.items()}
    with MegatronImport(source, shape, states=states) as model:
        sequence = sections.get("data", {}).get("sequence")
        if sequence is not None and sequence > shape.sequence:
            del sections["data"]["sequence"]
        notes += model.notes
        if model.optimiser is not None:
            sections["optim"] = {**_settings(model.optimiser), **sections.get("optim", {})}
            sections["optim"]["no_decay"] = list(model.optimiser.no_decay)
            train = sections.setdefault("train", {})
            if train.get("steps", 0) <= model.step:
                train["steps"] = model.step + 100
                notes.append(f"train.steps is {train['steps']}: the run there had ended")
            if model.samples:
                notes.append(
                    f"{model.samples:,} samples were trained on there: training continues with the next, in "
                    "the order of samples here, which is not Megatron's"
                )
        else:
            sections = {name: sections[name] for name in ("data",) if name in sections}
        return _written(model, run, sections, notes, progress)


def _settings(optimiser: Optimiser) -> dict[str, Any]:
    """Return AdamW's settings as a config has them."""
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
    """Write the run: its config, and the checkpoint."""
    if "tokenizer" not in changes.get("data", {}):
        notes = [*notes, "no tokenizer lies with it: name the model's own as data.tokenizer"]
    if model.optimiser is not None:
        changes["checkpoint"] = {"resume": str(run / "checkpoints" / step_name(model.step))}
    text = config_text(model, run, None, changes)
    with new_run(run):
        return make_run(model, run, text, notes, write=lambda: model.write(run, progress=progress))


_EXCLUDE = "--checkpoint.exclude_from_loading dataloader"


def export(
    checkpoint: Path, out: Path, form: str, *, torchtitan: str, experts_spread: bool, as_json: bool
) -> None:
    """Write a checkpoint for torchtitan ("dcp") or Megatron-LM ("megatron"), and report it.

    Args:
        torchtitan: the version that will load it.
        experts_spread: True if Megatron-LM will load it with experts spread over ranks.
    """
    with byte_progress("export") as progress:
        if form == "dcp":
            done = export_dcp(checkpoint, out, torchtitan, progress)
            target, last = f"torchtitan {torchtitan}", ""
            if done.step is not None:
                last = f"to continue there from step {done.step}, exclude the data's place: {_EXCLUDE}"
        else:
            done = export_megatron(checkpoint, out, saved_arguments, progress, experts_spread=experts_spread)
            load = f"--load {out} --use-checkpoint-args"
            target = f"Megatron-LM {TRIED_WITH}"
            last = f"to train there from its weights: {load} --finetune --no-load-optim --no-load-rng"
            if done.step is not None:
                last = f"to continue there from step {done.step}: {load}"
    files = [str(file) for file in done.files]
    report = CommandReport(
        {
            "checkpoints": [{"path": str(checkpoint), "ok": True}],
            "ok": True,
            "path": str(out),
            "files": files,
            "step": done.step,
            "notes": done.notes,
        }
    )
    report.line(f"{checkpoint} written to {out} for {target}:")
    report.lines(f"  {file}" for file in files)
    report.lines(f"note: {note}" for note in done.notes)
    if last:
        report.line(last)
    report.print(as_json)
