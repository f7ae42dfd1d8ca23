"""Local ranks: results in order, the cause of a failure first, and no process left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from stretto.engine.checkpoint.metadata import record_schema
from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import clusters
from stretto.run.config.section import config_fields
from stretto.run.launch import local
from stretto.run.launch.local import RankFailed, run_ranks

LIMIT_S = 10.0  # from the death of a rank to the end of the job


def who(word: str) -> tuple[int, str, dict[str, str]]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    return os.getpid(), word, {name: os.environ[name] for name in names}


def test_results_come_in_rank_order_from_processes_of_their_own(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    results = run_ranks(3, who, "hello", threads=2)
    assert len({pid for pid, _, _ in results} | {os.getpid()}) == 4
    assert [word for _, word, _ in results] == ["hello"] * 3
    for rank, (_, _, environment) in enumerate(results):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == "2"


def test_what_ranks_share_with_their_server_is_frozen() -> None:
    """The server passes over a module that it does not find, so each must be there."""
    assert [name for name in local.PRELOAD if find_spec(name) is None] == []
    (frozen,) = run_ranks(1, gc.get_freeze_count)
    assert frozen > 100_000


def cached() -> list[int]:
    return [function.cache_info().currsize for function in (clusters, config_fields, record_schema)]


def test_ranks_find_tables_that_their_server_has_built() -> None:
    assert 0 not in run_ranks(1, cached)[0]


def gathered() -> list[int]:
    ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    ranks[dist.get_rank()] = dist.get_rank() + 1
    dist.all_reduce(ranks)
    return ranks.tolist()


def test_ranks_find_each_other():
    assert on_ranks(3, gathered) == [[1, 2, 3]] * 3


def pid_of(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))


def raises_on_one(folder: str) -> None:
    """Rank 1 raises; the others wait for it in a collective that it never joins."""
    pid_of(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        raise KeyError("the one that matters")
    dist.all_reduce(torch.zeros(1))


def dies_on_one(folder: str) -> None:
    pid_of(folder)
    dist.barrier()
    if dist.get_rank() == 2:
        Path(folder, "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))
    time.sleep(600)


def waits_without_talking(folder: str) -> None:
    """The other ranks cannot notice by themselves: they are in no collective."""
    pid_of(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def assert_all_gone(folder: Path) -> None:
    for path in folder.glob("[0-9]*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_the_rank_that_failed_first_is_named_with_its_traceback(tmp_path):
    with pytest.raises(RankFailed) as error:
        on_ranks(3, raises_on_one, str(tmp_path))
    assert error.value.rank == 1
    assert "raises_on_one" in error.value.traceback
    assert 'raise KeyError("the one that matters")' in error.value.traceback
    assert str(error.value).startswith("rank 1 failed")
    assert "KeyError: 'the one that matters'" in str(error.value)
    assert_all_gone(tmp_path)


@pytest.mark.parametrize(("function", "rank"), [(dies_on_one, 2), (waits_without_talking, 0)])
def test_a_killed_rank_is_named_and_the_others_end(tmp_path, function, rank):
    with pytest.raises(RankFailed) as error:
        on_ranks(3, function, str(tmp_path))
    assert time.time() - float((tmp_path / "died").read_text()) < LIMIT_S
    assert error.value.rank == rank
    assert str(error.value).startswith(f"rank {rank} failed")
    assert "SIGKILL" in str(error.value)
    assert_all_gone(tmp_path)


@pytest.fixture
def _another_server(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """A server that the test may kill: the one of all tests would import for seconds again."""
    server: Any = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    monkeypatch.setattr(local, "PRELOAD", local.PRELOAD[:5])
    yield
    server._stop()


def kills_the_server(folder: str) -> None:
    pid_of(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc, and no waitid")
@pytest.mark.usefixtures("_another_server")
def test_a_server_that_is_killed_is_named_and_not_a_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as error:
        on_ranks(2, kills_the_server, str(tmp_path))
    message = "the server that ranks are forked from was killed by SIGKILL"
    assert (error.value.failure.kind, str(error.value)) == ("server", message)
    assert "memory runs out" in (error.value.failure.hint or "")
    ranks = [Path("/proc", path.read_text()) for path in tmp_path.glob("[0-9]*")]
    end = time.monotonic() + LIMIT_S
    while any(map(runs, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [*map(runs, ranks)] == [False, False]


KILLED_EARLY = """
from stretto.cli.output import failures_reported
from stretto.run.launch.local import prepare, run_ranks
prepare(["ends_its_process"])
with failures_reported():
    run_ranks(2, print)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no waitid")
def test_a_server_that_is_killed_while_it_imports_is_named(tmp_path: Path) -> None:
    # not at once: a server that has ended before ranks are asked of it is started again
    end = "import os, time\ntime.sleep(1)\nos.kill(os.getpid(), 9)\n"
    (tmp_path / "ends_its_process.py").write_text(end)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    launcher = [sys.executable, "-c", KILLED_EARLY]
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=60, check=False)
    message = "error: the server that ranks are forked from was killed by SIGKILL; the job was ended"
    assert message in done.stderr.splitlines()


def bad_input() -> None:
    raise StrettoError("sequence is 0", hint="at least 1")


def test_what_a_user_got_wrong_stays_a_users_error():
    with pytest.raises(StrettoError) as error:
        run_ranks(2, bad_input)
    assert (error.value.message, error.value.hint) == ("sequence is 0", "at least 1")


def leaves() -> None:
    os._exit(7)


def test_a_rank_that_leaves_without_a_word_has_failed():
    with pytest.raises(RankFailed, match=r"exit code 7"):
        run_ranks(1, leaves)


LAUNCHER = """
import time
from multiprocessing import forkserver
from stretto.run.launch.local import prepare
prepare(["takes_long"])
print(forkserver._forkserver._forkserver_pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends when its imports are done")
def test_the_fork_server_ends_with_its_launcher_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    server = Path("/proc", launcher.stdout.readline().strip())
    assert server.exists()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    end = time.monotonic() + 20
    with suppress(OSError):  # it is gone
        while "\nState:\tZ" not in (server / "status").read_text():
            assert time.monotonic() < end, "the server is still there"
            time.sleep(0.02)
