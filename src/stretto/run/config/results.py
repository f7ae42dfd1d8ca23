"""Where the results of a run go: what is reported, the text at the end, the folder."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from stretto.run.config.section import Section


class ReportConfig(Section):
    """What is reported during the run. `metrics.jsonl` has every step."""

    every: int = Field(default=10, gt=0, description="Steps from one line in the terminal to the next.")
    tensorboard: bool = Field(
        default=False, description="Write TensorBoard files too; needs `stretto[tensorboard]`."
    )
    tensorboard_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Write TensorBoard files to this folder; null: with `tensorboard`, to `tensorboard/` in "
        "the run's folder.",
    )

    def board(self, run: Path) -> Path | None:
        """The folder of TensorBoard's files of a run in the folder `run`; None: none are written."""
        if self.tensorboard_dir is not None:
            return Path(self.tensorboard_dir).expanduser()
        return run / "tensorboard" if self.tensorboard else None


class MetricsConfig(ReportConfig):
    """What is reported during the run. `metrics.jsonl` has every step."""

    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="Peak of one device in TFLOP/s, for MFU; null: looked up for known accelerators, none "
        "on CPUs.",
    )
    trace: int = Field(
        default=0,
        ge=0,
        description="Step, counted from the start or the resume, in which every rank records a timeline; "
        "`trace/` and `report.html` in the run's folder compare it with the prediction. 0: none.",
    )


class SampleConfig(Section):
    """The text that the trained model generates at the end."""

    prompt: str = Field(default="def ", description="The beginning of the text.")
    tokens: int = Field(default=64, ge=0, description="Tokens to generate; 0: no sample.")
    temperature: float = Field(
        default=0.8, ge=0, description="Divides the logits; 0: always the most likely token."
    )
    top_k: int | None = Field(
        default=50, gt=0, description="Sample from this many most likely tokens; null: from all."
    )


class RunConfig(Section):
    """Where the results go: `DIR/NAME/`."""

    name: str = Field(
        default="train",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=@-]*$",
        examples=["gpt-small.2"],
        description="Name of the run and of its folder; by default the config file's name.",
    )
    dir: str = Field(default="runs", min_length=1, description="Folder of all runs.")
    private: bool = Field(
        default=False, description="Only the user who trains may enter the run's folder (mode 0700)."
    )

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.dir) / self.name
