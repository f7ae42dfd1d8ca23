"""Every exercise: its solution is accepted, and changed in one place refused with the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.learn.catalogue import EXERCISES, find_exercise
from stretto.learn.grade import Grade, grade

SOLUTIONS = Path(__file__).with_name("solutions")
SLOW = pytest.mark.slow


def graded(name: str, path: Path, seed: int = 1, limit_s: float = 30.0) -> Grade:
    return grade(find_exercise(name), path, seed, limit_s=limit_s)


@pytest.mark.parametrize("name", [exercise.name for exercise in EXERCISES])
def test_the_solution_is_accepted(name: str) -> None:
    result = graded(name, SOLUTIONS / f"{name}.py")
    assert result.solved, [check for check in result.checks if check.problem]
    assert len(result.checks) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("name", [exercise.name for exercise in EXERCISES])
def test_the_solution_is_accepted_whatever_is_drawn(name: str, seed: int) -> None:
    result = graded(name, SOLUTIONS / f"{name}.py", seed)
    assert result.solved, [check for check in result.checks if check.problem]


# exercise, a line of its solution, what stands there instead, what must be said
WRONG: list[Any] = [
    *(
        (
            "ddp",
            "        flat /= dist.get_world_size()\n",
            "",
            "is 3 times the reference: wrong gradient scale",
        ),
        ("ddp", "        if filled + size > bucket_bytes:", "        if True:", "messages for"),
        ("ddp", "dist.all_reduce(flat)", "pass", "the reduction over them is missing"),
        ("ddp", "model.parameters()", "[*model.parameters(), model.embed.weight]", "a gradient sent twice"),
    ),
    *(
        (
            "zero1",
            "            parameter.copy_(values.view_as(parameter))",
            "            pass",
            "of every shard",
        ),
        ("zero1", ".split(self.share)[dist.get_rank()]", "", "build the inner optimizer on the shard alone"),
    ),
    *(
        (
            "tensor",
            "        dist.all_reduce(gradient)\n",
            "",
            "their sum is the reference: the reduction over them",
        ),
        (
            "tensor",
            "weight.T) + self.bias",
            "weight.T + self.bias)",
            "its bias is added 2 times, once on each rank",
        ),
        ("tensor", "part(linear.weight, 0)", "part(linear.weight.T, 1)", "must be ["),
    ),
    *(
        (
            "sequence",
            "(*block.norm.parameters(), block.down.bias)",
            "(block.down.bias,)",
            "their sum is the reference",
        ),
        (
            "sequence",
            "return scatter(gradient)",
            "return gradient.chunk(2, 1)[dist.get_rank()]",
            "in direction",
        ),
        (
            "sequence",
            "self.up(Gather.apply(self.norm(x)))",
            "self.up(self.norm(Gather.apply(x)))",
            "does the norm see",
        ),
    ),
    *(
        ("pipeline", "    warm_up = min(count, ranks - 1 - rank)", "    warm_up = count", "and holds up to"),
        (
            "pipeline",
            "loss(output, targets[index]) / count",
            "loss(output, targets[index])",
            "times the reference",
        ),
        pytest.param(
            "pipeline", "sends.append(dist.isend(x.grad, rank - 1))", "pass", "waits for its recv", marks=SLOW
        ),
    ),
    *(
        ("schedule", "if index >= rank:", "if index >= rank + 1:", "holds"),
        ("schedule", "warm_up = ranks - 1 - rank", "warm_up = min(1, ranks - 1 - rank)", "it takes"),
        (
            "schedule",
            'order.append(f"{rank}I{index}")',
            'order.insert(0, f"{rank}I{index}")',
            "before 0F1 on",
        ),
    ),
    *(
        ("recompute", "        torch.set_rng_state(ctx.state)\n", "", "are the masks others"),
        ("recompute", "        torch.set_rng_state(state)\n", "", "output of step 2"),
        (
            "recompute",
            "        output.backward(gradient)\n        return None, x.grad, None",
            "        return None, torch.autograd.grad(output, x, gradient)[0], None",
            "it is NoneType",
        ),
        (
            "recompute",
            "return Checkpoint.apply(block, x, next(block.parameters()))",
            "return block(x)",
            "bytes are saved for the backward",
        ),
    ),
    *(
        ("ring", "        if source <= rank:", "        if True:", "attends to shards of later positions"),
        (
            "ring",
            "scores.logsumexp(-1, keepdim=True)",
            "scores.exp().sum(-1, keepdim=True).log()",
            "are not finite",
        ),
        ("ring", " / q.shape[-1] ** 0.5", "", "not divided by the root of the head size"),
        (
            "ring",
            "            sums = passed(sums)\n        return",
            "        return",
            "what the queries of other",
        ),
        (
            "ring",
            "                shard = passed(shard)\n            sums = passed(sums)\n",
            "                shard, sums = passed(shard), passed(sums)\n",
            "pass it on until it is home",
        ),
        ("ring", "return Ring.apply(q, k, v)", "return Ring.apply(q, k, v).detach()", "has none: torch does"),
        (
            "ring",
            "Ring.apply(q, k, v)",
            "Ring.apply(q, k, v) + 0 * k * v",
            "bytes are saved for the backward",
        ),
    ),
    *(
        (
            "cut",
            "    return list(best(ranks - 1, len(layers))[1])",
            "    n = len(layers)\n    return [n // ranks] * (ranks - 1) + [n - n // ranks * (ranks - 1)]",
            "its slowest stage takes",
        ),
        ("cut", "if needed <= memory else", "if True else", "holds more than"),
        ("cut", "return list(best(", "return list((0,) + best(", "numbers above 0 with the sum"),
    ),
    *(
        ("tables", "[:parts]\n", "[:1]\n", "and has"),
        ("tables", "if used[rank] + size <= memory]", "if True]", "for tables (device), and has"),
        ("tables", "sorted(room, key=busy.__getitem__)", "room", "is busy for"),
    ),
    *(
        pytest.param("plan", "tp=4 dp=4 pp=4", "tp=8 dp=1 pp=8", "beside the best: tensor", marks=SLOW),
        ("plan", "tp=4 dp=4 pp=4", "tp=1 dp=16 pp=4", "the fullest rank needs"),
        ("plan", "tp=4 dp=4 pp=4", "tp=4 dp=4 pp=8", "is not 64 GPUs"),
    ),
    *(
        (
            "bugs",
            "        (loss / count).backward()",
            "        (loss / (targets != -100).sum() / len(microbatches) / 2).backward()",
            "is averaged over ranks with unequal numbers",
        ),
        (
            "bugs",
            "    return total\n",
            "    return total / dist.get_world_size()\n",
            "it is 0.5 times what one process",
        ),
        ("bugs", "for gradient in sharded]", "for gradient in gradients]", "clip: the norm"),
        (
            "bugs",
            "step * dist.get_world_size() + dist.get_rank()",
            "step + dist.get_rank()",
            "rank 0 in step 1 drops the same elements as rank 1 in step 0",
        ),
        (
            "bugs",
            "step * dist.get_world_size() + dist.get_rank()",
            "(2 * step + dist.get_rank()) * 2**31",
            "rank 0 in step 1 drops the same elements as rank 0 in step 0",
        ),
        (
            "bugs",
            "    square = all_reduce(x.square().sum(-1, keepdim=True))",
            "    square = x.square().sum(-1, keepdim=True)\n    dist.all_reduce(square.detach())",
            "rms_norm: the gradient of x",
        ),
    ),
]


NAMES = [case[0] if isinstance(case, tuple) else case.values[0] for case in WRONG]
# one of each exercise in the quick suite
CASES = [
    pytest.param(*case, marks=SLOW) if isinstance(case, tuple) and NAMES[:index].count(case[0]) else case
    for index, case in enumerate(WRONG)
]


@pytest.mark.parametrize(("name", "line", "instead", "feedback"), CASES)
def test_a_mistake_is_refused_with_its_cause(
    name: str, line: str, instead: str, feedback: str, tmp_path: Path
) -> None:
    solution = (SOLUTIONS / f"{name}.py").read_text()
    assert solution.count(line) == 1
    path = tmp_path / f"{name}.py"
    path.write_text(solution.replace(line, instead))
    check = graded(name, path).checks[-1]
    assert check.problem is not None, "accepted"
    assert feedback in f"{check.subject}: {check.problem}"


def test_every_exercise_has_mistakes() -> None:
    assert {name for name in NAMES if NAMES.count(name) > 1} == {exercise.name for exercise in EXERCISES}


def test_the_template_with_bugs_runs_and_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bugs.py"
    path.write_text(find_exercise("bugs").module.TEMPLATE)
    (check,) = graded("bugs", path).checks
    assert check.subject == "accumulate"
    assert "unequal numbers of tokens" in str(check.problem)
