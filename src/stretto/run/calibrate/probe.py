"""A short measurement of this machine before its first training, for a prediction that is not rough."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from stretto.errors import StrettoError
from stretto.job.devices import HOST
from stretto.job.job import Job
from stretto.planner.machines.catalogue import is_cpu, is_measured, probe_path
from stretto.planner.machines.describe import save_cluster
from stretto.run.calibrate.profile import calibrate
from stretto.run.launch.local import RankFailed
from stretto.run.train.prediction import predict
from stretto.run.watch.machine import OtherProcesses

SECONDS = 10.0
_SHORTEST_RUN = 60.0  # roughly predicted seconds of a run that is worth a probe
_LOOK_S, _TOO_BUSY = 0.5, 0.5  # share of the cores that other processes use while they are watched
_WIDEST = 0.8  # of the half width of kernels; that of a rough prediction is 1.1


def probe(job: Job, *, steps: int, device: str, threads: int, quiet: bool) -> None:
    """Measure this machine for SECONDS if its CPUs train for longer than a minute and nothing is known of
    them; the file is kept, and used from then on until `stretto calibrate` writes a profile.

    Nothing that fails here ends the training: its prediction is then rough.

    Args:
        steps: of the run.
        device: `train.device`.
        threads: of each rank.
        quiet: print to stderr.
    """
    try:
        rough = predict(job, device, threads)
        if is_measured(rough.cluster) or not is_cpu(rough.cluster):
            return
        if rough.seconds * steps < _SHORTEST_RUN:
            return
        with OtherProcesses() as others:
            time.sleep(_LOOK_S)
        if (share := others.share or 0.0) > _TOO_BUSY:
            text = (
                f"other processes use {share:.0%} of the cores: this machine is not measured for predictions"
            )
            print(text, file=sys.stderr)
            return
        path = probe_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        print(
            f"first training on this machine: measuring it for {SECONDS:.0f} s, for predictions (--no-probe "
            f"leaves this out); kept in {path}",
            file=sys.stderr if quiet else sys.stdout,
            flush=True,
        )
        measured = calibrate(quick=True, quiet=True, device=HOST, seconds=SECONDS)
        if measured.spread.get("kernels", 0.0) > _WIDEST:
            print(f"not kept, since it says too little: {measured.notes}", file=sys.stderr)
            return
        save_cluster(replace(measured, notes=measured.notes.replace("calibrate", "train")), path)
    except (OSError, StrettoError, RankFailed) as error:
        print(f"not measured: {error}", file=sys.stderr)
