"""`stretto checkpoint export` and `import` for torchtitan's and Megatron-LM's formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stretto.cli.output import byte_progress
from stretto.cli.report import CommandReport
from stretto.job.shape import ModelShape
from stretto.run.train.imported import Imported
from stretto_interop.checkpoints import imported
from stretto_interop.checkpoints.dcp.exporting import export_dcp
from stretto_interop.checkpoints.dcp.written import Progress
from stretto_interop.checkpoints.imported import import_dcp
from stretto_interop.checkpoints.megatron.common import COMMON, find_iteration, read_common
from stretto_interop.checkpoints.megatron.exporting import export_megatron
from stretto_interop.frameworks.megatron.saved import TRIED_WITH, read_saved, saved_arguments

__all__ = ["export", "import_dcp", "import_megatron"]

_EXCLUDE = "--checkpoint.exclude_from_loading dataloader"


def export(
    checkpoint: Path, out: Path, form: str, *, torchtitan: str, experts_spread: bool, as_json: bool
) -> None:
    """Write a checkpoint as torchtitan ("dcp") or Megatron-LM ("megatron") loads it, and report it.

    Args:
        torchtitan: the version that loads it.
        experts_spread: Megatron-LM loads it with experts over several ranks.
    """
    with byte_progress("export") as progress:
        if form == "dcp":
            done = export_dcp(checkpoint, out, torchtitan, progress)
            target, last = f"torchtitan {torchtitan}", ""
            if done.step is not None:
                last = f"to go on there from step {done.step}, exclude the data's place: {_EXCLUDE}"
        else:
            done = export_megatron(checkpoint, out, saved_arguments, progress, experts_spread=experts_spread)
            load = f"--load {out} --use-checkpoint-args"
            target = f"Megatron-LM {TRIED_WITH}"
            last = f"to train there from its weights: {load} --finetune --no-load-optim --no-load-rng"
            if done.step is not None:
                last = f"to go on there from step {done.step}: {load}"
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


def import_megatron(
    source: Path, run: Path, shape: ModelShape | None, *, states: bool, progress: Progress | None
) -> Imported:
    """Make a run of a checkpoint of Megatron-LM.

    Args:
        shape: the model; None: as the checkpoint's arguments describe it, with their other settings.
        states: take the optimiser's states too.
    """
    folder = find_iteration(source)
    if shape is not None:
        return imported.import_megatron(source, run, shape, {}, states=states, progress=progress)
    saved = read_saved(read_common(folder).args, str(folder / COMMON))
    run_made = imported.import_megatron(
        source, run, saved.shape, saved.changes, states=states, progress=progress
    )
    return replace(run_made, notes=[*saved.notes, *run_made.notes])
