"""llm-foundry's table of MPT on A100, in FSDP: FlashAttention 1 in its Triton form, RoCE between nodes."""

from __future__ import annotations


def adapt(row: dict[str, str]) -> dict[str, str]:
    """Convert a row.

    FSDP in mixed precision PURE reduces gradients in 16 bits. The loss has kept logits in 16 bits by default
    since March 2023 (mosaicml/examples, pull request 251).
    """
    return {
        **row,
        "gpu": f"mosaicml-{row['gpu'].replace('_', '-')}",
        "gradients": "same" if "mixed_precision PURE" in row["notes"] else "fp32",
        "attention": "fused",
        "software": "fused",
        "fused_loss": "1",
    }
