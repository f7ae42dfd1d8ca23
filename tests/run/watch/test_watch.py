"""Who hangs, from what is seen of the ranks; limits from their steps; rows; the watch over real ranks."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main
from stretto.engine.pipeline.words import in_words
from stretto.engine.progress import PROGRESS, SIZE, ProgressMarks, RankMarks, label, read_row
from stretto.program.action import Action, ActionKind
from stretto.run.diagnose.dump import RankDump, RecordedCall, RecordedGroup
from stretto.run.diagnose.hang import diagnose
from stretto.run.launch.failure import Failure
from stretto.run.launch.local import RankFailed, run_ranks
from stretto.run.watch.board import StatusBoard
from stretto.run.watch.hang import HANG, RankStatus, aborted, crash_stack, judge, main_stack, process_state
from stretto.run.watch.limit import MIN_LIMIT_S, WARM_UP, StepLimit, percentile_99
from stretto.run.watch.local import Watch, watching
from stretto.run.watch.record import record_environment
from texts import open_tokens
from tiny_job import job
from train_runs import at_step, hooked

ROW = RankMarks(
    marks=5, marked_ns=0, alive_ns=0, process=1, step=3, limit=10.0, waits=True, text="F", host="here"
)


def seen(
    rank: int, *, seconds: float = 11.0, silent_s: float = 0.0, state: str = "S", **row: Any
) -> RankStatus:
    return RankStatus(rank=rank, row=replace(ROW, **row), seconds=seconds, silent_s=silent_s, state=state)


def among(*ranks: RankStatus) -> dict[int, RankStatus]:
    return {status.rank: status for status in ranks}


# ---------------------------------------------------------------------- rows and limits


def test_a_row_says_what_was_marked() -> None:
    progress, row = ProgressMarks(), memoryview(bytearray(SIZE))
    assert read_row(row).marks == 0
    progress.attach(row, 77, "machine")
    assert (read_row(row).process, read_row(row).host, read_row(row).limit) == (77, "machine", inf)
    progress.limit(9.0, 600.0, 4)
    progress.mark(label("recv F of microbatch 3 from stage 1"))
    before = read_row(row)
    assert (before.marks, before.step, before.limit, before.waits) == (1, 4, 9.0, False)
    assert before.text == "recv F of microbatch 3 from stage 1"
    began = progress.begin_wait()
    assert read_row(row).waits
    progress.end_wait(began)
    assert not read_row(row).waits
    with progress.long("evaluation"):
        assert (read_row(row).limit, read_row(row).text) == (600.0, "evaluation")
        with progress.long("saving"):
            pass
        assert read_row(row).limit == 600.0
    assert (read_row(row).limit, read_row(row).marks) == (9.0, 5)
    assert len(label("é" * 500)) == len(label(""))
    progress.mark(label("é" * 500))  # cut within a character
    assert read_row(row).text.startswith("éé")


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (Action(2, ActionKind.RECV_F, 3), "recv F of microbatch 3 from stage 1"),
        (Action(2, ActionKind.SEND_F, 11), "send F of microbatch 3 to stage 3"),
        (Action(2, ActionKind.RECV_B, 0), "recv B of microbatch 0 from stage 3"),
        (Action(2, ActionKind.SEND_B, 0), "send B of microbatch 0 to stage 1"),
        (Action(2, ActionKind.W, 1), "W of microbatch 1 on stage 2"),
        (Action(2, ActionKind.UPDATE), "optimizer step of stage 2"),
        (Action(0, ActionKind.REDUCE_GRAD), "reduction of the gradients of stage 0"),
    ],
)
def test_actions_in_words(action: Action, sentence: str) -> None:
    assert in_words(action, 8) == sentence


def test_every_kind_of_action_has_words() -> None:
    assert len({in_words(Action(1, kind, 2), 8) for kind in ActionKind}) == len(ActionKind)


def test_the_limit_follows_the_steps() -> None:
    limit = StepLimit(None, 600.0)
    for _ in range(WARM_UP):
        assert limit.seconds == 610.0
        limit.add(300.0)  # which compile
    limit.add(0.1)
    assert limit.seconds == MIN_LIMIT_S
    limit.add(20.0)
    assert limit.seconds == 60.0
    for _ in range(300):
        limit.add(5.0)
    assert limit.seconds == 15.0  # the 20 s are beyond the 99th percentile by now
    fixed = StepLimit(2.0, 600.0)
    for _ in range(WARM_UP + 1):
        fixed.add(50.0)
    assert fixed.seconds == 2.0
    assert percentile_99(deque(range(1, 101))) == 99


# ---------------------------------------------------------------------- the judgement


def test_who_hangs() -> None:
    waiting = seen(0)
    assert judge(among(waiting, seen(1, state="T", seconds=1.0)), None).culprits == (1,)
    verdict = judge(among(waiting, seen(1, silent_s=9.0, waits=False)), None)
    assert verdict.culprits == (1,)
    assert "GIL" in verdict.reason
    assert judge(among(waiting, seen(1, waits=False)), None).culprits == (1,)
    assert judge(among(waiting, seen(1, seconds=12.0)), None).culprits == (1,)
    assert judge(among(seen(0, state="T"), seen(1), seen(2, state="T")), None).culprits == (0, 2)


class Processes:
    """A watch over rows that a test writes, with a clock that a test moves."""

    def __init__(self, folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.board, self.now, self.state = StatusBoard(ranks, folder), 100.0, dict[int, str]()
        monkeypatch.setattr("stretto.run.watch.local.time.monotonic", lambda: self.now)
        monkeypatch.setattr("stretto.run.watch.local.time.sleep", self.sleep)
        monkeypatch.setattr(
            "stretto.run.watch.local.process_state", lambda process_id: self.state.get(process_id, "S")
        )
        monkeypatch.setattr("stretto.run.watch.local.os.kill", lambda *_: None)
        self.watch = Watch(self.board)
        self.ranks = [ProgressMarks() for _ in range(ranks)]
        for rank, progress in enumerate(self.ranks):
            progress.attach(self.board.memory(rank), rank, "here")
            progress.limit(10.0, 100.0, 1)
            progress.mark(label("work"))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self, seconds: float, *working: int, every: float = 0.5) -> Any:
        """Look for so long, while some ranks make progress; the failure, if one was found."""
        end = self.now + seconds
        while self.now < end:
            self.now += every
            for rank, progress in enumerate(self.ranks):
                progress.alive(rank)
                if rank in working:
                    progress.mark(label("work"))
            found = self.watch.look({rank: rank for rank in range(len(self.ranks))}, {})
            if found is not None:
                return found
        return None


def test_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Processes(tmp_path, 2, monkeypatch)
    assert ranks.look(60, 0, 1) is None
    found = ranks.look(12, 0)
    assert (found.rank, found.kind) == (1, "hung")
    assert "no progress for 10." in found.message
    report = json.loads((tmp_path / "hang.json").read_text())
    assert (report["culprits"], [rank_call["rank"] for rank_call in report["ranks"]]) == ([1], [0, 1])


def test_records_are_asked_for_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Processes(tmp_path, 2, monkeypatch)
    ranks.look(7)
    assert ranks.board.requests == 0
    ranks.look(2)
    assert ranks.board.requests == 1
    for rank in range(2):
        (tmp_path / f"rank_{rank}.json").write_text("{}")
        (tmp_path / f"rank_{rank}.stack").write_text("a stack")
    began = ranks.now
    assert ranks.look(10).kind == "hung"
    assert ranks.board.requests == 1
    assert ranks.now - began <= 2, "nothing was waited for"


def test_what_was_asked_for_in_vain_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Processes(tmp_path, 2, monkeypatch)
    ranks.look(9)
    (tmp_path / "rank_0.json").write_text("{}")
    assert ranks.look(0.5, 0, 1) is None
    assert not list(tmp_path.iterdir())
    ranks.look(9)
    assert ranks.board.requests == 2
    assert ranks.look(3, 0).kind == "hung"
    assert ranks.board.requests == 3, "a rank has gone on since"


def test_ranks_can_be_asked_for_ever(tmp_path: Path) -> None:
    board = StatusBoard(1, tmp_path)
    for _ in range(600):
        before = board.requests
        board.ask()
        assert board.requests != before


def test_ranks_that_wait_for_a_save_do_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Processes(tmp_path, 2, monkeypatch)
    ranks.ranks[0].begin_long()
    ranks.ranks[1].begin_wait()
    monkeypatch.setattr("stretto.run.watch.local.judge", lambda *_: judge_says((0,)))
    assert ranks.look(80) is None
    found = ranks.look(400)
    assert found.rank == 0  # longer than that may take


def judge_says(culprits: tuple[int, ...]) -> Any:
    from stretto.run.watch.hang import HangVerdict

    return HangVerdict(culprits=culprits, reason="planted")


def test_time_in_which_nobody_looks_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Processes(tmp_path, 1, monkeypatch)
    assert ranks.look(0.5, 0) is None
    assert ranks.look(500, every=500.0) is None  # the machine slept
    assert ranks.look(11).rank == 0


def test_a_rank_under_a_debugger_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Processes(tmp_path, 1, monkeypatch)
    ranks.state[0] = "t"
    assert ranks.look(50) is None
    ranks.state[0] = "S"
    assert ranks.look(1).rank == 0


def test_states_and_stacks() -> None:
    assert process_state(os.getpid()) in ("R", "S", "D")
    assert process_state(2**30) == ""
    text = (
        "Thread 0x1 (most recent call first):\n  File a\n\nCurrent thread 0x2 (most recent call first):\n  b"
    )
    assert main_stack(text).startswith("Current thread 0x2")


CRASH = """Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "/a/threading.py", line 1 in wait

Thread 0x2 (most recent call first):
  File "/s/run/watch/rank.py", line 29 in counted
  File "/s/collectives.py", line 72 in all_sum
  File "/s/batches.py", line 174 in _count

Extension modules: numpy, torch
"""


def test_of_a_rank_that_gloo_has_ended_the_stack_is_told(tmp_path: Path) -> None:
    stack = crash_stack(CRASH)
    assert stack.startswith("Thread 0x2")
    assert stack.endswith("line 174 in _count")
    dead = replace(Failure.died(1, -signal.SIGABRT), traceback=stack)
    alive = CRASH.partition("\n\nExtension")[0].replace("batches", "loop")
    (tmp_path / "rank_0.stack").write_text(alive)
    message = aborted(dead, among(seen(0), seen(1)), None, tmp_path).message
    assert message.splitlines()[1:] == [
        "  rank 1 on here: step 3: F, waiting for others, at collectives.py:72 in all_sum, "
        "from batches.py:174 in _count",
        "  rank 0 on here: step 3: F, waiting for others, at collectives.py:72 in all_sum, "
        "from loop.py:174 in _count",
    ]


def test_of_two_calls_that_differ_neither_is_the_odd_one() -> None:
    group = RecordedGroup("0", "default_pg", (0, 1))
    calls = [
        RecordedCall(
            rank=rank, group=group, operation=name, number=28, record=1, input_sizes=((12,),), started=True
        )
        for rank, name in enumerate(("all_gather", "all_reduce"))
    ]
    dumps = [
        RankDump(
            rank=rank_call.rank, path=Path(), version="2.10", calls=(rank_call,), groups={}, complete=True
        )
        for rank_call in calls
    ]
    both = among(seen(0), seen(1))
    verdict = judge(both, diagnose(dumps, 2))
    assert verdict.culprits == (0, 1)
    assert "calls #28 of default_pg differ in operation" in verdict.reason
    assert verdict.reason.endswith("rank 0 all_gather [12]; rank 1 all_reduce [12]")
    busy = judge(among(seen(0), seen(1, waits=False)), diagnose(dumps, 2))
    assert "differ" not in busy.reason, "a rank that waits for no other hangs by itself"


def test_ranks_that_wait_for_each_other_are_all_named() -> None:
    group = RecordedGroup("0", "pipeline", (0, 1))
    calls = [
        RecordedCall(
            rank=rank, group=group, operation="recv", number=1, record=1, message=True, peer=1 - rank
        )
        for rank in range(2)
    ]
    dumps = [
        RankDump(
            rank=rank_call.rank, path=Path(), version="2.10", calls=(rank_call,), groups={}, complete=True
        )
        for rank_call in calls
    ]
    verdict = judge(among(seen(0), seen(1)), diagnose(dumps, 2))
    assert (verdict.culprits, verdict.reason[:25]) == ((0, 1), "they wait for each other,")


def test_the_flight_recorder_is_switched_on_unless_the_environment_says_otherwise(tmp_path: Path) -> None:
    here = dict[str, str]()
    record_environment(tmp_path, here)
    assert here == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl/rank_",
    }
    mine = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x", **here}
    del mine["TORCH_FR_BUFFER_SIZE"], mine["TORCH_FR_DUMP_TEMP_FILE"]
    before = dict(mine)
    record_environment(tmp_path, mine)
    assert mine == before


# ---------------------------------------------------------------------- real ranks


def hold_the_lock(_: Any) -> None:
    ctypes.PyDLL(None).sleep(1000)


def stop_myself(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("act", "rank", "layout", "says"),
    [
        (stop_myself, 0, "layout.dp=2", "stopped by a signal"),
        (hold_the_lock, 1, "layout.pp=2", "interpreter's lock"),
    ],
)
def test_a_rank_that_cannot_answer_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    act: Callable[[Any], None],
    rank: int,
    layout: str,
    says: str,
) -> None:
    config = job(tmp_path, layout, "train.hang_s=2")

    source = open_tokens(config)
    hooks = [at_step(4, rank, act)]
    with watching(2, config.run.folder, config.train.hang_s) as (first, look, _):  # noqa: SIM117
        with pytest.raises(RankFailed) as caught:
            run_ranks(2, *first, hooked, hooks, config, source, stoppable=True, look=look)
    failure = caught.value.failure
    assert (failure.rank, failure.kind) == (rank, "hung")
    first_line, *others = failure.message.splitlines()
    assert "step 4" in first_line
    assert says in first_line
    assert f"for rank {rank})" in others[1]  # the other waits for it
    assert act.__name__ in failure.traceback
    assert main.run(["diagnose", str(config.run.folder / HANG)]) == 1
    shown = capsys.readouterr().out
    assert f"ranks that hung: {rank}; " in shown
    assert f"rank {rank} on " in shown
    assert f"stacks in rank_{rank}.stack" in shown
    (config.run.folder / HANG / "hang.json").write_text('{"culprits": 3}')
    assert main.run(["diagnose", str(config.run.folder / HANG), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["watch"] == []


def test_marks_of_this_process_go_to_private_memory() -> None:
    PROGRESS.mark(label("a test"))
    assert read_row(PROGRESS.snapshot()).text == "a test"
    assert time.monotonic_ns() - read_row(PROGRESS.snapshot()).marked_ns < 60e9
