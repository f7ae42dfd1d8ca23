"""A job on one machine listens on its loopback interface only; control messages are signed."""

from __future__ import annotations

import os
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from ranks import on_ranks
from stretto.engine.parallel import control
from stretto.engine.parallel.control import CollectiveError, gather_json, this_rank
from stretto.engine.parallel.signed import KEY, is_genuine, signature
from stretto.errors import StrettoError
from stretto.run.config.check import check
from stretto.run.launch import rendezvous
from stretto.run.launch.network import (
    bind_to_loopback,
    check_interfaces,
    describe,
    local_environment,
    loopback,
    loopback_listener,
)
from stretto.run.launch.registration import RANK_0
from tiny_job import job
from train_runs import at_step, train

_LISTEN = "0A"
INSIDE = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listening(pids: list[int]) -> set[str]:
    """The addresses, as /proc/net has them, on which these processes listen."""
    inodes = set[str]()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set[str]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp", "/proc/net/udp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == _LISTEN or "udp" in table):
                found.add(fields[1].split(":")[0])
    return found


def keep_listening(trainer: Any, path: str) -> None:
    """Note where this rank and its parent, the launcher's server, listen in the middle of a step loop."""
    found = listening([os.getpid()])
    Path(path, str(this_rank())).write_text(" ".join(sorted(found)))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets")
def test_no_port_listens_beyond_the_loopback_interface(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    found = list[str]()
    from stretto.run.launch import local

    inner = local._RankGroup.watch

    def watch(self: Any) -> None:
        found.append(" ".join(listening([os.getpid()])))
        inner(self)

    monkeypatch.setattr(local._RankGroup, "watch", watch)
    train(job(tmp_path, "layout.dp=2", "train.steps=2"), at_step(2, None, keep_listening, str(tmp_path)))
    ranks = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    addresses = {address for text in [*found, *ranks] for address in text.split()}
    assert all(ranks)
    assert found[0]
    assert addresses <= INSIDE


def store_by_hand(host: str) -> tuple[set[str], str]:
    """Where a rank listens that was started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT by hand, and
    what another process reads there.
    """
    listener = loopback_listener(host, 0)
    assert listener is not None
    port = listener.getsockname()[1]
    listener.close()
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    attempt = rendezvous.attempt_store(20, timedelta(seconds=20))
    attempt.ended.set()
    before = listening([os.getpid()])
    client = TCPStore(host, port, timeout=timedelta(seconds=20), wait_for_workers=False)
    return before, client.get(RANK_0).decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets")
def test_a_store_of_ranks_started_by_hand_stays_inside_too(host: str) -> None:
    ((addresses, first),) = on_ranks(1, store_by_hand, host)
    assert '"rank": 0' in first
    assert addresses
    assert addresses <= INSIDE


@pytest.mark.parametrize("host", ["node-1", "10.0.0.1", "fe80::1", "", "127.0.0.1.example"])
def test_other_addresses_are_reached_from_elsewhere(host: str) -> None:
    assert loopback_listener(host, 0) is None


def key_and_interface() -> tuple[str | None, str | None]:
    return os.environ.get(KEY), os.environ.get("GLOO_SOCKET_IFNAME")


def test_each_job_has_a_key_of_its_own() -> None:
    first, second = on_ranks(2, key_and_interface), on_ranks(1, key_and_interface)
    assert first[0] == first[1]
    assert first[0][0] is not None
    assert len(first[0][0]) == 64
    assert first[0][0] != second[0][0]
    assert first[0][1] == loopback()


def with_another_key() -> str:
    if dist.get_rank() == 1:
        os.environ[KEY] = "0" * 64
    return _failure()


def replayed() -> str:
    """Rank 1 sends again what it has sent before."""
    gather_json("first")
    if dist.get_rank() == 1:
        control._numbers["last"] -= 1
    return _failure()


def too_long() -> str:
    control.LONGEST_MESSAGE = 100
    return _failure("x" * 200 * dist.get_rank())


def _failure(value: str = "x") -> str:
    try:
        return str(gather_json(value))
    except CollectiveError as error:
        return str(error)


def test_a_message_without_the_key_is_refused() -> None:
    first, second = on_ranks(2, with_another_key)
    assert first == "message 1 of rank 1 is not signed with this job's key"
    assert second == "message 1 of rank 0 is not signed with this job's key"


def test_a_message_that_comes_again_is_refused() -> None:
    assert on_ranks(2, replayed)[0] == "message 2 of rank 1 is not signed with this job's key"


def test_a_message_that_is_too_long_is_refused_before_memory_is_taken() -> None:
    for says in on_ranks(2, too_long):
        assert says == "rank 1 announces a message of 234 bytes, 100 at most"


def test_a_signature_is_of_rank_number_and_every_byte() -> None:
    body = b'{"a": 1}'
    signed = signature(b"key", 3, 7, body) + body
    assert is_genuine(b"key", 3, 7, signed)
    assert not is_genuine(b"key", 2, 7, signed)
    assert not is_genuine(b"key", 3, 8, signed)
    assert not is_genuine(b"other", 3, 7, signed)
    for at in range(len(signed)):
        changed = bytearray(signed)
        changed[at] ^= 1
        assert not is_genuine(b"key", 3, 7, bytes(changed))


def test_interfaces_that_are_not_there_are_named() -> None:
    with pytest.raises(StrettoError, match=r"GLOO_SOCKET_IFNAME is eht0(.|\n)*did you mean eth0"):
        check_interfaces({"GLOO_SOCKET_IFNAME": "eht0"}, ["lo", "eth0"])
    check_interfaces({"GLOO_SOCKET_IFNAME": "eth0,lo", "NCCL_SOCKET_IFNAME": "^docker"}, ["lo", "eth0"])


def test_one_machine_of_torchrun_stays_inside_and_several_do_not() -> None:
    inside = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    bind_to_loopback(inside)
    assert inside["GLOO_SOCKET_IFNAME"] == loopback()
    outside = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": "29400"}
    bind_to_loopback(outside)
    assert "GLOO_SOCKET_IFNAME" not in outside
    says = describe(outside, "gloo")
    assert says.startswith("network: rendezvous at host1:29400; gloo listens on the interface of this host's")
    assert says.endswith(f"not signed, for {KEY} is not set")
    named = {**outside, "GLOO_SOCKET_IFNAME": "eth1", KEY: "1"}
    says = "network: rendezvous at host1:29400; gloo listens on eth1; control messages are signed"
    assert describe(named, "gloo") == says
    assert local_environment({"GLOO_SOCKET_IFNAME": "eth1"})["GLOO_SOCKET_IFNAME"] == "eth1"
    assert describe(local_environment({}), "gloo") == f"network: one machine; gloo listens on {loopback()}"


def test_a_private_run_is_its_owners_only(tmp_path: Path) -> None:
    config = job(tmp_path, "run.private=true", "train.steps=1")
    train(config)
    assert stat.S_IMODE(config.run.folder.stat().st_mode) == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StrettoError, match="everyone may write to"):
        check(job(tmp_path, "run.private=true", f"run.dir={shared}"))
