"""What a cluster starts, whichever launcher: the job's command, its ranks on nodes, and what they need."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from stretto.engine.parallel.signed import KEY
from stretto.errors import Problem, StrettoError, counted
from stretto.run.launch.stop import SAVED

NODE_SIZE = 8  # devices of common nodes, if neither nodes nor devices per node are given

RESTARTED = (SAVED, 69)  # 69: a rank that ends since another does not answer (`run.watch.joint.HUNG`)
_SLACK_S = 30  # for agents to end after they have killed ranks that did not save in time

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
_MOUNT = re.compile(r"(.+):(/[^/:][^:]*)(?::(ro|rw))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A training job as a cluster starts it.

    Attributes:
        config, overrides: as `stretto train` takes them.
        layout: the layout, as text.
        folder: folder of the run.
        steps: number of updates in the whole run.
        devices_per_node: accelerators requested per node; None if other options of the launcher request them.
        grace_s: time that ranks have from the signal that asks them to stop until they are killed, seconds.
        restarts: most times that the job is started again after it was stopped.
        image: container image, or None to run on the node itself.
        mounts: `SOURCE:TARGET` or `SOURCE:TARGET:ro` of folders or volumes.
        environment: variables of every rank.
        setup: shell lines to run first, such as activating an environment.

    Raises:
        StrettoError: a value that no launcher can carry out.
    """

    name: str
    config: str
    overrides: Sequence[str] = ()
    layout: str
    folder: str = ""
    steps: int = 0
    nodes: int
    ranks_per_node: int
    devices_per_node: int | None = None
    cpus_per_rank: int | None = None
    time: str | None = None
    grace_s: int = 120
    restarts: int = 100
    port: int = 29400
    image: str | None = None
    mounts: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    setup: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, smallest, largest in (
            ("nodes", 1, 65535),
            ("ranks_per_node", 1, 65535),
            ("grace_s", 1, 65535),  # SLURM stores the signal's time in 16 bits
            ("port", 1024, 65535),
            ("restarts", 0, 10**6),
        ):
            value = getattr(self, name)
            if not smallest <= value <= largest:
                field = "train.grace_s" if name == "grace_s" else name
                raise Problem(field, value, f"must be from {smallest} to {largest}")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise Problem(
                "time", repr(self.time), "not a time limit", "minutes, HH:MM:SS or D-HH:MM:SS, as in 12:00:00"
            )
        for mount in self.mounts:
            if not _MOUNT.fullmatch(mount):
                raise Problem("mount", repr(mount), "must be SOURCE:TARGET[:ro]", "--mount /data:/data")
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise Problem("env", repr(name), "must be NAME=VALUE", "--env OMP_NUM_THREADS=8")

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def extent(self) -> str:
        """Return the nodes and ranks as text."""
        nodes, each = counted(self.nodes, "node"), counted(self.ranks_per_node, "rank")
        return f"{nodes} x {each} = {counted(self.ranks, 'rank')}"

    @property
    def termination_s(self) -> int:
        """Time from the signal until agents are killed, seconds: longer than that of their ranks."""
        return self.grace_s + _SLACK_S

    @property
    def time_s(self) -> int | None:
        """The time limit, seconds; None if there is none."""
        if self.time is None:
            return None
        days, dash, clock = self.time.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        if not dash and len(parts) < 3:  # minutes, or minutes and seconds
            parts = [0, *parts]
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return 60 * (60 * (24 * int(days or 0) + hours) + minutes) + seconds

    def mount_parts(self) -> Iterator[tuple[str, str, str | None]]:
        """Yield source, target and access (ro, rw or None) of each mount."""
        for mount in self.mounts:
            if match := _MOUNT.fullmatch(mount):
                yield match[1], match[2], match[3]

    def command(self, *rendezvous: str) -> str:
        """Return the shell command that runs the ranks of one node.

        Args:
            rendezvous: torchrun's options by which nodes find each other, quoted for the shell.
        """
        launcher = [
            "python -m stretto.run.launch.agent",
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.ranks_per_node}",
            "--max-restarts=0",
            *rendezvous,
        ]
        train = ["-m", "stretto.cli.main", "train", self.config, *self.overrides, "--resume", "auto"]
        # quoted once, for this shell; torchrun only replaces $$ by $, and ${local_rank} by the rank
        return f"{' '.join(launcher)} \\\n  {shlex.join(train).replace('$', '$$')}"

    def static_command(self, node: str, host: str) -> str:
        """Return the shell command for a node whose index and first host are known.

        Args:
            node: index of the node, quoted for the shell.
            host: address of node 0, quoted for the shell.
        """
        return self.command(f"--node-rank={node}", f"--master-addr={host}", f"--master-port={self.port}")

    def variables(self) -> dict[str, str]:
        """Return the environment of torchrun and its ranks."""
        return {
            "PYTHONUNBUFFERED": "1",
            # torchrun waits this long for the ranks to save before it kills them
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.grace_s),
            **self.environment,
        }


def nodes_of(
    world: int,
    layout: str,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    devices_per_node: int | None = None,
) -> tuple[int, int]:
    """Return how many nodes the layout's ranks take, and the ranks on each.

    Args:
        world: number of ranks.
        layout: the layout, as text for an error.
        devices_per_node: number of accelerators on a node; ranks fill it if nothing else is given.

    Raises:
        StrettoError: the ranks cannot be shared out like this.
    """
    if nodes is None and ranks_per_node is None:
        size = devices_per_node or NODE_SIZE
        ranks_per_node = min(world, size)
        if world % ranks_per_node:
            fits = max(n for n in range(1, size + 1) if world % n == 0)
            raise StrettoError(
                f"gpus_per_node={size} does not divide the {counted(world, 'rank')} of layout {layout}",
                hint=f"use --nodes {world // fits} --ranks-per-node {fits}, or another layout",
            )
    if nodes is None and ranks_per_node is not None and world % ranks_per_node == 0:
        nodes = world // ranks_per_node
    elif ranks_per_node is None and nodes is not None and world % nodes == 0:
        ranks_per_node = world // nodes
    if nodes is None or ranks_per_node is None or nodes * ranks_per_node != world:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        if nodes is None:
            wrong = f"ranks_per_node={ranks_per_node}"
            nodes = world // min(divisors, key=lambda n: abs(n - (ranks_per_node or 1)))
        else:
            wrong = f"nodes={nodes}"
            if ranks_per_node is not None:
                wrong += f" x ranks_per_node={ranks_per_node} = {nodes * ranks_per_node}"
        nearest = min(divisors, key=lambda n: abs(n - nodes))
        raise StrettoError(
            f"{wrong} does not make up layout {layout} with {counted(world, 'rank')}",
            hint=f"use --nodes {nearest} --ranks-per-node {world // nearest}",
        )
    if devices_per_node and ranks_per_node > devices_per_node:
        raise StrettoError(
            f"{ranks_per_node} ranks per node need as many GPUs, and gpus_per_node={devices_per_node}",
            hint=f"use --gpus-per-node {ranks_per_node}, or more nodes",
        )
    return nodes, ranks_per_node


def node_commands(job: ClusterJob, host: str | None) -> str:
    """Return the shell commands of all nodes, each under a comment that says on which node it runs.

    Args:
        host: name or address of the first node; None: this machine, for a job of one node.

    Raises:
        StrettoError: several nodes, and no host on which they meet.
    """
    if host is None and job.nodes > 1:
        raise StrettoError(
            f"{job.nodes} nodes have no host to meet on", hint="--host NAME, of the first node"
        )
    lines = [
        f"# {job.extent()}",
        f"# The agent is torchrun, but ends with its ranks' exit code; {SAVED}: saved, repeat the",
        "# commands to continue. SIGTERM to one of them stops all nodes.",
    ]
    if job.nodes > 1:
        lines += [
            f"# First let all nodes share a secret {KEY}, such as of `openssl rand -hex 32`: it signs the",
            "# ranks' control messages.",
        ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.variables().items()]
    lines += job.setup
    for node in range(job.nodes):
        lines += ["", f"# on node {node}"] if job.nodes > 1 else [""]
        lines.append(job.static_command(str(node), shlex.quote(host or "127.0.0.1")))
    return "\n".join(lines) + "\n"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def yaml_text(comment: Sequence[str], *documents: Mapping[str, Any]) -> str:
    """Return documents as YAML, in the order of their keys, under lines of comment."""
    head = "".join(f"# {line}\n" for line in comment)
    return head + "---\n".join(
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
        for document in documents
    )
