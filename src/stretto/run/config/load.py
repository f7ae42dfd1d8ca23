"""A config file and its overrides to a training job, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from stretto.errors import StrettoError, nearest
from stretto.run.config.model import ModelConfig
from stretto.run.config.override import apply
from stretto.run.config.required import lay_marks, take_marks
from stretto.run.config.schema import JobConfig, TrainConfig
from stretto.run.config.section import JobSection
from stretto.run.config.source import LARGEST_FILE, CoreDumper, Source
from stretto.run.config.validation import complain
from stretto.run.config.written import model_section
from stretto.spec.presets import is_name

C = TypeVar("C", bound=JobSection)


def load(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The language model's job of a YAML file, with overrides such as `optim.lr=3e-4` laid over it.

    Each field is checked for itself; `stretto.run.config.check` checks them against each other and the
    machine.

    Raises:
        StrettoError: no such file, not YAML, an unknown field, or a value that a field does not take; it
            tells file and line (or the override), what is allowed, and how many more problems there are.
    """
    path = Path(path)
    return parse(read_config(path), str(path), overrides, name=run_name(path))


def parse(
    text: str, source: str = "config", overrides: Sequence[str] = (), *, name: str = "train"
) -> TrainConfig:
    """As `load`, from text; `source` stands for the file in errors and `name` is the run's default name."""
    values, read = values_of(text, source)
    return parse_as(TrainConfig, values, read, overrides, name)


def values_of(text: str, source: str) -> tuple[dict[str, Any], Source]:
    """The plain values of a config, section by section, and where each stands.

    Raises:
        StrettoError: not YAML, or no sections.
    """
    read = Source(source)
    values = read.read(text)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise StrettoError(
            f"{source}: holds {_kind(values)}, must hold sections such as model and data",
            hint="see docs/config.md, or `stretto config --reference`",
        )
    # a section whose fields are all commented out is an empty one
    return {key: {} if value is None else value for key, value in values.items()}, read


def parse_as(schema: type[C], values: dict[str, Any], read: Source, overrides: Sequence[str], name: str) -> C:
    """The values as a job of this schema, with overrides laid over them.

    Raises:
        StrettoError: as `load`.
    """
    for override in overrides:
        apply(override, values, read, schema)
    run = values.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", name)
    marked = take_marks(values, schema)
    try:
        config = schema.model_validate(values).marking(marked)
    except ValidationError as error:
        raise complain(error, values, read, schema) from None
    return config.model_copy(update={"model": sizes}) if (sizes := _sizes_of_file(config)) else config


def _sizes_of_file(config: JobSection) -> ModelConfig | None:
    """The sizes that a config takes from a config.json, so that it stands by itself; None where it names no
    file.
    """
    if not isinstance(config, TrainConfig) or config.model.preset is None or is_name(config.model.preset):
        return None
    section = model_section(replace(config.shape(), lora=None))
    if config.model.vocab is None:  # the tokenizer's, then
        del section["vocab"]
    return ModelConfig.model_validate(section | asdict(config.model.initial()))


def dump(config: JobConfig) -> str:
    """The resolved config, every field of it, as YAML that `load` reads back equal."""
    return yaml.dump(plain_values(config), Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=100)


def plain_values(config: JobConfig) -> dict[str, Any]:
    """Every field of the resolved config, section by section, as JSON and YAML hold it."""
    return lay_marks(config.model_dump(mode="json"), config.required)


def read_config(path: Path) -> str:
    """The text of a config file.

    Raises:
        StrettoError: it cannot be read.
    """
    if path.is_dir():
        raise StrettoError(f"config {path} is a folder", hint="give a YAML file")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise StrettoError(f"config {path} is larger than {LARGEST_FILE} bytes", hint="is it a config?")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StrettoError(f"config {path} does not exist", hint=_neighbours(path)) from None
    except UnicodeDecodeError:
        raise StrettoError(f"config {path} is not UTF-8 text", hint="is it a YAML file?") from None
    except OSError as error:
        raise StrettoError(f"config {path} cannot be read: {error.strerror}") from None


def _neighbours(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    here = sorted(p.name for pattern in ("*.yaml", "*.yml") for p in path.parent.glob(pattern))
    if near := nearest(path.stem, (Path(name).stem for name in here)):
        near = next(name for name in here if Path(name).stem == near)
        return f"did you mean {path.parent / near}?"
    more = f" and {len(here) - 8} more" if len(here) > 8 else ""
    shown = ", ".join(str(path.parent / name) for name in here[:8])
    return f"there is {shown}{more}" if here else f"no config in {path.parent}"


def run_name(path: Path) -> str:
    """The file's name as a run's name: what a folder's name should not have becomes a dash."""
    return re.sub(r"[^A-Za-z0-9_.+=@-]+", "-", path.stem).lstrip(".+=@-") or "train"


def _kind(values: Any) -> str:
    return "a list" if isinstance(values, list) else "a single value"
