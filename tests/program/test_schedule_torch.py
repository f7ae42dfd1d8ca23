"""torch.distributed.pipelining runs the programs that are written here, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineScheduleRuntime

from ranks import on_ranks
from stretto.errors import StrettoError
from stretto.program import Program, check, lower, names, schedule
from stretto.program.text import check_torch, from_csv, to_csv
from stretto.program.transforms.activations import offload, recompute
from stretto.program.transforms.one_order import one_order

WIDTH, ROWS = 3, 2
HAS_WAITS = hasattr(_ComputationType, "WAIT_SEND_F")  # torch 2.15
MICROBATCHES = {2: 6, 4: 9}  # by ranks


def layer(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(5)
    shape = (ROWS * microbatches, WIDTH)
    x, target = (torch.randn(shape, dtype=torch.float64, generator=stream) for _ in range(2))
    return x, target


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def run_in_torch(paths: list[str]) -> list[tuple[list[float], dict[int, list[Tensor]]]]:
    """For each CSV: losses where the last stage is, and gradients by stage, as torch's runtime gets them."""
    rank = torch.distributed.get_rank()
    results = []
    for path in paths:
        text = Path(path).read_text()
        program = from_csv(text)
        example = torch.zeros(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
        stages = [
            PipelineStage(
                layer(s),
                s,
                program.stages,
                torch.device("cpu"),
                input_args=(example,),
                output_args=(example,),
            )
            for s in program.stages_of(rank)
        ]
        runtime = _PipelineScheduleRuntime(stages, program.microbatches, loss_fn=squares, scale_grads=False)
        runtime._load_csv(path, format="compute_comms" if program.lowered else "compute_only")
        x, target = batch(program.microbatches)
        losses: list[Tensor] = []
        first, last = (stage in program.stages_of(rank) for stage in (0, program.stages - 1))
        runtime.step(
            *([x] if first else []), target=target if last else None, losses=losses if last else None
        )
        gradients = {
            stage.stage_index: [p.grad for p in stage.submod.parameters() if p.grad is not None]
            for stage in stages
        }
        results.append(([loss.item() for loss in losses], gradients))
    return results


@dataclass(frozen=True)
class Ran:
    """A program, and by rank the losses and gradients that torch's runtime got from its CSV; None: it was
    refused, with this message.
    """

    program: Program | None
    results: list[tuple[list[float], dict[int, list[Tensor]]]]
    refused: str = ""


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4])
def everything(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Every schedule as torch runs it on real ranks: compute only on two ranks, and (name + " lowered") with
    transfers.
    """
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11's runtime sends to its own rank where stages form a V, which gloo does not")
    ranks: int = request.param
    folder = tmp_path_factory.mktemp("csv")
    programs = dict[str, Program]()
    ran = dict[str, Ran]()
    for name in names():
        program = schedule(name, ranks, MICROBATCHES[ranks])
        try:
            check_torch(program)
        except StrettoError as error:
            ran[name] = Ran(None, [], error.message)
            continue
        if ranks == 2:  # torch then adds the transfers itself
            programs[name] = program
        programs[f"{name} lowered"] = one_order(lower(program))
        check(programs[f"{name} lowered"], "paired")
    paths = list[str]()
    for name, program in programs.items():
        path = folder / f"{name.replace(' ', '-')}.csv"
        path.write_text(to_csv(program, waits=program.lowered and HAS_WAITS))
        paths.append(str(path))
    by_rank = on_ranks(ranks, run_in_torch, paths)
    for at, (name, program) in enumerate(programs.items()):
        ran[name] = Ran(program, [results[at] for results in by_rank])
    return ran


REFUSED = {  # all others are synchronous and have one copy
    "forward-only": "forward-only has forwards only",
    "pipedream": "pipedream updates weights within the step",
    "pipedream-2bw": "pipedream-2bw updates weights within the step",
    "dualpipe": "dualpipe has 2 copies of the model",
    "chimera": "chimera has 2 copies of the model",
}


@pytest.mark.parametrize("name", list(names()))
def test_torch_runs_every_schedule_or_it_is_refused(everything: dict[str, Ran], name: str) -> None:
    if name in REFUSED:
        assert everything[name].refused.startswith(REFUSED[name])
        return
    for ran in (everything[key] for key in (name, f"{name} lowered") if key in everything):
        assert ran.program is not None
        same_as_one_process(ran.program, ran.results)


def same_as_one_process(program: Program, results: list[tuple[list[float], dict[int, list[Tensor]]]]) -> None:
    model = nn.Sequential(*(layer(stage) for stage in range(program.stages)))
    x, target = (t.split(ROWS) for t in batch(program.microbatches))
    losses = [squares(model(a), b) for a, b in zip(x, target, strict=True)]
    sum(losses).backward()
    seen = set[int]()
    for rank, (got, gradients) in enumerate(results):
        if program.placement[-1] == rank:
            assert got == pytest.approx([loss.item() for loss in losses], rel=1e-12)
        for stage, mine in gradients.items():
            seen.add(stage)
            wanted = [p.grad for p in model[stage].parameters()]
            assert len(mine) == len(wanted)
            for a, b in zip(mine, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert seen == set(range(program.stages))


def test_pairs_are_among_them(everything: dict[str, Ran]) -> None:
    assert everything["dualpipe-v lowered"].program is not None
    assert everything["dualpipe-v lowered"].program.pairs


@pytest.mark.parametrize(
    ("changed", "kind"),
    [(recompute, "RECOMPUTE"), (offload, "OFFLOAD"), (lambda p: lower(p, tied=[(0, 1)]), "REDUCE_TIED")],
)
def test_actions_that_torch_lacks_are_refused(changed: Callable[[Program], Program], kind: str) -> None:
    with pytest.raises(StrettoError, match=f"torch.distributed.pipelining has no action {kind}"):
        check_torch(changed(schedule("1f1b", 2, 4)))
