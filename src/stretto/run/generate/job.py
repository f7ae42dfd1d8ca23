"""Text from a checkpoint on several tensor-parallel ranks: checks, ranks, and what they return."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.engine.device import rank_device
from stretto.engine.models.generate import check_generates, check_sampling, check_tokens
from stretto.engine.parallel.mesh import Mesh
from stretto.errors import StrettoError
from stretto.job.data_parallel import Dtype
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.layout.layout import Layout
from stretto.run.config.schema import LoopConfig
from stretto.run.generate.text import Prompt, Sampling, Wording, Writer, shape_of
from stretto.run.launch.stop import StopRequest
from stretto.run.train.launch import PRELOAD, JobType, Result, run_job, under_torchrun
from stretto.run.train.start import process_group


@dataclass(frozen=True, kw_only=True)
class GenerationJob:
    """What is to be generated, and by how many ranks.

    Attributes:
        stop, template: as `Wording.load` takes them.
        train: device, threads and the longest wait of each rank.
        dtype: of weights and products.
        live: write the only prompt's text to stdout as it comes, after this one; None: return the texts.
    """

    checkpoint: Path
    prompts: Sequence[Prompt]
    sampling: Sampling
    stop: Sequence[str] = ()
    template: str | None = None
    tp: int = 1
    train: LoopConfig
    dtype: Dtype = "float32"
    live: str | None = None

    @property
    def required(self) -> tuple[str, ...]:
        """Fields that are not filled in yet: none."""
        return ()


def run_generation(request: GenerationJob, port: int = 0) -> Result:
    """Generate as one rank under torchrun, else in this process, or on local ranks that it starts. The
    outcome has `stopped`, and on the first rank `texts`: unless `live`, those of the prompts in their order,
    each with the fields of `Generated`.

    Raises:
        StrettoError: bad input; what can be known without ranks, before any is started.
        RankFailed: a rank failed.
    """
    if request.tp > 1 or under_torchrun():
        job = JobType[GenerationJob, None](
            preload=(*PRELOAD, "stretto.run.generate.job"),
            ranks=lambda request: request.tp,
            check=check_request,
            prepare=lambda request, stop: None,  # prompts are tokens already
            print_start=lambda request, data, quiet: None,  # stdout is for the text
            run_rank=generate_rank,
            orderly=False,
        )
        return run_job(job, request, port=port)
    check_request(request)
    return Result(_generate(request, Mesh(Layout(), rank_device(request.train.device))))


def check_request(request: GenerationJob, world: int | None = None, devices: int | None = None) -> None:
    """Raise StrettoError for a model that cannot be split so, or a prompt or sampling that does not fit."""
    shape, sampling = shape_of(request.checkpoint), request.sampling
    check_generates(shape)
    check_sampling(sampling.tokens, sampling.temperature, sampling.top_k, sampling.top_p)
    for prompt in request.prompts:
        check_tokens(max(prompt.ids), shape.vocab)
    for problem in problems(Job(shape=shape, layout=Layout(tp=request.tp), world=world, devices=devices)):
        fix = (problem.fix or "").replace("layout.tp=", "--tp ").replace("train.device=", "--device ")
        raise StrettoError(f"--tp {request.tp}: {problem.rule}", hint=fix or None)


def generate_rank(
    request: GenerationJob, data: None = None, stop: StopRequest | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Generate as one rank of the job that RANK and WORLD_SIZE describe. All ranks sample and follow the text
    to its end; the first one writes it. `data`, `stop` and `quiet` are not used.
    """
    with ExitStack() as cleanup:
        device = cleanup.enter_context(process_group(request.train))
        mesh = Mesh(Layout(tp=request.tp), device, timedelta(seconds=request.train.timeout_s))
        cleanup.callback(mesh.close)
        outcome = _generate(request, mesh)
        dist.barrier()
        return outcome


def _generate(request: GenerationJob, mesh: Mesh) -> dict[str, Any]:
    wording = Wording.load(request.checkpoint, stop=request.stop, template=request.template)
    writer = Writer.load(request.checkpoint, wording, mesh=mesh, dtype=getattr(torch, request.dtype))
    first = mesh.rank == 0
    if request.live is None:
        texts = writer.write(request.prompts, request.sampling)
        return {"stopped": False, "texts": [asdict(text) for text in texts] if first else []}
    for piece in chain([request.live], writer.stream(request.prompts[0], request.sampling), ["\n"]):
        if first:
            sys.stdout.write(piece)
            sys.stdout.flush()
    return {"stopped": False, "texts": []}
