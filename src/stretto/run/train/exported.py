"""A checkpoint's model, with its run's tokenizer, as a folder that `transformers` loads."""

from __future__ import annotations

from pathlib import Path

import torch

from stretto.engine.checkpoint.huggingface.exporting import export_huggingface
from stretto.engine.checkpoint.huggingface.importing import Progress
from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.checkpoint.read import shape_of
from stretto.run.train.companions import export_companions, run_folder, special_ids


def export_model(
    checkpoint: Path,
    out: Path,
    shard_bytes: int,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    merge: bool = False,
) -> list[Path]:
    """Write config.json, the weights in files of at most `shard_bytes`, and the tokenizer, chat template and
    generation settings of the run that the checkpoint is in.

    Args:
        dtype: type of the weights, or None for that of the checkpoint.
        progress: called with the bytes written so far, and with all that there are.
        merge: add adapters to their base weights.

    Returns:
        The files written.

    Raises:
        StrettoError: a damaged checkpoint, a model without a counterpart there, a folder with an export, or
            no room.
    """
    run, shape = run_folder(checkpoint), shape_of(checkpoint, read_manifest(checkpoint).meta)
    stacks = shape.encoder_layers > 0
    files = export_huggingface(
        checkpoint,
        out,
        shard_bytes,
        dtype=dtype,
        config=special_ids(run, decoder=stacks),
        merge=merge,
        progress=progress,
    )
    return files + export_companions(run, out, shape.sequence, stacks)
