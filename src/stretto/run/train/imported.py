"""A published model as a run: its weights as a checkpoint, its tokenizer, and a config to train it with."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import join
from types import MappingProxyType
from typing import Any, Protocol

import yaml

from stretto.engine.checkpoint.folder import step_name
from stretto.engine.checkpoint.huggingface.importing import Importing, Progress
from stretto.engine.parallel.control import CollectiveError
from stretto.errors import StrettoError
from stretto.job.shape import ModelShape
from stretto.run.config.required import REQUIRED
from stretto.run.config.schema import TrainConfig
from stretto.run.config.source import CoreDumper
from stretto.run.config.validation import read_section
from stretto.run.config.written import model_section
from stretto.run.data.prepare import LEAST_USED
from stretto.run.data.tokenizer import SMALLEST_VOCAB, Tokenizer
from stretto.run.launch.lease import lease
from stretto.run.train.companions import TOKENIZER, copy_tokenizer_files, write_generation
from stretto.run.train.resume import differing

CONFIG = "config.yaml"
_SEQUENCE = 2048  # tokens of a sample, if the model takes more


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import made.

    Attributes:
        dtype: of most weights.
        parameters: their number.
        notes: what of the folder was not taken, or was changed; a sentence each.
        next: the command that trains the model.
    """

    checkpoint: Path
    config: Path
    shape: ModelShape
    dtype: str
    bytes: int
    parameters: int
    tokenizer: Path | None
    notes: list[str]
    next: str


class Described(Protocol):
    """What an import writes: a model, where it comes from, and how many bytes its checkpoint has."""

    source: Path
    shape: ModelShape
    parameters: int

    @property
    def dtype(self) -> str:
        """The type of most values."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the checkpoint."""
        ...


def import_model(
    source: Path, run: Path, progress: Progress | None = None, adapters: Path | None = None
) -> Imported:
    """Make a run of a folder with config.json, safetensors files and, mostly, a tokenizer.json.

    Everything is checked before anything is written; the checkpoint appears when all is complete.

    Args:
        progress: called with the bytes written so far, and with all that there are.
        adapters: a folder of `peft`'s, with adapters of this model.

    Raises:
        StrettoError: as `Importing`; the run's folder has a run already, or too little room.
    """
    with Importing(source, adapters) as model, new_run(run):
        model.check_place(run)
        model.check_head()
        notes = list(model.notes)
        tokenizer = _tokenizer(source, model.shape, notes)
        text = config_text(model, run, tokenizer)
        meta = {} if tokenizer is None else {"tokenizer": tokenizer.fingerprint}

        def companions() -> Iterator[Path]:
            if tokenizer is not None:
                yield run / TOKENIZER
                shutil.copyfile(source / TOKENIZER, run / TOKENIZER)
            yield from copy_tokenizer_files(source, run)
            yield from write_generation(run, model.config)

        imported = make_run(
            model, run, text, notes, write=lambda: model.write(run, meta, progress), companions=companions()
        )
        return imported if tokenizer is None else replace(imported, tokenizer=run / TOKENIZER)


def make_run(
    model: Described,
    run: Path,
    text: str,
    notes: list[str],
    *,
    write: Callable[[], Path],
    companions: Iterable[Path] = (),
) -> Imported:
    """Write a run's config, the files that accompany it, and its checkpoint; if one of these fails, none is
    left.

    Args:
        text: text of the config.
        write: writes the checkpoint.
        companions: files that are written while this is iterated, each after it was yielded.
    """
    sources = [] if REQUIRED not in text else ["data.source=python-stdlib"]
    with _removed_on_failure(run) as files:
        files += [run / CONFIG]
        (run / CONFIG).write_text(text, encoding="utf-8")
        for path in companions:
            files.append(path)  # one by one: what fails is removed too
        try:
            checkpoint = write()
        except CollectiveError as error:
            raise StrettoError(f"the import failed: {error}", hint="nothing is left of it") from None
    return Imported(
        checkpoint=checkpoint,
        config=run / CONFIG,
        shape=model.shape,
        dtype=model.dtype,
        bytes=model.bytes,
        parameters=model.parameters,
        tokenizer=None,
        notes=notes,
        next=join(["stretto", "train", str(run / CONFIG), *sources]),
    )


@contextmanager
def new_run(run: Path) -> Generator[None]:
    """Hold the folder, to which no other job may write meanwhile.

    Raises:
        StrettoError: another job holds it, or it has a run already.
    """
    with lease(run):
        if (run / "metrics.jsonl").exists():
            raise StrettoError(f"{run} already holds a run", hint="import into a new run folder")
        yield


@contextmanager
def _removed_on_failure(run: Path) -> Generator[list[Path]]:
    """Make the run's folder; if the block fails, remove the files named in the list."""
    files = list[Path]()
    try:
        run.mkdir(parents=True, exist_ok=True)
        yield files
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        for folder in (run / "checkpoints", run):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _tokenizer(source: Path, shape: ModelShape, notes: list[str]) -> Tokenizer | None:
    """Return the folder's tokenizer if it can be used; otherwise add a note."""
    if not (source / TOKENIZER).is_file():
        notes.append(f"{source} has no {TOKENIZER}: name the model's own as data.tokenizer before training")
        return None
    try:
        tokenizer = Tokenizer.load(source / TOKENIZER)
    except StrettoError as error:
        notes.append(f"the tokenizer is left out: {error.message}; data.tokenizer names another")
        return None
    if not LEAST_USED * shape.vocab <= tokenizer.vocab_size <= shape.vocab:
        notes.append(
            f"the tokenizer has {tokenizer.vocab_size} entries and the model {shape.vocab} rows: training "
            "refuses them, and data.tokenizer names another"
        )
    return tokenizer


def config_text(
    model: Described,
    run: Path,
    tokenizer: Tokenizer | None,
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> str:
    """Return the config of a run that continues from the import: YAML with comments.

    Args:
        changes: by section, what is not as for fine-tuning.

    Raises:
        StrettoError: training has no such model.
    """
    shape = model.shape
    section = model_section(replace(shape, lora=None))
    sequence = min(shape.sequence, _SEQUENCE)
    data: dict[str, Any] = {"source": REQUIRED, "sequence": sequence}
    if tokenizer is not None:
        data["tokenizer"] = str(run / TOKENIZER)
    elif "tokenizer" not in changes.get("data", {}):
        data["vocab"] = max(SMALLEST_VOCAB, shape.vocab)
    values: dict[str, dict[str, Any]] = {
        "model": section,
        "data": data,
        **(
            {}
            if shape.lora is None
            else {"lora": {**asdict(shape.lora), "targets": list(shape.lora.targets)}}
        ),
        "layout": {"tp": 1, "dp": 1, "pp": 1},
        "batch": {"global_size": 8, "micro_size": 1},
        "optim": {"lr": 2e-5, "weight_decay": 0.0},
        "train": {"steps": 100, "dtype": model.dtype},
        "checkpoint": {"resume": str(run / "checkpoints" / step_name(0))},
        "sample": {"tokens": 0},
        "run": {"name": f"{_plain(run.resolve().name)}-tuned", "dir": str(run.parent)},
    }
    values = {name: {**section, **changes.get(name, {})} for name, section in values.items()}
    data = {name: value for name, value in values["data"].items() if value != REQUIRED}
    plain = {**values, "data": data}
    for name, (value, _) in differing(shape, read_section(TrainConfig, plain).shape()).items():
        raise StrettoError(f"a config cannot say that {name} is {value}")
    head = [
        f"{shape.family}, {model.parameters / 1e6:,.4g} M parameters in {model.dtype}, imported from "
        f"{model.source}.",
        "The model is exactly that of its config.json; the other sections are a start for fine-tuning."
        if isinstance(model, Importing)
        else "What the checkpoint and its arguments say is taken; the rest is a start.",
        "Every field: stretto config --reference",
    ]
    lines = [f"# {line}" for line in head]
    comments = {name: text.format(positions=shape.sequence) for name, text in _COMMENTS.items()}
    at = ""
    for line in _dump(values).splitlines():
        name = line.strip().partition(":")[0]
        at = name if not line.startswith(" ") else at
        about = comments.get(f"{at}.{name}") if name not in changes.get(at, {}) else None
        lines.append(line if about is None else f"{line}  # {about}")
    return "\n".join(lines) + "\n"


_COMMENTS = {
    "data.source": "text, JSONL or Parquet files, or a token folder; python-stdlib: Python's own source",
    "data.sequence": "tokens of a sample; the model takes up to {positions}",
    "data.tokenizer": "the model's own",
    "data.vocab": "no tokenizer came with the model: name its own as data.tokenizer",
    "layout.tp": "ranks that split every layer",
    "layout.dp": "replicas with samples of their own",
    "layout.pp": "ranks that split the layers among them",
    "batch.global_size": "samples of an update, over all ranks",
    "batch.micro_size": "samples at once on a rank: more is faster while memory lasts",
    "optim.lr": "peak learning rate; 1e-5 to 5e-5 is usual for fine-tuning",
    "train.steps": "updates in the whole run",
    "train.dtype": "as the files; the optimiser keeps float32 weights beside 16-bit ones",
    "checkpoint.resume": "the imported weights",
    "sample.tokens": "64 writes a sample at the end, in one process",
}


def _plain(name: str) -> str:
    """The name of a folder as that of a run."""
    return re.sub(r"[^A-Za-z0-9_.+=@-]+", "-", name).lstrip(".+=@-") or "model"


def _dump(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=1000)
