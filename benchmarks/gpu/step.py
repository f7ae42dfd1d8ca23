"""One GPU, bf16: tokens/s and MFU of Stretto and of the same model in plain torch, eager and compiled.

MFU = model FLOPs of a step / (its seconds x the device's dense bf16 peak). Model FLOPs: 6 x parameters of
the matrix products + 12 x layers x hidden x sequence per token (Narayanan et al. 2021, equation 3),
without recomputation.

    python benchmarks/gpu/step.py                      # on CUDA: GPT-2 124M and a Llama of 1.1B
    python benchmarks/gpu/step.py --device cpu --tiny  # checks the script; not a measurement
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import Step, where

from stretto.engine.models.build import build
from stretto.engine.models.weights import initialise
from stretto.engine.parallel.mesh import Mesh
from stretto.planner.machines.catalogue import peak_tflops
from stretto.run.train.assemble import assemble
from stretto.spec.data_parallel import Precision
from stretto.spec.flops import model_flops_per_token
from stretto.spec.job import VOCAB_MULTIPLE, Job
from stretto.spec.presets import preset
from stretto.spec.shape import ModelShape

Batch = tuple[list[torch.Tensor], list[torch.Tensor]]


def batch(shape: ModelShape, sequence: int, micro: int, count: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocab, (count, micro, sequence + 1), generator=generator).to(device)
    return list(ids[..., :-1].contiguous()), list(ids[..., 1:].contiguous())


def plain(shape: ModelShape, data: Batch, device: torch.device, compiled: bool) -> Step:
    """Plain torch: autocast, fused AdamW, gradient accumulation."""
    model = build(shape)
    initialise(model, 0)
    model = model.to(device)
    model.tie()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for x, y in zip(*data, strict=True):
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(run(x).flatten(0, 1).float(), y.flatten())
            (loss / len(data[0])).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def stretto_step(shape: ModelShape, data: Batch, device: torch.device) -> Step:
    inputs, targets = data
    micro, sequence = inputs[0].shape
    job = Job(
        shape=shape,
        global_batch=micro * len(inputs),
        micro_batch=micro,
        sequence=sequence,
        precision=Precision(dtype="bfloat16"),
        vocab_multiple=VOCAB_MULTIPLE,
    )
    replica = assemble(job, Mesh(job.layout, device), seed=0)
    tokens = micro * sequence * len(inputs)

    def step() -> None:
        replica.pipeline.step(inputs, targets, 1.0 / tokens)
        replica.update(1e-4)

    return step


def measure(steps: dict[str, Step], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for at in range(rounds + 3):
        for name, step in steps.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if at >= 3:
                taken[name].append(time.perf_counter() - started)
    return taken


def models(tiny: bool) -> list[tuple[str, ModelShape, int, int, int]]:
    """(name, shape, sequence, samples of a microbatch, microbatches)."""
    if tiny:
        small = ModelShape(family="gpt", layers=2, hidden=64, heads=2, vocab=512, sequence=64)
        return [("tiny", small, 64, 2, 2)]
    llama = ModelShape(
        family="llama", layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32000, sequence=2048
    )
    return [("gpt2 124M", preset("gpt2"), 1024, 16, 4), ("llama 1.1B", llama, 2048, 4, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    peak = peak_tflops(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else None
    for name, shape, sequence, micro, count in models(args.tiny):
        data = batch(shape, sequence, micro, count, device)
        steps = {
            "Stretto": stretto_step(shape, data, device),
            "plain torch": plain(shape, data, device, False),
        }
        if not args.no_compile:
            steps["plain torch, compiled"] = plain(shape, data, device, True)
        taken = measure(steps, device, args.rounds)
        tokens = sequence * micro * count
        flops = model_flops_per_token(shape, sequence) * tokens
        print(f"### {name}, sequence {sequence}, {count} microbatches of {micro}, bf16\n")
        print("| | ms a step | tokens/s | MFU | speed over compiled torch |\n|---|---|---|---|---|")
        best = list(steps)[-1]
        for row, seconds in taken.items():
            middle = median(seconds)
            ratio = median(b / s for b, s in zip(taken[best], seconds, strict=True))
            mfu = f"{flops / middle / peak / 1e12:.1%}" if peak else "-"
            print(f"| {row} | {middle * 1e3:.1f} | {tokens / middle:.0f} | {mfu} | {ratio:.2f} |")
        print(f"\n{where()}\n", flush=True)
        del steps, data


if __name__ == "__main__":
    main()
