"""Which network interfaces a job's ranks listen on, and the key that its control messages are signed with.

torch's process groups authenticate nobody and encrypt nothing (SECURITY.md of PyTorch), so what keeps
strangers out is that nothing listens where they are. On one machine that is the loopback interface; on
several it is the interface that the environment names.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection, Mapping, MutableMapping
from ipaddress import ip_address

from stretto.engine.parallel.signed import KEY
from stretto.errors import StrettoError, nearest

INTERFACE = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def loopback() -> str:
    """The name of this machine's loopback interface."""
    return "lo" if "lo" in interfaces() else "lo0"


def loopback_listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens on the loopback interface alone; None: `host` is not an address of it.

    Args:
        host: 127.0.0.1, localhost, ::1 or another such address. Names of hosts are not looked up: many
            systems give their own name a loopback address that others could not reach.

    Raises:
        OSError, OverflowError: the port cannot be used.
    """
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    if not address.is_loopback:
        return None
    listener = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(address), port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def interfaces() -> list[str]:
    """All of this machine."""
    return [name for _, name in socket.if_nameindex()]


def on_one_machine(environment: Mapping[str, str]) -> bool:
    """Whether all ranks that torchrun has started are on this machine."""
    world = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", world) == world


def bind_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Bind ranks of a job on one machine to its loopback interface, where the environment names no other."""
    if on_one_machine(environment):
        for name in INTERFACE.values():
            environment.setdefault(name, loopback())


def local_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What ranks that this machine starts for itself need: the loopback interface, and a new key."""
    return {
        **{name: environment.get(name, loopback()) for name in INTERFACE.values()},
        KEY: secrets.token_hex(32),
    }


def check_interfaces(
    environment: Mapping[str, str] = os.environ, known: Collection[str] | None = None
) -> None:
    """Raise StrettoError where the environment names an interface that this machine does not have.

    Args:
        known: names of interfaces; None: this machine's.
    """
    known = interfaces() if known is None else known
    for name in INTERFACE.values():
        value = environment.get(name, "")
        if not value or value[0] in "^=" or name == "NCCL_SOCKET_IFNAME":
            continue  # NCCL takes prefixes, and lists of what not to take, and says itself what it found
        for one in value.split(","):
            if one not in known:
                near = nearest(one, known)
                raise StrettoError(
                    f"{name} is {one}, and this machine has no such network interface",
                    hint=f"did you mean {near}?" if near else f"it has {', '.join(known)}",
                )


def describe(environment: Mapping[str, str], backend: str) -> str:
    """The interfaces that a job listens on, in a line for people.

    Args:
        backend: gloo, nccl, or another.
    """
    name = INTERFACE.get(backend)
    interface = None if name is None else environment.get(name)
    if on_one_machine(environment):
        where = interface or ("the loopback interface" if name else "what its library chooses")
        return f"network: one machine; {backend} listens on {where}"
    at = f"rendezvous at {environment.get('MASTER_ADDR', '?')}:{environment.get('MASTER_PORT', '?')}"
    signed = "signed" if environment.get(KEY) else f"not signed, for {KEY} is not set"
    where = interface or f"the interface of this host's name (set {name or 'an interface'} to choose it)"
    return f"network: {at}; {backend} listens on {where}; control messages are {signed}"
