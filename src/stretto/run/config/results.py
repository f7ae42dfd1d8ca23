"""Where the results of a run go: what is reported, the text at the end, the folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stretto.spec.field import Field


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What is reported during the run. `metrics.jsonl` has every step."""

    every: Annotated[int, Field("Steps from one line in the terminal to the next.", gt=0)] = 10
    tensorboard: Annotated[bool, Field("Write TensorBoard files too; needs `stretto[tensorboard]`.")] = False
    tensorboard_dir: Annotated[
        str | None,
        Field(
            "Write TensorBoard files to this folder; null: with `tensorboard`, to `tensorboard/` in the "
            "run's folder.",
            filled=True,
        ),
    ] = None

    def board(self, run: Path) -> Path | None:
        """The folder of TensorBoard's files of a run in the folder `run`; None: none are written."""
        if self.tensorboard_dir is not None:
            return Path(self.tensorboard_dir).expanduser()
        return run / "tensorboard" if self.tensorboard else None


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(ReportConfig):
    """What is reported during the run. `metrics.jsonl` has every step."""

    peak_tflops: Annotated[
        float | None,
        Field(
            "Peak of one device in TFLOP/s, for MFU; null: looked up for known accelerators, none on CPUs.",
            gt=0,
        ),
    ] = None
    trace: Annotated[
        int,
        Field(
            "Step, counted from the start or the resume, in which every rank records a timeline; `trace/` "
            "and `report.html` in the run's folder compare it with the prediction. 0: none.",
            ge=0,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that the trained model generates at the end."""

    prompt: Annotated[str, Field("The beginning of the text.")] = "def "
    tokens: Annotated[int, Field("Tokens to generate; 0: no sample.", ge=0)] = 64
    temperature: Annotated[float, Field("Divides the logits; 0: always the most likely token.", ge=0)] = 0.8
    top_k: Annotated[int | None, Field("Sample from this many most likely tokens; null: from all.", gt=0)] = (
        50
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the results go: `DIR/NAME/`."""

    name: Annotated[
        str,
        Field(
            "Name of the run and of its folder; by default the config file's name.",
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=@-]*$",
            examples=("gpt-small.2",),
        ),
    ] = "train"
    dir: Annotated[str, Field("Folder of all runs.", filled=True)] = "runs"
    private: Annotated[bool, Field("Only the user who trains may enter the run's folder (mode 0700).")] = (
        False
    )

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.dir) / self.name
