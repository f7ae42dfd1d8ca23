"""A script that starts a job on a Ray cluster: Ray places an actor on each node, which runs torchrun's agent.

Ranks are not workers of Ray Train: nothing of Ray is between them, and a job on Ray is what it is elsewhere.
"""

from __future__ import annotations

from stretto.engine.parallel.signed import KEY
from stretto.run.launch.cluster import RESTARTED, ClusterJob
from stretto.run.launch.stop import SAVED

_DRIVER = '''\
import os
import secrets
import signal
import subprocess
import sys

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

SAVED = {saved}  # exit code: stopped after saving
AGAIN = {again!r}  # the codes of nodes that saved, of those that lost their peers, and of lost nodes
NODES = {nodes}
BUNDLE = {bundle!r}  # what each node is asked for
RESTARTS = {restarts}
VARIABLES = {variables!r}
SCRIPT = {script!r}


@ray.remote(max_concurrency=2, num_cpus=BUNDLE["CPU"], num_gpus=BUNDLE.get("GPU", 0))
class Node:
    agent = None

    def address(self):
        return ray.util.get_node_ip_address()

    def run(self, variables):
        self.agent = subprocess.Popen(["bash", "-c", SCRIPT], env={{**os.environ, **VARIABLES, **variables}})
        return self.agent.wait()

    def stop(self):
        if self.agent is not None:
            self.agent.terminate()


asked_to_stop = False


def ask_to_stop(*_):
    global asked_to_stop
    asked_to_stop = True


def attempt():
    """Run all nodes once, and return their exit codes, None of those that are lost."""
    group = placement_group([BUNDLE] * NODES, strategy="STRICT_SPREAD")
    try:
        while not ray.wait([group.ready()], timeout=1)[0]:
            if asked_to_stop:
                return [SAVED]
        nodes = [
            Node.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
            for index in range(NODES)
        ]
        shared = {{"NODE_HOST": ray.get(nodes[0].address.remote()), "{key}": secrets.token_hex(32)}}
        runs = [node.run.remote({{"NODE_INDEX": str(i), **shared}}) for i, node in enumerate(nodes)]
        running, stopped = runs, False
        while running:
            running = ray.wait(running, num_returns=len(running), timeout=1)[1]
            if asked_to_stop and not stopped:
                stopped = True
                for node in nodes:
                    node.stop.remote()
        return [code_of(run) for run in runs]
    except RayError as error:
        print(error, file=sys.stderr)
        return [None]
    finally:
        remove_placement_group(group)


def code_of(run):
    try:
        return ray.get(run)
    except RayError as error:
        print(error, file=sys.stderr)
        return None


ray.init()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, ask_to_stop)
for restarts in range(RESTARTS + 1):
    codes = attempt()
    if not any(code != 0 for code in codes):
        sys.exit(0)
    if asked_to_stop:
        sys.exit(SAVED)
    if not any(code in AGAIN for code in codes):
        sys.exit(next(code for code in codes if code))
    print(f"not finished: exit codes {{codes}}, restart {{restarts + 1}} of {{RESTARTS}}", flush=True)
sys.exit(SAVED)
'''


def script(job: ClusterJob) -> str:
    """Return the Python script that `ray job submit` runs."""
    bundle = {"CPU": (job.cpus_per_rank or 1) * job.ranks_per_node}
    if job.devices_per_node:
        bundle["GPU"] = job.devices_per_node
    environment = f'{{"env_vars": {{"RAY_JOB_STOP_WAIT_TIME_S": "{job.termination_s}"}}}}'
    head = [
        f"# {job.extent()}",
        f"# Submit: ray job submit --working-dir . --runtime-env-json '{environment}' -- python FILE",
        "# `ray job stop` has the ranks save; submit again to continue.",
    ]
    command = job.static_command('"$NODE_INDEX"', '"$NODE_HOST"')
    driver = _DRIVER.format(
        saved=SAVED,
        again=(*RESTARTED, None),
        nodes=job.nodes,
        bundle=bundle,
        restarts=job.restarts,
        variables=job.variables(),
        script="\n".join([*job.setup, f"exec {command}"]),  # exec: `stop` ends the agent
        key=KEY,
    )
    return "\n".join(head) + "\n" + driver
