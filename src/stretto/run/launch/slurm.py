"""The batch script that runs a training job on a SLURM cluster.

How a job stops and restarts: SLURM signals the batch shell some time before the time limit, or when it
preempts the job. The shell forwards the signal; the agents pass it to the training ranks and wait; they
finish the step, save if `train.grace_s` leaves time for it, and exit with code 75 ("saved, submit again").
The shell then requeues the job, which resumes from the newest checkpoint. Requeues are limited, for a job
that never reaches a checkpoint.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from stretto.engine.parallel.signed import KEY
from stretto.errors import Problem, StrettoError, counted
from stretto.run.launch.cluster import ClusterJob
from stretto.run.launch.stop import SAVED

CONTAINERS = ("pyxis", "apptainer")

_WORD = re.compile(r"[\w.,:@%+=/*\[\]-]+", re.ASCII)


def script(
    job: ClusterJob,
    *,
    partition: str | None = None,
    account: str | None = None,
    container: str = "pyxis",
    sbatch: Sequence[str] = (),
    srun: Sequence[str] = (),
) -> str:
    """Return the text of the script for `sbatch`.

    Args:
        container: what runs the job's image, one of `CONTAINERS`.
        sbatch: further `#SBATCH` options, as "--constraint=h100".
        srun: further options of srun, as "--cpu-bind=cores".

    Raises:
        StrettoError: a value that a `#SBATCH` line cannot carry.
    """
    for field, value in (("job_name", job.name), ("partition", partition), ("account", account)):
        _check_word(field, value)
    for option in sbatch:
        _check_word("sbatch", option)
    for field, options in (("sbatch", sbatch), ("srun", srun)):
        for option in options:
            if not option.startswith("-"):
                raise StrettoError(f"{field}={option!r} is not an option", hint=f"write --{option}")
    command = job.command(
        '--rdzv-id="$SLURM_JOB_ID"',
        "--rdzv-backend=c10d",
        f'--rdzv-endpoint="${{hosts[0]}}:{job.port}"',
    )
    cpus = None if job.cpus_per_rank is None else job.cpus_per_rank * job.ranks_per_node
    # from SLURM 22.05 on, srun does not take them over from sbatch: a node's ranks would share one core
    step_cpus = [] if cpus is None else [f"--cpus-per-task={cpus}"]
    srun = ["--kill-on-bad-exit=1", *step_cpus, *map(shlex.quote, srun)]
    prefix = ""
    if job.image is not None:
        # the folder of the submission is in the container too, at the same path
        folder, image = '"$PWD"', shlex.quote(job.image)
        if container == "pyxis":
            mounts = ",".join(['"$PWD:$PWD"', *map(shlex.quote, job.mounts)])
            srun += [f"--container-image={image}", f"--container-mounts={mounts}"]
            srun += [f"--container-workdir={folder}"]
        else:
            binds = "".join(f" --bind {shlex.quote(mount)}" for mount in job.mounts)
            devices = "" if job.devices_per_node == 0 else " --nv"
            prefix = f"apptainer exec{devices} --bind {folder}{binds} --pwd {folder} {image} \\\n  "
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(job, cpus, partition, account)),
        *(f"#SBATCH {option}" for option in sbatch),
        f"# {job.extent()}",
        "",
        *job.setup,
        "",
        "set -u  # after the setup: activating an environment may read variables that are not set",
        _FORWARD,
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        *(f"export {name}={shlex.quote(value)}" for name, value in job.variables().items()),
        "# signs the ranks' control messages; no command line has it, which everyone could read",
        f"{KEY}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        f"export {KEY}",
        "",
        f"srun {' '.join(srun)} \\\n  {prefix}{command} &",
        _WATCH.format(saved=SAVED, requeues=job.restarts, limit=counted(job.restarts, "requeue")),
    ]
    return "\n".join(lines)


def _options(job: ClusterJob, cpus: int | None, partition: str | None, account: str | None) -> list[str]:
    """Return the job's own `#SBATCH` options, with the cores of a node."""
    options = {
        "job-name": job.name,
        "partition": partition,
        "account": account,
        "time": job.time,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.devices_per_node or None,
        "cpus-per-task": cpus,
        # B: signal the batch shell only, which can requeue; it forwards the signal
        "signal": f"B:TERM@{job.grace_s}",
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    return [f"--{name}={value}" for name, value in options.items() if value is not None] + ["--requeue"]


_FORWARD = """\
job='' signals=0
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
    echo "not finished after {limit} (--requeues): submit this script again to resume" >&2
    exit {saved}
  fi
  echo "not finished: requeued, resumes from the newest checkpoint"
  scontrol requeue "$SLURM_JOB_ID" && exit 0
  echo "cannot requeue: submit this script again to resume" >&2
  exit {saved}
fi
exit "$status"
"""


def _check_word(field: str, value: str | None) -> None:
    """Check a value for a `#SBATCH` line, whose quoting is unreliable."""
    if value is not None and not _WORD.fullmatch(value):
        raise Problem(
            field,
            repr(value),
            "does not fit on an #SBATCH line",
            "use letters, digits and . , : @ % + = / * [ ] _ - without spaces",
        )
