"""Claim: a pipeline that never drains loses no time between steps, and its delayed updates cost little.

1. Stages that sleep instead of computing: 20 steps without a drain take at most 3% longer than full
   ranks would, and less than 20 steps that drain by the bubble.
2. The small GPT on two ranks, tokens/s: faster than 1F1B by at least the bubble.
3. The quickstart's text: the loss after 300 steps is within 2% of 1F1B's.

    python benchmarks/asynchronous.py sleeping
    python benchmarks/asynchronous.py gpt
    nice python benchmarks/asynchronous.py loss --rounds 300
    nice python benchmarks/asynchronous.py loss --rounds 300 --optimizer adamw --factors 1 0.5 0.25
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import small_gpt
import torch
from harness import barrier, on_ranks, where
from sleeping import Sleeper

from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Boundary, Pipeline, ReplicatedWeights
from stretto.layout import Layout
from stretto.program import schedule
from stretto.run.train.language_task import apply_gradients
from stretto.run.train.metrics import read_lines

STEPS = 20
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")


# ---------------------------------------------------------------------- sleeping stages


def sleep(name: str, microbatches: int, unit: float, windows: Sequence[int]) -> float:
    """Seconds of all steps, all ranks together. A unit is a forward of one microbatch on a rank."""
    ranks = torch.distributed.get_world_size()
    build = partial(schedule, name, ranks, microbatches)
    program = build()
    pipe = Pipeline(
        [Sleeper([unit, unit, unit]) for _ in range(ranks)],
        program,
        Mesh(Layout(pp=ranks)),
        lambda y, _: y.sum(),
        window=(lambda steps: build(steps=steps)) if program.versions else None,
        weights=ReplicatedWeights(
            optimizer=(lambda parameters: torch.optim.SGD(parameters, lr=0.0)) if program.versions else None
        ),
        boundary=Boundary((1, 1), torch.float32),
    )
    inputs = [torch.ones(1, 1)] * microbatches
    pipe.step(inputs, inputs)
    barrier()
    start = time.perf_counter()
    for window in windows:
        for _ in range(window):
            pipe.advance(lambda _: (inputs, inputs, None), window)
    barrier()
    return time.perf_counter() - start


def sleeping(ranks: int, microbatches: int, unit: float) -> None:
    """The table of sleeping stages."""
    busy = 3 * STEPS * microbatches
    fill = 3 * (ranks - 1)
    print(f"{ranks} ranks, {microbatches} microbatches, {STEPS} steps; units of {unit * 1e3:.0f} ms")
    print("| schedule | drains | full ranks | with its bubble | measured | over full ranks |")
    print("|---|---|---|---|---|---|")
    for name, windows in (
        ("1f1b", [1] * STEPS),
        *((name, windows) for name in ASYNCHRONOUS for windows in ([1] * STEPS, [STEPS])),
    ):
        took = on_ranks(ranks, sleep, name, microbatches, unit, windows)[0] / unit
        predicted = busy + fill * len(windows)
        print(
            f"| {name} | {len(windows)} | {busy} | {predicted} | {took:.1f} | {took / busy - 1:+.1%} |",
            flush=True,
        )


# ---------------------------------------------------------------------- the small GPT


def race(rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of a step by schedule and round, in turn on the same ranks."""
    contestants = {name: _Contestant(name) for name in ("1f1b", *ASYNCHRONOUS)}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(rounds + 1):
        for name, contestant in contestants.items():
            took = contestant.window(steps)
            if at:
                times[name].append(took / steps * 1e3)
    return times


class _Contestant:
    """A schedule's replica of the small GPT."""

    def __init__(self, name: str) -> None:
        overrides = {"schedule__name": name, "layout__pp": 2}
        self._replica = small_gpt.replica(small_gpt.config(**overrides))
        self._batch = small_gpt.batch()

    def window(self, steps: int) -> float:
        """Seconds of so many steps, drained at the end; each updates the weights."""
        replica = self._replica
        inputs, targets = self._batch
        scale = torch.full((len(inputs),), 1.0 / small_gpt.TOKENS)
        barrier()
        start = time.perf_counter()
        for _ in range(steps):
            if replica.asynchronous:
                replica.set_rate(1e-3)
                replica.advance(lambda _: (inputs, targets, scale), steps)
            else:
                replica.step(inputs, targets, scale)
                apply_gradients(replica, 1e-3, float(replica.gradient_norm()))
        replica.states.ready()
        barrier()
        return time.perf_counter() - start


def gpt(rounds: int, steps: int) -> None:
    """The table of the small GPT."""
    times: dict[str, list[float]] = on_ranks(2, race, rounds, steps)[0]
    m = small_gpt.MICROBATCHES
    print(f"the small GPT on 2 ranks, {m} microbatches, {steps} steps at a time, {rounds} rounds")
    print(
        f"bubble of 1f1b: {1 / (m + 1):.1%} of a step; "
        f"of {steps} steps without a drain {1 / (steps * m + 1):.1%}"
    )
    print("| schedule | ms a step, median | 1f1b's time over its own, median of the rounds |")
    print("|---|---|---|")
    for name, own in times.items():
        ratios = [a / b for a, b in zip(times["1f1b"], own, strict=True)]
        print(f"| {name} | {median(own):.1f} | {median(ratios):.3f} |")


# ---------------------------------------------------------------------- convergence


RATES = {"muon": 2e-3, "adamw": 1e-3}  # of 1f1b; muon's is the quickstart's
UPDATES: Sequence[tuple[str, Sequence[str], float]] = (
    ("1f1b", (), 1.0),
    ("pipedream-2bw", ("schedule.group=8",), 1.0),  # one update a step, as 1f1b
    ("pipedream", (), 0.5),  # eight, each by an eighth of the batch
)


def loss(steps: int, optimizer: str, factors: Sequence[float]) -> None:
    """The quickstart's text and a small model: the mean loss of the last 20 steps, and the held-out one.

    Args:
        factors: of the learning rate; each schedule is run with each, and all are compared with 1f1b's best.
    """
    print(f"{optimizer}, {steps} steps")
    print("| schedule | learning rate | loss of the last 20 steps | over 1f1b | held-out loss | over 1f1b |")
    print("|---|---|---|---|---|---|")
    first = list[tuple[float, float]]()
    for name, overrides, share in UPDATES:
        results = list[tuple[float, float]]()
        for factor in factors:
            rate = RATES[optimizer] * factor * share
            train = [f"optim.name={optimizer}", f"optim.lr={rate}", f"train.steps={steps}"]
            results.append(_losses(name, steps, [*train, *overrides]))
            best = [min(losses) for losses in zip(*(first or results), strict=True)]
            columns = [
                f"{own:.4f} | {own / lowest - 1:+.2%}" for own, lowest in zip(results[-1], best, strict=True)
            ]
            print(f"| {name} | {rate:g} | {' | '.join(columns)} |", flush=True)
        first = first or results


def _losses(name: str, steps: int, overrides: Sequence[str]) -> tuple[float, float]:
    """The mean loss of a run's last 20 steps, and its held-out loss."""
    from stretto.run.config.load import load
    from stretto.run.train.language_job import LANGUAGE
    from stretto.run.train.launch import run_job

    with TemporaryDirectory() as folder:
        config = load(
            Path(__file__).parents[1] / "configs" / "quickstart.yaml",
            [
                *("layout.pp=2", "layout.dp=1", "model.layers=2", "model.hidden=128", "model.tied=false"),
                *(f"schedule.name={name}", "optim.rate.warmup=60", "optim.clip=null"),
                *("checkpoint.every=null", "sample.tokens=0", f"eval.every={steps}"),
                *(f"run.dir={folder}", *overrides),
            ],
        )
        run_job(LANGUAGE, config, quiet=True)
        run = config.run.folder
        last = mean([row["loss"] for row in read_lines(run / "metrics.jsonl")][-20:])
        return last, [row["loss"] for row in read_lines(run / "eval.jsonl")][-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("sleeping", "gpt", "loss"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit-us", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=STEPS, help="of `gpt`, without a drain between them")
    parser.add_argument("--rounds", type=int, default=5, help="of `gpt`; steps of `loss`")
    parser.add_argument("--optimizer", choices=RATES, default="muon", help="of `loss`")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0], help="of the learning rate")
    args = parser.parse_args()
    if args.what == "sleeping":
        sleeping(args.ranks, args.microbatches, args.unit_us * 1e-6)
    elif args.what == "gpt":
        gpt(args.rounds, args.steps)
    else:
        loss(args.rounds, args.optimizer, args.factors)
    print(f"\n{where()}")


if __name__ == "__main__":
    main()
