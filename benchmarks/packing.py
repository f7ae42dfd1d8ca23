"""Samples of several documents that are kept apart beside plain windows of the same stream: time of a step.

One step reads a batch of the stream, cuts it into documents, and computes forward and backward of a small
model in one process and one thread, float32. Documents have lengths about a part of the sequence, or 20
tokens. Times are those that the thread was on the CPU.

    python benchmarks/packing.py [--sequence 1024] [--hidden 512]
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import numpy as np
import torch
from harness import Laps, Step, arguments, compare, laps, report

from stretto.engine.documents import DocumentStarts, Packing, share_packing
from stretto.engine.models.build import build
from stretto.engine.models.language import LanguageModel
from stretto.job.shape import ModelShape
from stretto.run.data.dataset import WindowSamples
from stretto.run.data.token_source import TokenSource
from stretto.run.data.tokenizer import Tokenizer

VOCAB, BATCH = 512, 4


class Stream(TokenSource):
    """Random tokens in documents of lengths between half and one and a half times `length`."""

    def __init__(self, length: int, size: int = 1 << 18) -> None:
        draw = np.random.default_rng(0)
        low, high = max(1, length // 2), length + length // 2
        lengths = draw.integers(low, high + 1, size=2 * size // length)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.name, self.offsets = "random tokens", offsets
        self.tokens = draw.integers(VOCAB, size=int(offsets[-1]), dtype=np.uint16)
        self.mask = self.endoftext = self.fingerprint = self.trained = None
        self.vocab = VOCAB

    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    def companions(self) -> Mapping[str, bytes]:
        return {}


def steps(model: LanguageModel, packing: Packing, sequence: int) -> dict[str, Step]:
    """A step on plain windows, and on windows of documents of each length."""

    def step(samples: WindowSamples, at: list[int]) -> None:
        model.zero_grad()
        at[0] += BATCH
        batch = samples.batch(range(at[0], at[0] + BATCH))
        packing.documents = None if batch.begins is None else DocumentStarts(batch.begins)
        model.loss(model(batch.inputs), batch.targets).backward()

    def contestant(length: int, apart: bool) -> Step:
        samples, at = WindowSamples(Stream(length), "train", sequence, isolate=apart), [0]
        return lambda: step(samples, at)

    lengths = {"whole samples": 4 * sequence, "1/4 of a sample": sequence // 4, "1/16": sequence // 16}
    lengths["20 tokens"] = 20
    apart = {f"documents of {name}": contestant(length, True) for name, length in lengths.items()}
    return {"plain windows": contestant(sequence // 4, False), **apart}


def main() -> None:
    args = arguments(__doc__, rounds=15, sequence=1024, hidden=512)
    torch.set_num_threads(1)
    shape = ModelShape(
        family="llama",
        layers=2,
        hidden=args.hidden,
        heads=args.hidden // 64,
        kv_heads=max(args.hidden // 256, 1),
        vocab=VOCAB,
        sequence=args.sequence,
    )
    model, packing = build(shape), Packing()
    share_packing(model, packing)
    lapped = laps(steps(model, packing, args.sequence), args.rounds, warmup=2)
    timings = compare(Laps(lapped.cpus, lapped.cpus), "plain windows")
    title = f"{BATCH} samples of {args.sequence} tokens, hidden {args.hidden}, {shape.layers} blocks"
    report(title, timings, "plain windows", args.out)
    plain = median(lapped.cpus["plain windows"])
    print(f"{BATCH / plain * 1e3:.2f} plain samples a second of CPU time")


if __name__ == "__main__":
    main()
