"""Grade a reader's file: run the checks of an exercise on real ranks, and report what is wrong."""

from __future__ import annotations

import ast
import faulthandler
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from traceback import extract_tb

from stretto.errors import StrettoError
from stretto.learn.catalogue import Exercise
from stretto.learn.checks import Check
from stretto.run.launch.failure import Failure
from stretto.run.launch.local import RankFailed, prepare, run_ranks
from stretto.user_file import UserFunction, find_function

LIMIT_S = 30.0  # of one check


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The checks of a file up to the first problem, and the seconds that they took."""

    checks: tuple[Check, ...]
    seconds: float

    @property
    def solved(self) -> bool:
        """True if there is no problem."""
        return all(check.problem is None for check in self.checks)


def grade(
    exercise: Exercise,
    path: Path,
    seed: int,
    *,
    limit_s: float = LIMIT_S,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Grade:
    """Run the checks of an exercise on a reader's file.

    Args:
        seed: of the cases that are drawn.
        limit_s: seconds after which a check that is not finished counts as hung.
        on_check: called with every check that has passed.

    Raises:
        StrettoError: the file is missing, is not Python, or lacks a function of the template.
    """
    started = time.perf_counter()
    # the server that ranks are forked from imports what every rank would, while this process checks the file
    prepare((exercise.module_name, "torch._dynamo"))
    functions = _functions(exercise, path)
    with tempfile.TemporaryDirectory(prefix="stretto-learn-") as folder:
        run = _Run(Path(folder), path.resolve(), exercise.module.RANKS, on_check)
        try:
            on_rank = partial(_run_checks, exercise, functions, seed=seed, limit_s=limit_s, folder=run.folder)
            run_ranks(run.ranks, on_rank, look=run.look)
        except (RankFailed, StrettoError) as error:
            failure = error.failure if isinstance(error, RankFailed) else None
            problem = str(error) if failure is None else failure.message
            if failure is not None and failure.kind == "died":
                # gloo aborts a process that receives more bytes than it expects
                problem = (
                    f"rank {failure.rank} {problem}: did ranks make different calls or send other sizes?"
                )
            elif failure is not None and failure.kind not in ("hung", "server"):
                problem = f"rank {failure.rank}: {failure.name}: {problem}"
            run.read()
            run.checks.append(Check("your code runs", problem))
        run.read()
    return Grade(checks=tuple(run.checks), seconds=time.perf_counter() - started)


def _functions(exercise: Exercise, path: Path) -> dict[str, UserFunction]:
    """Find what the template defines in the reader's file."""
    return {
        node.name: find_function(
            f"{path}:{node.name}",
            f"stretto learn {exercise.name} {exercise.template_file}",
            [argument.arg for argument in node.args.args] if isinstance(node, ast.FunctionDef) else None,
        )
        for node in ast.parse(exercise.module.TEMPLATE).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


class _Run:
    """What the launcher learns of the ranks, from files that they write."""

    def __init__(self, folder: Path, file: Path, ranks: int, on_check: Callable[[Check], None]) -> None:
        self.folder, self.ranks = folder, ranks
        self.checks = list[Check]()
        self._file, self._on_check = file, on_check
        self._hung_since: float | None = None

    def read(self) -> None:
        """Read the checks that the ranks have finished."""
        path = self.folder / "checks"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines[len(self.checks) :]:
            self.checks.append(Check(*json.loads(line)))
            if self.checks[-1].problem is None:
                self._on_check(self.checks[-1])

    def look(self, running: Mapping[int, int], failures: Mapping[int, Failure]) -> Failure | None:
        """Return a failure with each rank's line if a check takes too long."""
        self.read()
        stacks = [self.folder / f"rank{rank}" for rank in range(self.ranks)]
        texts = [stack.read_text(encoding="utf-8") if stack.exists() else "" for stack in stacks]
        if not any(texts):
            return None
        self._hung_since = self._hung_since or time.monotonic()
        if not all(texts) and time.monotonic() < self._hung_since + 2.0:  # others may write theirs yet
            return None
        lines = [f"rank {rank} {self._position(text)}" for rank, text in enumerate(texts)]
        message = f"no answer in time: {'; '.join(lines)}"
        return Failure(rank=0, kind="hung", name="Hung", message=message)

    def _position(self, stack: str) -> str:
        """The innermost line of the reader's file in a stack, which begins with the innermost."""
        for file, line in re.findall(r'File "(.*)", line (\d+)', stack):
            if Path(file) == self._file:
                code = self._file.read_text(encoding="utf-8").splitlines()[int(line) - 1].strip()
                return f"is at line {line}: {code}"
        return "has left your code and waits for the others"


def _run_checks(
    exercise: Exercise, functions: Mapping[str, UserFunction], *, seed: int, limit_s: float, folder: Path
) -> None:
    """Run the checks as one of the ranks, and write each that all ranks have finished."""
    import torch
    import torch.distributed as dist

    from stretto.engine.parallel.control import gather_json, this_rank

    if exercise.module.RANKS > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(seed)
    with (folder / f"rank{this_rank()}").open("w", encoding="utf-8") as stack:
        try:
            faulthandler.dump_traceback_later(limit_s, file=stack)
            reader = {name: function.load() for name, function in functions.items()}
            for subject, problem in exercise.module.checks(reader, Random(seed)):
                problems: list[str | None] = gather_json(problem)
                wrong = {rank: each for rank, each in enumerate(problems) if each is not None}
                text = None
                if wrong:
                    everywhere = len(wrong) == len(problems) and len({*wrong.values()}) == 1
                    text = problem if everywhere else "; ".join(f"rank {r}: {p}" for r, p in wrong.items())
                if this_rank() == 0:
                    with (folder / "checks").open("a", encoding="utf-8") as finished:
                        finished.write(json.dumps([subject, text]) + "\n")
                if wrong:
                    return
                faulthandler.dump_traceback_later(limit_s, file=stack)
        except StrettoError:
            raise
        except Exception as error:
            raise _failure(next(iter(functions.values())), error) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        dist.destroy_process_group()


def _failure(function: UserFunction, error: Exception) -> StrettoError:
    """Describe an exception by the reader's line."""
    if isinstance(error, NotImplementedError):
        place = function.failure(error).message.partition(":")[0]
        return StrettoError(f"{place} is not written yet", hint="replace it by your code")
    if not any(frame.filename == str(function.path) for frame in extract_tb(error.__traceback__)):
        return StrettoError(
            f"{type(error).__name__}: {error}",
            hint="raised outside your file, because of what your code has returned or left behind, or "
            "because ranks made different calls or sent different sizes",
        )
    return function.failure(error)
