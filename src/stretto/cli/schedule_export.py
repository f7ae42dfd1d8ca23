"""A schedule for other frameworks: what `stretto schedule --for` writes beside the CSV, and says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.output import write_text
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.program import Program

_FRAMEWORKS = ("torch", "torchtitan")


@dataclass(frozen=True, kw_only=True)
class Export:
    """A program on its way to another framework.

    settings: what the other side sets, by name.
    modules: for torchtitan, the names of each stage's modules; None: torchtitan cuts by itself, or torch.
    """

    framework: str
    program: Program
    csv: Path
    settings: dict[str, Any]
    modules: list[list[str]] | None

    @property
    def modules_path(self) -> Path:
        """Where the module names go, next to the CSV."""
        return self.csv.with_suffix(".modules.json")

    def write_modules(self) -> list[Path]:
        """Write the module names, if there are any; returns the paths written."""
        if self.modules is None:
            return []
        from stretto.program.text.torchtitan import modules_json

        write_text(self.modules_path, modules_json(self.modules))
        return [self.modules_path]

    def facts(self) -> dict[str, Any]:
        """For the command's JSON."""
        modules = {} if self.modules is None else {"module_fqns_per_model_part": self.modules}
        return {"framework": self.framework, "csv": str(self.csv), **self.settings, **modules}

    def text(self) -> str:
        """How the other side loads the files."""
        if self.framework == "torch":
            stages = "; ".join(
                f"rank {rank}: {', '.join(map(str, self.program.stages_of(rank)))}"
                for rank in range(self.program.ranks)
            )
            return (
                f"# stages by rank: {stages}\n"
                f"schedule = _PipelineScheduleRuntime(stages, n_microbatches={self.program.microbatches}, "
                f"loss_fn=...)\nschedule._load_csv({str(self.csv)!r})"
            )
        lines = [f"config.parallelism.{name} = {_quoted(value)}" for name, value in self.settings.items()]
        if self.modules is not None:
            loaded = f"json.load(open({_quoted(str(self.modules_path))}))"
            lines.append(f"config.parallelism.module_fqns_per_model_part = {loaded}")
        count = self.program.microbatches
        lines.append(f"# training.local_batch_size = {count} x parallelism.pipeline_parallel_microbatch_size")
        lines.append("# before torchtitan 0.3, lm_head is called output")
        return "\n".join(lines)


def exported_for(
    framework: str | None,
    programs: Sequence[Program],
    csv: Path | None,
    layers: int | None,
    stages: str | None,
) -> Export | None:
    """Check that the framework can run the program, and cut the model for torchtitan; None: no framework.

    Args:
        csv: where the program is written.
        layers: of the model, without embedding and head, to be cut evenly.
        stages: layers of each stage, as text.

    Raises:
        StrettoError: an unknown framework, no CSV, several programs, a program it cannot run, or no cut.
    """
    from stretto.program.text import check_torch
    from stretto.program.text.torchtitan import modules_of_stages, schedule_class

    if framework is None:
        _refuse_cut(layers, stages)
        return None
    if framework not in _FRAMEWORKS:
        near = nearest(framework, _FRAMEWORKS)
        raise StrettoError(
            f"--for is {framework!r}, must be one of {', '.join(_FRAMEWORKS)}",
            hint=f"did you mean {near!r}?" if near else None,
        )
    if csv is None or csv.suffix.lower() != ".csv" or len(programs) > 1:
        raise StrettoError(f"--for {framework} needs one program and its file", hint="--write mine.csv")
    (program,) = programs
    if program.lowered:
        raise StrettoError(
            f"--for {framework} writes compute actions, {program.name} has communication",
            hint="leave --lowered out: torch adds the communication",
        )
    check_torch(program)
    if framework == "torch":
        _refuse_cut(layers, stages)
        return Export(framework=framework, program=program, csv=csv, settings={}, modules=None)
    settings = {
        "pipeline_parallel_degree": program.ranks,
        "pipeline_parallel_schedule": schedule_class(program),
        "pipeline_parallel_schedule_csv": str(csv),
    }
    modules = modules_of_stages(_stage_layers(program.depth, layers, stages))
    return Export(framework=framework, program=program, csv=csv, settings=settings, modules=modules)


def _refuse_cut(layers: int | None, stages: str | None) -> None:
    if layers is not None or stages is not None:
        raise StrettoError("--layers and --stages cut a model of torchtitan", hint="--for torchtitan")


def _stage_layers(depth: int, layers: int | None, stages: str | None) -> list[int]:
    """How many layers each stage has, embedding and head among them."""
    from stretto.layout.cut import cut

    if (layers is None) == (stages is None):
        raise StrettoError(
            "--for torchtitan needs the layers of each stage",
            hint="--layers 32 for an even cut, or --stages 7,7,7,5 (embedding and head count as layers)",
        )
    if layers is not None:
        if layers + 2 < depth:
            raise StrettoError(
                f"--layers is {layers}: with embedding and head too few for {depth} stages",
                hint=f"nearest is --layers {depth - 2}",
            )
        return [len(stage) for stage in cut([1.0] * (layers + 2), depth)]
    try:
        counts = [int(part) for part in (stages or "").split(",")]
    except ValueError:
        raise StrettoError(f"--stages is {stages!r}, must be numbers", hint="--stages 7,7,7,5") from None
    if len(counts) != depth:
        raise StrettoError(
            f"--stages has {len(counts)} stages, the program {depth}", hint=f"give {depth} numbers"
        )
    return counts


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
