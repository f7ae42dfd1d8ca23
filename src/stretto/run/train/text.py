"""Text from a checkpoint, in one process, whatever layout wrote it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stretto.engine.checkpoint.folder import is_checkpoint
from stretto.engine.checkpoint.load import latest, load
from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.models.build import build
from stretto.engine.models.generate import stream
from stretto.engine.models.language import LanguageModel
from stretto.engine.parallel.fragment import Placed
from stretto.errors import StrettoError
from stretto.run.data.tokenizer import Tokenizer
from stretto.run.train.replica import MODEL, OPTIM
from stretto.spec.shape import FAMILIES, shape_from_record


def find_checkpoint(path: Path) -> Path:
    """A checkpoint from the path of one, of a run, or of a run's checkpoints (the newest whole one).

    Raises:
        StrettoError: there is none.
    """
    if is_checkpoint(path):
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest = latest(folder, _warn) if folder.is_dir() else None
    if newest is None:
        raise StrettoError(
            f"{path}: no checkpoint there", hint="name a run such as runs/quickstart, or a step-... folder"
        )
    return newest


def load_model(checkpoint: Path, device: str = "cpu", check: bool = True) -> LanguageModel:
    """The plain model with a checkpoint's weights, in evaluation mode.

    Args:
        check: read every byte first; not needed for a checkpoint that `find_checkpoint` returned or a run has
            just saved.

    Raises:
        StrettoError: the checkpoint is damaged or is no language model's.
    """
    sizes = read_manifest(checkpoint).meta.get("model")
    if not isinstance(sizes, dict):
        raise StrettoError(f"checkpoint {checkpoint} does not say what model it is of")
    if sizes.get("family") not in FAMILIES:
        raise StrettoError(
            f"checkpoint {checkpoint} is of family {sizes.get('family')!r}, which writes no text",
            hint=f"name one of {' or '.join(FAMILIES)}; `stretto checkpoint export` takes any model",
        )
    shape = shape_from_record(sizes)
    model = build(shape).to(device)
    tensors = {
        MODEL + name: (parameter.detach(), Placed.whole(name, tuple(parameter.shape)))
        for name, parameter in model.named_parameters()
    }
    load(checkpoint, tensors, ignore=[OPTIM], check=check)
    return model.eval()


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer that the run kept beside its checkpoints.

    Raises:
        StrettoError: it is not there.
    """
    for folder in (checkpoint, *checkpoint.parents[:2]):
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.load(folder / "tokenizer.json")
    raise StrettoError(
        f"no tokenizer.json beside checkpoint {checkpoint}",
        hint="keep it in the run's folder, as training does",
    )


def write(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> Iterator[str]:
    """The text that the model generates after `prompt`, piece by piece.

    Raises:
        StrettoError: at once, for arguments out of range or a tokenizer that is not the model's.
    """
    ids = tokenizer.encode(prompt) or [tokenizer.endoftext]
    generator = torch.Generator().manual_seed(seed)
    tokens_out = stream(
        model=model,
        ids=torch.tensor([ids]),
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        stop=tokenizer.endoftext,
    )
    return _pieces(tokens_out, tokenizer)


def _pieces(tokens: Iterator[Tensor], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of tokens, as soon as whole characters are there; without the end of the text."""
    ids, shown = list[int](), ""
    for token in tokens:
        ids.append(int(token[0]))
        if ids[-1] == tokenizer.endoftext:
            return
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # wait for the rest of a character
            yield text[len(shown) :]
            shown = text


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
