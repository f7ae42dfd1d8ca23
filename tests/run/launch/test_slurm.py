"""The batch script: its text, that bash parses it, and that it runs and stops as promised."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from launch_checks import check_shell
from stretto.errors import StrettoError
from stretto.run.launch.cluster import ClusterJob
from stretto.run.launch.slurm import script
from stretto.run.launch.stop import SAVED

FAKES = {
    # hands the command to the shell's words, as srun does, and signals on to it
    "srun": """#!/bin/bash
shift
trap 'kill -TERM $(jobs -p)' TERM
"$@" & child=$!
while :; do wait $child; code=$?; kill -0 $child 2>/dev/null || break; done
exit $code
""",
    "scontrol": """#!/bin/bash
if [ "$1" = show ]; then echo "first"; echo "second"; exit; fi
echo "$@" >> "$LOG.scontrol"
exit ${SCONTROL_CODE:-0}
""",
    "python": """#!/bin/bash
printf '%s\\n' "$@" > "$LOG.words"
printf '%s' "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > "$LOG.patience"
trap 'sleep 0.2; echo saved > "$LOG.saved"; exit ${TOLD_CODE:-1}' TERM
echo ready > "$LOG.ready"
[ -n "${WAITS:-}" ] || exit ${CODE:-0}
while :; do sleep 0.05; done
""",
}


def job(**changes: object) -> ClusterJob:
    fields = {"config": "my job.yaml", "layout": "dp=8", "nodes": 2, "ranks_per_node": 4, "name": "gpt"}
    return ClusterJob(**{**fields, **changes})  # type: ignore[arg-type]


class Cluster:
    """A folder with the script and fakes of the commands that it calls."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        for name, body in FAKES.items():
            (folder / name).write_text(body)
            (folder / name).chmod(0o755)
        (folder / "job.sh").write_text(text)

    def start(self, **environment: str) -> subprocess.Popen[str]:
        variables = os.environ | {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "LOG": str(self.log),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[1-2]",
        }
        return subprocess.Popen(
            ["bash", str(self.folder / "job.sh")],
            env=variables | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def logged(self, name: str) -> str:
        path = self.log.with_name(f"log.{name}")
        return path.read_text() if path.exists() else ""

    def until(self, name: str) -> None:
        for _ in range(200):
            if self.logged(name):
                return
            time.sleep(0.02)
        raise AssertionError(f"no {name} within 4 s")


def test_directives_and_syntax(tmp_path: Path) -> None:
    requested = {"time": "1-12:00:00", "devices_per_node": 4, "cpus_per_rank": 8}
    text = script(job(grace_s=90, **requested), partition="gpu", account="lab")
    check_shell(text, tmp_path / "job.sh")
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "--job-name=gpt", "--partition=gpu", "--account=lab", "--time=1-12:00:00", "--nodes=2",
        "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=32", "--signal=B:TERM@90",
        "--output=%x-%j.out", "--open-mode=append", "--requeue",
    ]  # fmt: skip
    assert "\nsrun --kill-on-bad-exit=1 --cpus-per-task=32 " in text  # srun does not take it from sbatch


def test_the_agent_gets_every_word_verbatim(tmp_path: Path) -> None:
    odd = ['run.name=it\'s $HOME `id` "x" *', "data.source=a;b&&c"]
    cluster = Cluster(tmp_path, script(job(overrides=odd, grace_s=90)))
    assert cluster.start().wait(20) == 0
    assert cluster.logged("words").splitlines() == [
        "-m", "stretto.run.launch.agent",
        "--nnodes=2", "--nproc-per-node=4", "--max-restarts=0", "--rdzv-id=77", "--rdzv-backend=c10d",
        "--rdzv-endpoint=first:29400", "-m", "stretto.cli.main", "train", "my job.yaml",
        *(word.replace("$", "$$") for word in odd),
        "--resume", "auto",
    ]  # fmt: skip
    assert cluster.logged("patience") == "90"
    assert cluster.logged("scontrol") == ""


def test_setup_lines_run_first_and_may_read_variables_that_are_not_set(tmp_path: Path) -> None:
    setup = [": $NO_SUCH_VARIABLE", f"echo set > {shlex.quote(str(tmp_path))}/log.setup"]
    cluster = Cluster(tmp_path, script(job(setup=setup)))
    assert cluster.start().wait(20) == 0
    assert cluster.logged("setup") == "set\n"


@pytest.mark.parametrize(
    ("number", "told_code"),
    [(signal.SIGTERM, "1"), (signal.SIGTERM, str(SAVED)), (signal.SIGUSR1, "1"), (signal.SIGUSR2, "1")],
)
def test_the_signal_reaches_training_and_the_job_starts_again(
    tmp_path: Path, number: signal.Signals, told_code: str
) -> None:
    cluster = Cluster(tmp_path, script(job()))
    shell = cluster.start(WAITS="1", TOLD_CODE=told_code)
    cluster.until("ready")
    shell.send_signal(number)
    assert shell.wait(20) == 0
    assert cluster.logged("saved") == "saved\n"
    assert cluster.logged("scontrol") == "requeue 77\n"


def test_a_job_that_ends_while_signalled_is_not_requeued(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, script(job()))
    shell = cluster.start(WAITS="1", TOLD_CODE="0")
    cluster.until("ready")
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(20) == 0
    assert cluster.logged("scontrol") == ""


def test_saved_without_a_signal_to_the_shell_starts_again_too(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, script(job()))
    assert cluster.start(CODE=str(SAVED)).wait(20) == 0
    assert cluster.logged("scontrol") == "requeue 77\n"


def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, script(job()))
    assert cluster.start(CODE="3").wait(20) == 3
    assert cluster.logged("scontrol") == ""


@pytest.mark.parametrize(("requeued", "code", "again"), [("2", 0, "requeue 77\n"), ("3", SAVED, "")])
def test_a_job_is_requeued_so_often_at_most(tmp_path: Path, requeued: str, code: int, again: str) -> None:
    cluster = Cluster(tmp_path, script(job(restarts=3)))
    shell = cluster.start(CODE=str(SAVED), SLURM_RESTART_COUNT=requeued)
    assert shell.wait(20) == code
    assert cluster.logged("scontrol") == again
    assert shell.stdout is not None
    assert ("not finished after 3 requeues (--requeues): submit this" in shell.stdout.read()) == (code > 0)


def test_a_failure_is_not_requeued_however_few_there_were(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, script(job(restarts=0)))
    assert cluster.start(CODE="3").wait(20) == 3
    assert cluster.start(CODE=str(SAVED)).wait(20) == SAVED
    assert cluster.logged("scontrol") == ""


def test_without_requeue_the_exit_code_asks_for_a_restart(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, script(job()))
    assert cluster.start(CODE=str(SAVED), SCONTROL_CODE="1").wait(20) == SAVED


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "my job"}, "job_name is 'my job'"),
        ({"partition": "gpu\n#SBATCH --exclusive"}, "partition is "),
        ({"sbatch": ["exclusive"]}, "sbatch='exclusive'"),
        ({"srun": ["exclusive"]}, "srun='exclusive'"),
    ],
)
def test_values_that_a_directive_cannot_carry_are_refused(changes: dict[str, Any], says: str) -> None:
    name = {"name": changes.pop("name")} if "name" in changes else {}
    with pytest.raises(StrettoError) as caught:
        script(job(**name), **changes)
    assert says in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("container", "line"),
    [
        (
            "pyxis",
            'srun --kill-on-bad-exit=1 --container-image=a.sqsh --container-mounts="$PWD:$PWD",/d:/data '
            '--container-workdir="$PWD" \\\n  python -m stretto.run.launch.agent ',
        ),
        (
            "apptainer",
            "srun --kill-on-bad-exit=1 \\\n"
            '  apptainer exec --nv --bind "$PWD" --bind /d:/data --pwd "$PWD" a.sqsh \\\n  python -m ',
        ),
    ],
)
def test_containers_have_the_folder_of_the_submission_at_its_own_path(container: str, line: str) -> None:
    text = script(job(image="a.sqsh", mounts=["/d:/data"], devices_per_node=4), container=container)
    assert line in text
    without = script(job(image="a.sqsh", devices_per_node=0), container=container)
    assert "--nv" not in without
