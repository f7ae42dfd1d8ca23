"""Write docs/evidence/scaling.md and its picture: five published jobs on 8 to 16,384 devices, replayed.

Run it after predictions have changed: python docs/_generators/make_scaling.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

from stretto.planner.estimate import Estimate
from stretto.planner.run_scores import predict_rows, read_table
from stretto.planner.runs import read_run
from stretto.view.colours import hexed, mix
from stretto.view.svg import element, page, text_line

DOCS = Path(__file__).parents[1]
TABLES = DOCS.parent / "benchmarks" / "published" / "tables"
FEWEST, MOST = 8, 16384  # devices
Cells = dict[str, str]

# 7B on A100 40 GB with 1600 Gbit/s a node: mosaicml/llm-foundry, scripts/train/benchmarking/README.md
MPT: Cells = {
    "model": "MPT 7B",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "seq": "2048",
    "vocab": "50368",
    "gpu": "a100_40gb",
    "network": "RoCE 1600 Gbps",
    "tp": "1",
    "pp": "1",
    "zero": "3",
    "micro_batch": "18",
    "recompute": "full",
    "precision": "bf16",
    "software": "fused",
    "framework": "fsdp",
}
MPT_RUNS = ((32, 576, 3725), (64, 1152, 3665), (128, 2304, 3623))  # devices, batch, tokens/s and device

INTRO = """# Scaling on paper

What five published jobs would do on 8 to 16,384 devices: every point is a prediction
([planning-evidence.md](planning-evidence.md)), that is, a replay of the job's own program with the
times of its layers, messages and collectives. This page and its picture are made by
`docs/_generators/make_scaling.py`.

![Shares of the step by number of devices, for five jobs](../pictures/scaling.svg)

*Weak* scaling adds replicas, each with its own batch; *strong* scaling divides one batch among
them, down to a sequence each. Tensor and pipeline ranks stay as published. A point is left out if
the schedule does not allow its number of microbatches, or memory does not suffice. *Utilisation* is
model FLOPs over the vendor's peak, without recomputation and with attention counted in full. *What
limits* is the largest part of the step besides computing: the bubble, communication that no
computation hides, the host, or the optimiser and other work.

With weak scaling nothing but ZeRO-3 of 175B loses much: its gathers grow with the ring. With strong
scaling a pipeline runs out of microbatches, and the bubble takes over (10% at the published 1,536
GPUs of 175B, 37% at 9,216), long before gradients, messages or the host do; sharded data
parallelism runs out of computation to hide its gathers behind.

Published: GPT from Narayanan et al. 2021 (SC21, tables 1 and 2; A100 80 GB, whose TFLOP/s count
recomputation, converted), on whose runs constants of the predictions were fitted: their agreement
is no test. MPT 7B from llm-foundry (scripts/train/benchmarking/README.md, A100 40 GB, 1600 Gbit/s a
node). Nothing beyond the rings was measured by anyone whom this page cites: networks of 16,384
devices also have stragglers, congestion and failures, which the predictions have not."""


@dataclass(frozen=True)
class Published:
    """A job whose time was published for some numbers of devices."""

    name: str
    runs: Sequence[Cells]
    base: int  # the run whose batch a device is kept for weak scaling, its whole batch for strong scaling


@dataclass(frozen=True)
class Point:
    """A prediction, and the published utilisation of the same job, if there is one."""

    devices: int
    estimate: Estimate
    published: float | None


def published_jobs() -> list[Published]:
    """The five jobs."""
    mpt = [
        MPT
        | {
            "gpus": str(devices),
            "dp": str(devices),
            "global_batch": str(batch),
            "tokens_per_s_per_gpu": str(rate),
        }
        for devices, batch, rate in MPT_RUNS
    ]
    first, two = (read_table(TABLES / f"sc21_table_{number}.csv") for number in (1, 2))

    def runs(panel: str, series: str) -> list[Cells]:
        return [cells for cells in two if (cells["x_panel"], cells["x_series"]) == (panel, series)]

    return [
        Published("MPT 7B, FSDP", mpt, len(mpt) - 1),
        Published("GPT 175B, ZeRO-3", runs("175B", "ZeRO-3"), 0),
        Published("GPT 175B, PTD-P: tensor 8, pipeline 12", runs("175B", "PTD-P"), 0),
        Published("GPT 530B, PTD-P: tensor 8, pipeline 35", runs("530B", "PTD-P"), 0),
        Published("GPT 1T, PTD-P: tensor 8, pipeline 64 x 2", first[-1:], 0),
    ]


def points(job: Published, weak: bool) -> list[Point]:
    """The job on all numbers of devices that it can run on.

    With weak scaling each replica keeps its batch, with strong scaling all share the base run's. A smaller
    share of a replica takes smaller microbatches where it has to.
    """
    base = job.runs[job.base]
    replica = int(base["tp"]) * int(base["pp"])
    batch, copies, micro = int(base["global_batch"]), int(base["dp"]), int(base["micro_batch"])
    measured_runs = {int(run["dp"]): run for run in job.runs}
    found: list[Point] = []
    for dp in _copies(batch, [*measured_runs], weak):
        if not FEWEST <= dp * replica <= MOST:
            continue
        global_batch = batch // copies * dp if weak else batch
        share = global_batch // dp
        size = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
        cells = base | {"gpus": str(dp * replica), "dp": str(dp)}
        cells |= {"global_batch": str(global_batch), "micro_batch": str(size)}
        (prediction,) = predict_rows([cells], read_run)
        if prediction.estimate is None or prediction.estimate.memory is None:
            continue  # the schedule has no such number of microbatches
        if prediction.estimate.memory.verdict != "does not fit":
            run = measured_runs.get(dp)
            same = run is not None and run["global_batch"] == str(global_batch)
            found.append(Point(dp * replica, prediction.estimate, _published(run) if run and same else None))
    return found


def _copies(batch: int, published: list[int], weak: bool) -> Iterator[int]:
    """Numbers of replicas, the published ones among them: powers of two, or what the batch divides into."""
    last = 0.0
    for dp in range(1, MOST + 1):
        wanted = dp.bit_count() == 1 if weak else batch % dp == 0 and dp >= 1.5 * last
        if dp in published or wanted:
            last = dp
            yield dp


def _published(run: Cells) -> float:
    """Model FLOPs utilisation of a published run."""
    (prediction,) = predict_rows([run], read_run, memory=False)
    assert prediction.estimate is not None
    assert prediction.run is not None
    assert prediction.run.measured.seconds is not None
    return prediction.estimate.mfu * prediction.estimate.seconds / prediction.run.measured.seconds


# --- picture

WIDTH, TALL, PITCH, TOP, LEFT, GAP = 980.0, 150.0, 214.0, 108.0, 50.0, 60.0
PANEL = (WIDTH - LEFT - 20.0 - GAP) / 2
GROUPS = {
    "compute": ("compute",),
    "recompute": ("recompute",),
    "bubble": ("bubble",),
    "tensor": ("tensor",),
    "data": ("data",),
    "host": ("host",),
    "other": ("optimiser", "other", "context", "expert", "offload"),
}
NAMES = {
    "compute": "compute",
    "recompute": "recomputation",
    "bubble": "bubble",
    "tensor": "exposed tensor-parallel communication",
    "data": "exposed data-parallel communication",
    "host": "host",
    "other": "optimiser and other",
}
COLOURS = {  # of the page's bars (view/front/bars.js); the bubble is hatched
    "compute": (30, 90, 152),
    "recompute": (146, 106, 197),
    "tensor": (235, 163, 44),
    "data": (140, 222, 200),
    "host": (250, 226, 60),
    "other": (118, 118, 118),
}


def shares(estimate: Estimate) -> dict[str, float]:
    """What the step is spent on, as parts of 1."""
    return {
        name: sum(estimate.parts.get(part, 0.0) for part in parts) / estimate.seconds
        for name, parts in GROUPS.items()
    }


def limit(estimate: Estimate) -> str:
    """What takes most of the step besides computing."""
    spent = shares(estimate)
    worst = max((name for name in spent if name not in ("compute", "recompute")), key=spent.__getitem__)
    return f"{NAMES[worst]}, {100 * spent[worst]:.0f}%"


def picture(drawn: Sequence[tuple[Published, list[Point], list[Point]]]) -> str:
    """All jobs, one below another; weak scaling left, strong scaling right."""
    title = "Weak and strong scaling of five published jobs"
    parts = [
        text_line(title, 16, 28, 16, font_weight="bold"),
        text_line(
            "Predicted shares of the step, stacked; line and dots: predicted model FLOPs utilisation; rings: "
            "published.",
            *(16, 48, 12),
            class_="quiet",
        ),
        *_legend(70.0),
    ]
    for row, (job, *both) in enumerate(drawn):
        for column, some in enumerate(both):
            parts += _panel(job, some, LEFT + column * (PANEL + GAP), TOP + row * PITCH + 24, column == 0)
    return page(WIDTH, TOP + PITCH * len(drawn) + 16, title, _about(drawn), parts)


def _about(drawn: Sequence[tuple[Published, list[Point], list[Point]]]) -> str:
    texts = [
        f"{job.name}: from {some[0].devices} to {some[-1].devices} devices utilisation goes from "
        f"{100 * some[0].estimate.mfu:.0f}% to {100 * some[-1].estimate.mfu:.0f}% with {kind} scaling"
        for job, *both in drawn
        for kind, some in zip(("weak", "strong"), both, strict=True)
    ]
    return "; ".join(texts)


def _fill(name: str) -> dict[str, str]:
    colour = COLOURS.get(name)
    return {"class_": "held"} if colour is None else {"fill": hexed(mix(colour, (255, 255, 255), 0.35))}


def _legend(y: float) -> list[str]:
    parts: list[str] = []
    x = 16.0
    for name in GROUPS:
        parts.append(element("rect", x=x, y=y, width=12, height=12, **_fill(name)))
        parts.append(text_line(NAMES[name], x + 17, y + 10, 11))
        x += 32 + 5.6 * len(NAMES[name])
    return parts


def _panel(job: Published, some: Sequence[Point], left: float, top: float, weak: bool) -> list[str]:
    def x(devices: float) -> float:
        return left + PANEL * log2(devices / FEWEST) / log2(MOST / FEWEST)

    def y(share: float) -> float:
        return top + TALL * (1 - share)

    kind = (
        "weak: batch grows with devices" if weak else f"strong: batch of {some[0].estimate.job.global_batch}"
    )
    parts = [text_line(f"{job.name}; {kind}", left, top - 8, 12)]
    below = [0.0] * len(some)
    for name in GROUPS:
        above = [low + shares(point.estimate)[name] for low, point in zip(below, some, strict=True)]
        there = [f"{x(p.devices):.1f},{y(up):.1f}" for p, up in zip(some, above, strict=True)]
        back = [f"{x(p.devices):.1f},{y(low):.1f}" for p, low in zip(some, below, strict=True)]
        parts.append(element("polygon", points=" ".join([*there, *reversed(back)]), **_fill(name)))
        below = above
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(element("path", d=f"M{left} {y(share)}h{PANEL}", class_="line", stroke_opacity=0.4))
        parts.append(text_line(f"{100 * share:.0f}%", left - 6, y(share) + 4, 10, text_anchor="end"))
    for power in range(3, 15):
        parts.append(text_line(f"{2**power:,}", x(2**power), top + TALL + 15, 9, text_anchor="middle"))
    line = " ".join(f"{x(p.devices):.1f},{y(p.estimate.mfu):.1f}" for p in some)
    parts.append(element("polyline", points=line, fill="none", stroke="#000000", stroke_width=1.5))
    for point in some:
        where = {"cx": x(point.devices), "cy": y(point.estimate.mfu)}
        parts.append(element("circle", **where, r=2.5, fill="#000000"))
    for point in some:
        if point.published is not None:
            where = {"cx": x(point.devices), "cy": y(point.published)}
            parts.append(element("circle", **where, r=5, fill="none", stroke="#ffffff", stroke_width=4))
            parts.append(element("circle", **where, r=5, fill="none", stroke="#c2185b", stroke_width=2))
    return parts


# --- page


def text(drawn: Sequence[tuple[Published, list[Point], list[Point]]]) -> str:
    """The page."""
    parts = [INTRO]
    for job, weak, strong in drawn:
        parts.append(f"## {job.name}")
        for kind, some in (("Weak", weak), ("Strong", strong)):
            parts.append(
                f"{kind} scaling, {some[0].estimate.job.global_batch} sequences at {some[0].devices} devices"
                + (
                    f", {some[-1].estimate.job.global_batch} at {some[-1].devices:,}:"
                    if kind == "Weak"
                    else ":"
                )
            )
            rows = [
                "| devices | step, s | utilisation | published | bubble | what limits |",
                "|---|---|---|---|---|---|",
            ]
            rows += [
                f"| {p.devices:,} | {p.estimate.seconds:.2f} | {100 * p.estimate.mfu:.1f}% "
                f"| {'' if p.published is None else f'{100 * p.published:.1f}%'} "
                f"| {100 * p.estimate.bubble:.1f}% | {limit(p.estimate)} |"
                for p in some
            ]
            parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def drawn_jobs() -> list[tuple[Published, list[Point], list[Point]]]:
    """Every job with its points of weak and of strong scaling."""
    return [(job, points(job, weak=True), points(job, weak=False)) for job in published_jobs()]


def main() -> None:
    drawn = drawn_jobs()
    (DOCS / "pictures" / "scaling.svg").write_text(picture(drawn), encoding="utf-8")
    (DOCS / "evidence" / "scaling.md").write_text(text(drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
