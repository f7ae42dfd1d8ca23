"""What a recommender's run prints and records: banner, training steps, evaluations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stretto.errors import counted
from stretto.job.devices import HOST
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements, physical_tables
from stretto.recommender.shape import count_dlrm
from stretto.recommender.train.clicks import ClickData
from stretto.recommender.view import placement_text
from stretto.run.train.metrics import LogFormat, number, percent, short_count
from stretto.run.train.prediction import local_device_kind


def banner(config: RecommenderConfig, data: ClickData, placements: Placements) -> str:
    """Return some lines and the placement table, which are printed before training starts."""
    shape = config.shape(data.tables)
    layout, optim = config.layout, config.optim
    dense = count_dlrm(shape).dense
    rows = sum(table.rows * table.dim for table in physical_tables(data.tables))
    interaction = "dot products" if shape.interaction == "dot" else f"{shape.cross_layers} cross layers"
    source = ", ".join(config.data.sources)
    kind = local_device_kind(config.train.device)
    ranks = f"{counted(layout.ranks, 'rank')}{'' if kind == HOST else f' ({kind})'}"
    return "\n".join(
        [
            f"dlrm of {short_count(dense)} dense parameters and {counted(len(data.tables), 'table')} of "
            f"{short_count(rows)} ({interaction}), {config.train.dtype}, on {ranks}; "
            f"{config.train.steps} steps of {config.batch.global_size} samples; "
            f"{optim.dense.name} and {optim.tables.name}",
            f"clicks: {source}, {short_count(data.samples)} samples, "
            f"{short_count(data.held_out)} of them held out",
            *data.notes,
            f"results in {config.run.folder} (metrics.jsonl, eval.jsonl, placement.yaml, checkpoints/)",
            placement_text(physical_tables(data.tables), placements, layout.ranks),
        ]
    )


@dataclass(frozen=True, kw_only=True)
class ClickStep:
    """One training step of all ranks; None stands for an unknown value."""

    step: int  # updates made, this one included: the first step is 1
    loss: float  # mean over the samples of the global batch, nats
    grad_norm: float | None  # over all parameters, tables included, before clipping; None without clipping
    lr: float  # of the dense networks
    lr_tables: float
    samples: int  # seen since the first step of the run, all ranks together
    epoch: float  # `samples` over the training samples: above 1, samples are seen again
    samples_per_s: float  # of the whole job in this step
    step_time_s: float
    memory_gib: float | None = None  # peak of the fullest rank
    bad: str | None = None  # why the update was not applied, or None if it was
    slow: dict[str, float] | None = None  # ranks that are slow, and how many times longer they take

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.samples_per_s

    def as_dict(self) -> dict[str, Any]:
        """Return the record as written to the file."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ClickEval:
    """One evaluation on held-out samples, after `step` updates; see `Quality` for what the numbers mean.

    Attributes:
        best_auc, best_logloss, best_entropy: quality of the true probabilities on the same samples, if the
            clicks are synthetic.
    """

    step: int
    auc: float | None
    logloss: float  # nats
    entropy: float | None
    calibration: float | None
    samples: int
    positives: int
    seconds: float
    split: str = "valid"
    auc_error: float = 0.0
    best_auc: float | None = None
    best_logloss: float | None = None
    best_entropy: float | None = None

    @property
    def gap(self) -> float | None:
        """The excess of the entropy over the best possible, relative to it."""
        if self.entropy is None or not self.best_entropy:
            return None
        return self.entropy / self.best_entropy - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the record with its gap, as written to the file."""
        return asdict(self) | {"gap": self.gap}


def step_line(record: ClickStep, steps: int) -> str:
    """Such as `step 10/300 | epoch 0.42 | loss 0.51 | lr 1.0e-03, of tables 2.0e-02 | 0.1 s/step | ...`."""
    parts = [
        f"step {record.step}/{steps}",
        f"epoch {record.epoch:.2f}",
        f"loss {number(record.loss, 4)}",
        *([] if record.grad_norm is None else [f"grad_norm {number(record.grad_norm, 3)}"]),
        f"lr {record.lr:.1e}, of tables {record.lr_tables:.1e}",
        f"{record.step_time_s:.3g} s/step",
        f"samples/s {number(record.samples_per_s, 0)}",
        *([] if record.memory_gib is None else [f"memory {record.memory_gib:.2f} GiB"]),
    ]
    return " | ".join(parts)


def eval_line(record: ClickEval, steps: int) -> str:
    """Such as `eval 100/300 | AUC 0.7512 | logloss 0.4801 | entropy 0.8537 | calibration 1.002`."""
    return f"eval {record.step}/{steps} | {quality_text(record)}"


def quality_text(record: ClickEval) -> str:
    """Return the numbers of an evaluation in one line."""
    parts = [f"AUC {_or_none(record.auc)}", f"logloss {number(record.logloss, 4)}"]
    parts.append(f"entropy {_or_none(record.entropy)}")
    if record.gap is not None:
        parts[-1] += f" (best possible {_or_none(record.best_entropy)}, {percent(record.gap)} above it)"
    if record.calibration is not None:
        parts.append(f"calibration {number(record.calibration, 3)}")
    return " | ".join(parts)


def _or_none(value: float | None) -> str:
    return "none" if value is None else number(value, 4)


SAMPLES = LogFormat(step_line, eval_line, "samples/s")
