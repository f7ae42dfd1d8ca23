"""The network interfaces that a job's ranks listen on, and the key that signs its control messages.

torch's process groups authenticate nobody and encrypt nothing (SECURITY.md of PyTorch), so strangers are kept
out by listening only where they cannot connect: on one machine on the loopback interface, on several machines
on the interface that the environment names.
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
    """Return the name of this machine's loopback interface."""
    return "lo" if "lo" in interfaces() else "lo0"


def loopback_listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the loopback interface alone, or None if `host` is no address of it.

    Args:
        host: 127.0.0.1, localhost, ::1 or another loopback address. Host names are not looked up: many
            systems give their own name a loopback address that others could not reach.
        port: port to listen on; 0 takes a free one.

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
    """Return the names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def on_one_machine(environment: Mapping[str, str]) -> bool:
    """True if all ranks that torchrun has started are on this machine."""
    world = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", world) == world


def bind_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Bind ranks of a job on one machine to its loopback interface, unless the environment names another."""
    if on_one_machine(environment):
        for name in INTERFACE.values():
            environment.setdefault(name, loopback())


def local_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ranks that this machine starts: the loopback interface and a new key."""
    return {
        **{name: environment.get(name, loopback()) for name in INTERFACE.values()},
        KEY: secrets.token_hex(32),
    }


def check_interfaces(
    environment: Mapping[str, str] = os.environ, available: Collection[str] | None = None
) -> None:
    """Raise StrettoError if the environment names an interface that this machine does not have.

    Args:
        environment: environment variables of the job.
        available: names of interfaces, or None for this machine's.
    """
    available = interfaces() if available is None else available
    for name in INTERFACE.values():
        value = environment.get(name, "")
        if not value or value[0] in "^=" or name == "NCCL_SOCKET_IFNAME":
            continue  # NCCL takes prefixes and exclusions, and reports itself which interface it uses
        for interface in value.split(","):
            if interface not in available:
                suggestion = nearest(interface, available)
                raise StrettoError(
                    f"{name} is {interface}, and this machine has no such network interface",
                    hint=f"did you mean {suggestion}?" if suggestion else f"it has {', '.join(available)}",
                )


def describe(environment: Mapping[str, str], backend: str) -> str:
    """Return one line about the interfaces that a job listens on.

    Args:
        environment: environment variables of the job.
        backend: gloo, nccl, or another backend of torch.distributed.
    """
    name = INTERFACE.get(backend)
    interface = None if name is None else environment.get(name)
    if on_one_machine(environment):
        listening = interface or ("the loopback interface" if name else "what its library chooses")
        return f"network: one machine; {backend} listens on {listening}"
    address = f"rendezvous at {environment.get('MASTER_ADDR', '?')}:{environment.get('MASTER_PORT', '?')}"
    signed = "signed" if environment.get(KEY) else f"not signed, for {KEY} is not set"
    listening = interface or f"the interface of this host's name (set {name or 'an interface'} to choose it)"
    return f"network: {address}; {backend} listens on {listening}; control messages are {signed}"
