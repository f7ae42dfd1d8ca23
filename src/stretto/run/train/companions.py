"""The small files that accompany a published model's weights: its tokenizer, chat template and generation
settings. They lie in the folder of a run, go along into a run that starts from it, and into an export.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from stretto.engine.checkpoint.huggingface.folder import read_json, write_json
from stretto.run.data.tokenizer import TOKENIZER, TOKENIZER_CONFIG, Tokenizer

CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
# beside these, all of which transformers reads: templates of their own files, and older lists of tokens
_FILES = (TOKENIZER_CONFIG, GENERATION, CHAT_TEMPLATE, "special_tokens_map.json", "added_tokens.json")
_FOLDER = "additional_chat_templates"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_START = "decoder_start_token_id"  # of a model with an encoder


def run_folder(checkpoint: Path) -> Path:
    """The folder that keeps what belongs to a checkpoint: the first of it and those around it that has a
    tokenizer; else its run's.
    """
    around = (checkpoint, *checkpoint.parents[:2])
    return next((folder for folder in around if (folder / TOKENIZER).is_file()), around[-1])


def copy_tokenizer_files(source: Path, target: Path) -> list[Path]:
    """Copy what `source` has and `target` lacks, without the tokenizer itself; returns the copies."""
    copies = list[Path]()
    templates = (path.relative_to(source) for path in sorted((source / _FOLDER).glob("*.jinja")))
    for name in (*_FILES, *map(str, templates)):
        if (source / name).is_file() and not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
            copies.append(target / name)
    return copies


def write_generation(target: Path, config: dict[str, Any]) -> list[Path]:
    """Write a generation_config.json with the special tokens of a config.json, as transformers derives it,
    unless there is one already.
    """
    ids = {name: config[name] for name in (*_IDS, _START) if config.get(name) is not None}
    if (target / GENERATION).exists() or not ids:
        return []
    write_json(target / GENERATION, {"_from_model_config": True, **ids})
    return [target / GENERATION]


def special_ids(run: Path, decoder: bool = False) -> dict[str, Any]:
    """Return the ids of special tokens for an exported config.json of this run. A token that does not exist
    is None, so that transformers does not fall back on its class's own.

    Args:
        decoder: the model has an encoder: also return what the decoder begins with, which is the end of text
            as in training, unless the model is imported.
    """
    if (run / GENERATION).is_file():
        generation = read_json(run, GENERATION)
        names = (*_IDS, _START) if _START in generation else _IDS
        return {name: generation.get(name) for name in names}
    end, begin = None, None
    if (run / TOKENIZER).is_file():
        boundaries = Tokenizer.load(run / TOKENIZER, chat=True).boundaries
        end, begin = boundaries.end, boundaries.begin
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": None}
    return {**ids, _START: end, "pad_token_id": end} if decoder and end is not None else ids


def export_companions(run: Path, out: Path, positions: int, decoder: bool = False) -> list[Path]:
    """Write the tokenizer of a run and what belongs to it so that `AutoTokenizer` loads it; return the files
    written, none if the run has no tokenizer.

    Args:
        positions: largest number of tokens of context.
        decoder: as in `special_ids`.
    """
    if not (run / TOKENIZER).is_file():
        return []
    shutil.copyfile(run / TOKENIZER, out / TOKENIZER)
    files = [out / TOKENIZER, *copy_tokenizer_files(run, out)]
    files += write_generation(out, special_ids(run, decoder))
    if not (out / TOKENIZER_CONFIG).exists():
        described = {"model_max_length": positions, "clean_up_tokenization_spaces": False}
        tokenizer = Tokenizer.load(run / TOKENIZER, chat=True)
        (out / TOKENIZER_CONFIG).write_bytes(tokenizer.config_bytes(described))
        files.append(out / TOKENIZER_CONFIG)
    return files
