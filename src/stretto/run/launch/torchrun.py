"""The commands that start a job on nodes by hand: one for each node."""

from __future__ import annotations

import shlex

from stretto.engine.parallel.signed import KEY
from stretto.errors import StrettoError
from stretto.run.launch.cluster import ClusterJob
from stretto.run.launch.stop import SAVED


def commands(job: ClusterJob, host: str | None) -> str:
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
        f"# {job.nodes} nodes x {job.ranks_per_node} ranks = {job.ranks} ranks",
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
