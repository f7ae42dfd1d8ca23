"""The batch script that runs a training job on a SLURM cluster.

How a job stops and restarts: SLURM signals the batch shell some time before the time limit, or when it
preempts the job. The shell forwards the signal; torchrun passes it to the training ranks and waits; they
finish the step, save if `train.grace_s` leaves time for it, and exit with code 75 ("saved, submit again").
torchrun itself then exits with 1, so the shell decides by the signal that it received, and requeues the job,
which resumes from the newest checkpoint. Requeues are limited, for a job that never reaches a checkpoint.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.engine.parallel.signed import KEY
from stretto.errors import StrettoError

SAVED = 75  # EX_TEMPFAIL of sysexits.h: the work is saved, submit the job again

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
_WORD = re.compile(r"[\w.,:@%+=/*\[\]-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """The settings of a batch script.

    Attributes:
        signal_seconds: time before the time limit at which ranks start to save, seconds.
        requeues: most requeues of the job.

    Raises:
        StrettoError: a value that a `#SBATCH` line cannot carry, or a number out of range.
    """

    config: str
    nodes: int
    ranks_per_node: int
    job_name: str
    overrides: Sequence[str] = ()
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    gpus_per_node: int | None = None
    cpus_per_rank: int | None = None
    signal_seconds: int = 120
    requeues: int = 100
    port: int = 29400
    sbatch: Sequence[str] = ()  # further #SBATCH options, as "--constraint=h100"
    srun: Sequence[str] = ()  # further options of srun, as "--cpu-bind=cores"
    setup: Sequence[str] = ()  # shell lines to run first, such as activating an environment

    def __post_init__(self) -> None:
        for field in ("nodes", "ranks_per_node", "signal_seconds"):
            _check_range(field, getattr(self, field), 1, 65535)  # SLURM holds the signal's time in 16 bits
        _check_range("port", self.port, 1024, 65535)
        _check_range("requeues", self.requeues, 0, 10**6)
        for field in ("job_name", "partition", "account"):
            _check_word(field, getattr(self, field))
        for option in self.sbatch:
            _check_word("sbatch", option)
        for field, options in (("sbatch", self.sbatch), ("srun", self.srun)):
            for option in options:
                if not option.startswith("-"):
                    raise StrettoError(f"{field}={option!r} is not an option", hint=f"write --{option}")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise StrettoError(
                f"time={self.time!r} is not a time limit",
                hint="write minutes, HH:MM:SS or D-HH:MM:SS, as in 12:00:00",
            )


def script(job: SlurmJob) -> str:
    """Return the text of the script for `sbatch`."""
    launcher = [
        "torchrun",
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.ranks_per_node}",
        "--max-restarts=0",
        '--rdzv-id="$SLURM_JOB_ID"',
        "--rdzv-backend=c10d",
        f'--rdzv-endpoint="${{hosts[0]}}:{job.port}"',
    ]
    train = ["-m", "stretto.cli.main", "train", job.config, *job.overrides, "--resume", "auto"]
    # quoted once, for this shell: torchrun passes arguments on unchanged
    command = " ".join(shlex.quote(word) for word in train)
    srun = " ".join(["srun --kill-on-bad-exit=1", *map(shlex.quote, job.srun)])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(job)),
        f"# {job.nodes} nodes x {job.ranks_per_node} ranks = {job.nodes * job.ranks_per_node} ranks",
        "",
        *job.setup,
        "",
        "set -u  # after the setup: activating an environment may read variables that are not set",
        _FORWARD,
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "# torchrun waits this long for the ranks to save before it kills them",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.signal_seconds}",
        "export PYTHONUNBUFFERED=1",
        "# signs the ranks' control messages; no command line has it, which everyone could read",
        f"export {KEY}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        "",
        f"{srun} \\\n  {' '.join(launcher)} \\\n  {command} &",
        _WATCH.format(saved=SAVED, requeues=job.requeues),
    ]
    return "\n".join(lines)


def _options(job: SlurmJob) -> list[str]:
    """Return the job's `#SBATCH` options."""
    cpus = None if job.cpus_per_rank is None else job.cpus_per_rank * job.ranks_per_node
    options = {
        "job-name": job.job_name,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": cpus,
        # B: signal the batch shell only, which can requeue; it forwards the signal
        "signal": f"B:TERM@{job.signal_seconds}",
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    return [f"--{name}={value}" for name, value in options.items() if value is not None] + [
        "--requeue",
        *job.sbatch,
    ]


_FORWARD = """\
job= signals=0
forward() {
  signals=$((signals + 1))
  echo "asked to stop: saving"
  [ -z "$job" ] || kill -TERM "$job" 2>/dev/null
}
trap forward TERM USR1 USR2
"""

_WATCH = """\
job=$!

# a signal interrupts wait: wait again until it returns because srun has ended
while :; do
  before=$signals
  wait "$job"
  status=$?
  [ "$signals" -eq "$before" ] && break
done

if [ "$status" -eq 0 ]; then
  exit 0
fi
if [ "$signals" -gt 0 ] || [ "$status" -eq {saved} ]; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {requeues} ]; then  # SLURM counts its requeues there
    echo "not finished after {requeues} requeues (--requeues): submit this script again to resume" >&2
    exit {saved}
  fi
  echo "not finished: requeued, resumes from the newest checkpoint"
  scontrol requeue "$SLURM_JOB_ID" && exit 0
  echo "cannot requeue: submit this script again to resume" >&2
  exit {saved}
fi
exit "$status"
"""


def _check_range(field: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise StrettoError(f"{field}={value} is not allowed", hint=f"{field} is {smallest} to {largest}")


def _check_word(field: str, value: str | None) -> None:
    """Check a value for a `#SBATCH` line, whose quoting is unreliable."""
    if value is not None and not _WORD.fullmatch(value):
        raise StrettoError(
            f"{field}={value!r} does not fit on an #SBATCH line",
            hint="use letters, digits and . , : @ % + = / * [ ] _ - without spaces",
        )
