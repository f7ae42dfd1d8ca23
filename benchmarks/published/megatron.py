"""Runs of Megatron from 2020 to 2022: Narayanan et al. 2021, Korthikanti et al. 2022, vTrain, Zero Bubble."""

from __future__ import annotations

import re

from stretto.errors import StrettoError

# before FlashAttention was in Megatron (March 2023): attention stores its scores, GPT has dropout, a stage
# waits for what it sends, and gradients are reduced after the backward
MEGATRON = {
    "attention": "unfused",
    "software": "unfused",
    "dropout": "0.1",
    "blocking": "1",
    "overlap": "0",
    "sp": "0",
    "zero": "0",
}
HALF = {"precision": "fp16", "gradients": "same"}


def megatron(row: dict[str, str], **cells: str) -> dict[str, str]:
    """Return a row with defaults of all these runs, overridden by its own values and by `cells`."""
    return {**MEGATRON, **{name: cell for name, cell in row.items() if cell}, **cells}


def korthikanti(row: dict[str, str]) -> dict[str, str]:
    """arXiv 2205.05198. Its table 4 has times of a single layer."""
    if "LAYER time" in row["notes"]:
        raise StrettoError("the time is of one layer, not of a step", hint="predict takes whole steps")
    half = "fp16" if row["precision"].startswith("fp16") else "bf16"
    return megatron(row, precision=half, gradients="fp32")


def narayanan(row: dict[str, str]) -> dict[str, str]:
    """arXiv 2104.04473, and earlier figures of Megatron-LM's README. All TFLOP/s include recomputation."""
    if not row["gpus"]:
        raise StrettoError("the row has no number of GPUs", hint="fill in gpus")
    size = re.search(r"model-parallel size (\d+)", row["notes"])
    if size is None and not (row["tp"] or row["dp"]):
        raise StrettoError(f"the row tells no degrees for {row['gpus']} GPUs", hint="fill in tp, pp and dp")
    cells = {**HALF, "software": "serial", "flops_counted": "hardware", "recompute": "full"}
    if size is not None and not row["tp"]:
        cells |= split(int(size[1]), int(row["heads"]), node=8)
    pp = int(cells.get("pp") or row["pp"] or 1)
    if "interleaving factor not stated" in row["notes"] and pp > 1:
        cells["vp"] = str(fewest_chunks(int(row["layers"]), pp))
    return megatron(row, **cells)


def vtrain(row: dict[str, str]) -> dict[str, str]:
    """VIA-Research/vTrain, one node; without gradient buckets."""
    return megatron(row, **HALF)


def zero_bubble(row: dict[str, str]) -> dict[str, str]:
    """arXiv 2401.10241, tables 3 to 5. The authors' scripts take a SentencePiece tokenizer, and 14.6 B and
    28.3 B, as they print, have a vocabulary of 20,000 to 35,000, not GPT-2's 50,257.
    """
    name = re.search(r"schedule ([\w-]+)", row["notes"])
    assert name is not None
    return megatron(
        row,
        schedule=name[1],
        vocab="32000",
        precision="bf16",
        gradients="fp32",
    )


def split(model_parallel: int, heads: int, node: int) -> dict[str, str]:
    """tp and pp of a model-parallel size, with tp as large as the node and the heads allow."""
    tp = max(n for n in range(1, min(model_parallel, node) + 1) if model_parallel % n == heads % n == 0)
    return {"tp": str(tp), "pp": str(model_parallel // tp)}


def fewest_chunks(layers: int, pp: int) -> int:
    """Return the smallest number of chunks per rank, above one, with equal numbers of layers."""
    each = layers // pp
    return next(n for n in range(2, each + 1) if each % n == 0)
