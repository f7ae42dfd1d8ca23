"""Hung jobs are explained: real ones on gloo, and NCCL's dumps as torch 2.13 writes them."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import hung_jobs
import pytest

from stretto.cli import main
from stretto.cli.diagnose import lines
from stretto.engine.checkpoint.plain_pickle import read_pickle
from stretto.errors import StrettoError
from stretto.run.diagnose.dump import read_dumps
from stretto.run.diagnose.hang import Diagnosis, diagnose
from stretto.run.launch.local import run_ranks


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps of all hung jobs: by scenario, and in both forms."""
    folder = tmp_path_factory.mktemp("hung")
    run_ranks(4, hung_jobs.hang_all, folder)
    return folder


def found_at(folder: Path) -> Diagnosis:
    return diagnose(read_dumps(folder / "pickle"))


def text(found: Diagnosis) -> str:
    return "\n".join(lines(found))


# ---------------------------------------------------------------------- real hangs


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_rank_that_does_not_come(hung: Path, form: str) -> None:
    found = diagnose(read_dumps(hung / "missing" / form))
    assert found.verdict == "missing"
    assert found.culprits == (2,)
    (missing,) = found.missing
    assert missing.missing == (2,)
    assert set(missing.waiting) == {0, 1, 3}
    assert {(wait.rank, wait.target) for wait in found.waits} == {(0, 2), (1, 2), (3, 2)}
    report = text(found)
    assert "rank 2 is missing in all_reduce #3 of default_pg: ranks 0, 1, 3 wait in it" in report
    assert "rank 2 waits for no other rank; its last call was all_reduce #2 of default_pg" in report
    assert ("at hung_jobs.py:" in report) == (form == "pickle")  # torch writes no code lines as JSON


def test_torchs_pickles_mean_the_same_to_pythons_unpickler(hung: Path) -> None:
    for path in (hung / "missing" / "pickle").iterdir():
        assert read_pickle(path.read_bytes()) == pickle.loads(path.read_bytes())


def test_without_the_dump_of_the_culprit(hung: Path, tmp_path: Path) -> None:
    shutil.copytree(hung / "missing" / "pickle", tmp_path, dirs_exist_ok=True)
    (tmp_path / "dump_2").unlink()
    found = diagnose(read_dumps(tmp_path))
    assert (found.absent, found.culprits, found.world) == ((2,), (2,), 4)
    assert "no dump of rank 2" in text(found)
    (tmp_path / "dump_3").unlink()
    assert diagnose(read_dumps(tmp_path)).culprits == (2, 3)  # of whom the default group speaks
    found = diagnose(read_dumps(tmp_path), world=6)
    assert found.absent == (2, 3, 4, 5)


def test_a_chain_of_waits_ends_at_the_culprit(hung: Path) -> None:
    found = found_at(hung / "chain")
    assert found.culprits == (3,)
    assert [(wait.rank, wait.target) for wait in found.chain(0)] == [(0, 1), (1, 2), (2, 3)]
    report = text(found)
    assert (
        "rank 0 waits for rank 1 (all_reduce of pair0), which waits for rank 2 (all_reduce of pair1), which "
        "waits for rank 3 (all_reduce of pair2)"
    ) in report
    assert "rank 3 is missing in all_reduce #2 of pair2: rank 2 waits in it" in report


def test_calls_that_differ(hung: Path) -> None:
    found = found_at(hung / "operation")
    assert found.verdict == "mismatch"
    (mismatch,) = found.mismatches
    assert (mismatch.odd, mismatch.about, mismatch.slip, mismatch.number) == ((1,), "operation", 1, 2)
    report = text(found)
    assert "ranks differ in the operation of call #2 of default_pg; rank 1 against the others:" in report
    assert "as if rank 1 had left out one call" in report


def test_a_circle(hung: Path) -> None:
    found = found_at(hung / "order")
    assert found.verdict == "circle"
    assert found.circle == (0, 1, 0)
    assert "ranks 0 -> 1 -> 0 wait for each other in a circle" in text(found)


def test_a_job_that_does_not_hang(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_at(hung / "healthy")
    assert (found.verdict, found.waits, found.missing, found.mismatches) == ("fine", (), (), ())
    assert main.run(["diagnose", str(hung / "healthy" / "pickle")]) == 0
    assert "nothing is stuck" in capsys.readouterr().out


# ---------------------------------------------------------------------- NCCL, after FlightRecorderDetail.hpp


class Rank:
    """The dump of one rank as NCCL's process group writes it: format 2.10, torch 2.13."""

    def __init__(self, rank: int, groups: dict[str, tuple[str, list[int]]], first: int = 0) -> None:
        self.rank, self.groups, self.first = rank, groups, first
        self.status = dict[str, dict[str, int]]()
        self.entries = list[dict[str, Any]]()
        self.numbers = dict[tuple[str, bool], int]()

    def call(self, group: str, name: str, state: str = "completed", **fields: Any) -> Rank:
        single = fields.pop("single", name.startswith(("send", "recv")))
        number = fields.pop("number", None)
        if number is None:
            number = self.numbers[group, single] = self.numbers.get((group, single), 0) + 1
        size, kind = fields.pop("size", [8]), fields.pop("kind", "Float")
        entry = {
            "frames": [
                {"name": "wait", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 1},
                {"name": "step", "filename": "/home/me/train.py", "line": 7 + len(self.entries)},
            ],
            "record_id": self.first + len(self.entries),
            "pg_id": 0,
            "process_group": (group, self.groups[group][0]),
            "collective_seq_id": 0 if single else number,
            "p2p_seq_id": number if single else 0,
            "op_id": len(self.entries),
            "profiling_name": f"nccl:{name}",
            "time_created_ns": 10**18 + 10**9 * len(self.entries),
            "input_sizes": [] if name.startswith("recv") else [size],
            "input_dtypes": [] if name.startswith("recv") else [kind],
            "output_sizes": [] if name.startswith("send") else [size],
            "output_dtypes": [] if name.startswith("send") else [kind],
            "state": state,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": state == "completed",
            "timeout_ms": 600000,
            "is_p2p": single,
        }
        self.entries.append({**entry, **fields})
        return self

    def dumped(self) -> dict[str, Any]:
        mine = {name: each for name, each in self.groups.items() if self.rank in each[1]}
        return {
            "version": "2.10",
            "pg_config": {
                name: {"name": name, "desc": about, "ranks": str(ranks)}
                for name, (about, ranks) in mine.items()
            },
            "pg_status": self.status,
            "entries": self.entries,
        }

    def write(self, folder: Path) -> None:
        (folder / f"nccl_trace_rank_{self.rank}").write_bytes(pickle.dumps(self.dumped(), 2))


def job(groups: dict[str, tuple[str, list[int]]], world: int) -> list[Rank]:
    return [Rank(rank, groups) for rank in range(world)]


def found_in(ranks: list[Rank], folder: Path) -> Diagnosis:
    for rank in ranks:
        rank.write(folder)
    return diagnose(read_dumps(folder))


WORLD = {"0": ("default_pg", [0, 1, 2, 3])}
PIPE = {**WORLD, "5": ("mesh_pp", [0, 1, 2, 3])}


def test_a_pipeline_waits_for_its_last_stage(tmp_path: Path) -> None:
    """Forwards go down; rank 3 hangs in its computation, without a call: all wait through receives."""
    ranks = job(PIPE, 4)
    for rank in ranks:
        rank.call("0", "all_reduce")
    for low in range(3):
        ranks[low].call("5", f"send {low}->{low + 1}")
        ranks[low + 1].call("5", f"recv {low + 1}<-{low}")
    for low in range(3):
        ranks[low].call("5", f"recv {low}<-{low + 1}", "started")
    found = found_in(ranks, tmp_path)
    assert (found.verdict, found.culprits) == ("missing", (3,))
    assert [wait.target for wait in found.chain(0)] == [1, 2, 3]
    report = text(found)
    assert "rank 0 -> rank 1: receive from rank 1 in mesh_pp [8], at train.py:" in report
    assert (
        "rank 3 waits for no other rank; its last call was receive from rank 2 in mesh_pp, at train.py:"
        in report
    )


def test_groups_of_one_name_and_other_ranks_are_others(tmp_path: Path) -> None:
    """Ranks of subgroups are counted within the group; rank 3 is missing in one of the two."""
    ranks = list[Rank]()
    for rank in range(4):
        pair = [0, 2] if rank % 2 == 0 else [1, 3]
        ranks.append(Rank(rank, {**WORLD, "1": ("mesh_dp", pair)}))
        ranks[-1].call("1", "_all_gather_base")
    for rank in (0, 2):
        ranks[rank].call("1", "all_reduce")
    ranks[1].call("1", "all_reduce", "started").call("1", "send 0->1", "scheduled")
    found = found_in(ranks, tmp_path)
    assert found.culprits == (3,)
    assert {(wait.rank, wait.target, wait.call.operation) for wait in found.waits} == {
        (1, 3, "all_reduce"),
        (1, 3, "send"),
    }


def test_coalesced_messages_have_the_state_of_their_bracket(tmp_path: Path) -> None:
    """NCCL keeps `scheduled` for a send in a batch, whether or not it is done."""
    ranks = job(PIPE, 4)
    for rank, name, end in ((0, "send 0->1", "completed"), (1, "recv 1<-0", "completed")):
        ranks[rank].call("5", name, "scheduled", number=1)
        ranks[rank].call("5", "coalesced", end, single=True, number=1, size=[])
    assert found_in(ranks, tmp_path).verdict == "fine"
    ranks[1].call("5", "send 1->2", "scheduled", number=2)
    ranks[1].call("5", "coalesced", "started", single=True, number=2, size=[])
    found = found_in(ranks, tmp_path)
    assert [(wait.rank, wait.target) for wait in found.waits] == [(1, 2)]


@pytest.mark.parametrize(
    ("fields", "about"), [({"size": [4]}, "size"), ({"kind": "BFloat16"}, "type"), ({}, "operation")]
)
def test_arguments_that_differ(tmp_path: Path, fields: dict[str, Any], about: str) -> None:
    ranks = job(WORLD, 4)
    for rank in ranks:
        odd = rank.rank == 1
        name = "_reduce_scatter_base" if odd and about == "operation" else "all_reduce"
        rank.call("0", "all_reduce").call("0", name, "started", **(fields if odd else {}))
    found = found_in(ranks, tmp_path)
    (mismatch,) = found.mismatches
    assert (mismatch.odd, mismatch.about, mismatch.number) == ((1,), about, 2)
    assert f"ranks differ in the {about} of call #2 of default_pg; rank 1 against the others" in text(found)


def test_uneven_exchanges_do_not_differ(tmp_path: Path) -> None:
    ranks = job(WORLD, 4)
    for rank in ranks:
        rank.call("0", "all_to_all", "started" if rank.rank else "completed", size=[rank.rank + 1])
    found = found_in(ranks, tmp_path)
    assert (found.verdict, found.mismatches) == ("stalled", ())
    assert "it has not ended on ranks 1-3: the network or a device is slow or stuck" in text(found)


def test_a_message_of_another_size(tmp_path: Path) -> None:
    ranks = job(PIPE, 4)
    ranks[0].call("5", "send 0->1", "started", size=[4, 4])
    ranks[1].call("5", "recv 1<-0", "started", size=[4, 8])
    (mismatch,) = found_in(ranks, tmp_path).mismatches
    assert (mismatch.odd, mismatch.about) == ((0, 1), "size")


def test_a_device_that_has_not_begun(tmp_path: Path) -> None:
    ranks = job(WORLD, 4)
    for rank in ranks:
        rank.call("0", "all_reduce", "scheduled" if rank.rank == 3 else "started")
    found = found_in(ranks, tmp_path)
    assert found.culprits == (3,)
    assert found.stalled[0].queued == (3,)
    assert "rank 3 has asked for it too, and the device has not begun with it" in text(found)


def test_what_the_recorder_has_overwritten_counts_as_done(tmp_path: Path) -> None:
    """Rank 0's record begins at its 100th call, and its call of the quiet group is gone."""
    groups = {**WORLD, "7": ("quiet", [0, 1])}
    ranks = job(groups, 2)
    ranks[0].first = 100
    ranks[1].call("7", "all_reduce", "completed")
    for rank in ranks:
        rank.call("0", "all_reduce", number=60).call("0", "barrier", "started", number=61)
    ranks[1].call("0", "all_reduce", number=59)
    found = found_in(ranks, tmp_path)
    assert [wait.call.group.about for wait in found.waits] == ["default_pg"] * 4  # of 0 and 1, for 2 and 3
    assert found.absent == found.culprits == (2, 3)


def test_ends_of_messages_that_were_overwritten_are_not_paired(tmp_path: Path) -> None:
    """Rank 0 has forgotten its first receives; the one that is open is not for rank 1's first send."""
    ranks = job(PIPE, 4)
    for _ in range(3):
        ranks[1].call("5", "send 1->0")
    ranks[0].first = 100
    ranks[0].call("5", "recv 0<-1", "started", number=4)
    found = found_in(ranks, tmp_path)
    assert [(wait.rank, wait.target) for wait in found.waits] == [(0, 1)]


def test_a_group_whose_calls_were_overwritten_is_counted_by_torch(tmp_path: Path) -> None:
    """Rank 0 has come to the call that rank 1 is in: its group says so, though the record has lost it."""
    groups = {"0": ("default_pg", [0, 1]), "7": ("quiet", [0, 1])}
    for enqueued, culprits in ((1, ()), (0, (0,))):
        ranks = job(groups, 2)
        ranks[0].first = 100
        ranks[0].status = {"7": {"last_enqueued_collective": enqueued}}
        ranks[1].call("7", "all_reduce", "started")
        for rank in ranks:
            rank.call("0", "all_reduce", number=60)
        assert found_in(ranks, tmp_path).culprits == culprits


# ---------------------------------------------------------------------- the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = job(WORLD, 4)
    for rank in ranks[:3]:
        rank.call("0", "all_reduce", "started")
    found_in(ranks, tmp_path)
    (tmp_path / "notes.txt").write_text("not a dump")
    assert main.run(["diagnose", str(tmp_path), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["verdict"], record["ranks"], record["culprits"], record["absent"]) == (
        "missing",
        4,
        [3],
        [],
    )
    assert record["missing"][0]["missing"] == [3]
    assert record["missing"][0]["waiting"]["0"]["place"] == "train.py:7 in step"
    assert [(wait["rank"], wait["target"]) for wait in record["waits"]] == [(0, 3), (1, 3), (2, 3)]


def test_the_record_of_calls_that_differ_and_that_do_not_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """conftest.py checks the keys of every record against the page of `--json`."""
    ranks = job({**WORLD, "7": ("pair", [0, 1])}, 4)
    for number, rank in enumerate(ranks):
        rank.call("0", "all_reduce", "started", size=[2 + (number == 3)])
    for rank in ranks[:2]:
        rank.call("7", "all_reduce", "started")
    found_in(ranks, tmp_path)
    assert main.run(["diagnose", str(tmp_path), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [mismatch["odd"] for mismatch in record["mismatches"]] == [[3]]
    assert [stalled["open_on"] for stalled in record["stalled"]] == [[0, 1]]


@pytest.mark.parametrize(
    ("files", "error", "hint"),
    [
        ({}, "has no dumps", "end with the rank"),
        ({"dump_0": b"}.", "dump_0.json": b"{}"}, "two dumps of rank 0", "folder of their own"),
        ({"dump_0": b"cos\nsystem\n."}, "dump_0: the pickle is more than plain data: it has GLOBAL", "torch"),
        ({"dump_0": b"N"}, "dump_0: it is no pickle of plain data", "complete"),
        ({"dump_0.json": b"{"}, "dump_0.json: it is no JSON", "complete"),
        ({"dump_0.json": b"[" * 100000}, "dump_0.json: ", "complete"),
        ({"dump_0.json": b'{"a":' + b"[" * 100000}, "dump_0.json: it is no JSON", "complete"),
        ({"dump_0.json": b"{}"}, "has no 'version' and 'entries'", "watchdog"),
        ({"dump_0.json": b'{"version": "2", "entries": 3}'}, "entries is a int", "dump of torch"),
        (
            {"dump_0.json": b'{"version": "2", "entries": [{"record_id": [1]}]}'},
            "entries[0] has a list, must be a whole number",
            "dump of torch",
        ),
        (
            {"dump_0.json": b'{"version": "2", "entries": [{"profiling_name": "nccl:send 0->99999999"}]}'},
            "name rank 99,999,999",
            "dumps of torch",
        ),
    ],
)
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, bytes], error: str, hint: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert main.run(["diagnose", str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert error in first
    assert hint in second


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["diagnose", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
    found_in(job(WORLD, 4), tmp_path)
    assert main.run(["diagnose", str(tmp_path), "--ranks", "2"]) == 2
    assert "nearest is --ranks 4" in capsys.readouterr().err
    (tmp_path / "dump_9.json").write_text('{"version": "2", "entries": [{"input_sizes": [[true]]}]}')
    with pytest.raises(StrettoError, match="must be a whole number"):
        read_dumps(tmp_path)
