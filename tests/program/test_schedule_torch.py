"""torch.distributed.pipelining runs the programs that are written here, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from ranks import on_ranks
from stretto.program import Program, check, lower, schedule
from stretto.program.text import from_csv, to_csv
from stretto.program.transforms.one_order import one_order

WIDTH, ROWS = 3, 2


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


def compare(programs: list[Program], folder: Path) -> None:
    paths = []
    for at, program in enumerate(programs):
        path = folder / f"{at}-{program.name}.csv"
        path.write_text(to_csv(program))
        paths.append(str(path))
    by_rank = on_ranks(programs[0].ranks, run_in_torch, paths)
    for at, program in enumerate(programs):
        model = nn.Sequential(*(layer(stage) for stage in range(program.stages)))
        x, target = (t.split(ROWS) for t in batch(program.microbatches))
        losses = [squares(model(a), b) for a, b in zip(x, target, strict=True)]
        sum(losses).backward()
        seen = set()
        for rank, results in enumerate(by_rank):
            got, gradients = results[at]
            if program.placement[-1] == rank:
                assert got == pytest.approx([loss.item() for loss in losses], rel=1e-12)
            for stage, mine in gradients.items():
                seen.add(stage)
                wanted = [p.grad for p in model[stage].parameters()]
                assert len(mine) == len(wanted)
                for a, b in zip(mine, wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        assert seen == set(range(program.stages))


def both(program: Program) -> list[Program]:
    """Compute only, and compute + comms."""
    lowered = one_order(lower(program))
    check(lowered, "paired")
    return [program, lowered]


def test_torch_runs_our_programs_on_two_ranks(tmp_path: Path):
    names = [
        ("1f1b", 4),
        ("interleaved", 5),
        ("zb-v", 4),
        ("dualpipe-v", 6),
        ("interleaved-zb", 4),
        ("bfs", 3),
    ]
    programs = [schedule(name, 2, m) for name, m in names]
    assert programs[3].pairs
    compare([each for program in programs for each in both(program)], tmp_path)


@pytest.mark.slow
def test_torch_runs_our_programs_on_four_ranks(tmp_path: Path):
    names = ["1f1b-eager", "zb-h1", "zb-h2", "v-half", "v-min", "hanayo", "dualpipe-v", "interleaved"]
    compare([each for name in names for each in both(schedule(name, 4, 9))], tmp_path)
