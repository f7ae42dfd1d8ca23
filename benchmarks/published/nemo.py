"""NVIDIA's performance summaries of NeMo on H100 and B200, in FP8."""

from __future__ import annotations

from stretto.errors import StrettoError


def adapt(row: dict[str, str]) -> dict[str, str]:
    """Convert a row.

    NeMo's recipes reduce gradients in bfloat16, interleave with one layer per chunk where the page states no
    chunks, and since NeMo 24.07 use cuDNN's attention. Where the printed degrees do not multiply to the
    number of GPUs, dp is the quotient and the batch at least one sample per replica; TFLOP/s stay as printed.
    """
    if "LoRA" in row["notes"]:
        raise StrettoError(
            "a step of LoRA over packed documents, whose attention no column states",
            hint="fill in lora_rank, and expect its attention to be predicted too long",
        )
    tp, cp, pp = (int(row[name] or 1) for name in ("tp", "cp", "pp"))
    dp = int(row["gpus"]) // (tp * cp * pp)
    return {
        **row,
        "dp": str(dp),
        "vp": row["vp"] or str(max(1, int(row["layers"]) // pp) if pp > 1 else 1),
        "global_batch": str(max(dp, int(row["global_batch"]))),
        "gradients": "same",
        "attention": "fused",
        "software": "engine" if "NeMo24" in row["notes"] else "tuned",
        "framework": "nemo",
        "recompute": "",  # the page does not say: the least that fits
    }
