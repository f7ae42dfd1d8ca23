"""A proof that a file of the user's makes: its function, called on every rank."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from stretto.errors import StrettoError
from stretto.user_file import UserFunction
from stretto.verify.user_model.report import Report


def run_file(function: UserFunction) -> Report:
    """Call a function of a file with the process group ready, as one of the ranks of a job; gloo's, or those
    of the accelerators.

    Raises:
        StrettoError: it returned something other than a report.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(dist.get_default_backend_for_device(accelerator))
    else:
        dist.init_process_group("gloo")
    try:
        report = function.load()()  # with the traceback of an error
        if isinstance(report, Report):
            return report
        raise StrettoError(
            f"{function} returned {type(report).__name__}, must return the report of a proof",
            hint="end it with: return prove(plain, parallel, batch, step, loss=loss)",
        )
    finally:
        dist.destroy_process_group()
