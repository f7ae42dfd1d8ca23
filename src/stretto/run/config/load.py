"""A config file and its overrides to a training job, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from stretto.errors import StrettoError, joined, nearest_file
from stretto.job.presets import is_name
from stretto.run.config.model import ModelConfig, model_section
from stretto.run.config.required import pop_required_markers, set_required_markers
from stretto.run.config.schema import JobConfig, TrainConfig
from stretto.run.config.section import plain_section
from stretto.run.config.source import LARGEST_FILE, CoreDumper, Source
from stretto.run.config.validation import apply_override, move_deprecated, read_section
from stretto.versions import CONFIG

EXAMPLES = Path(__file__).parents[2] / "configs"  # come with the package; each begins with a comment about it

# fields of `model` that leave the model of a preset as it is
_BESIDE_PRESET = ("preset", "vocab", "positions", "dropout", "init_std", "scaled_init")

C = TypeVar("C", bound=JobConfig)


def load(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read the language model's job from a YAML file, with overrides such as `optim.lr=3e-4`.

    Each field is checked alone; `stretto.run.config.check` checks them against each other and the machine.

    Raises:
        StrettoError: no such file, not YAML, an unknown field, or a value that a field does not take; each
            such field is a problem of its own, with file and line (or the override) and what is allowed.
    """
    path = Path(path)
    return parse(read_config(path), str(path), overrides, name=run_name(path))


def parse(
    text: str, source: str = "config", overrides: Sequence[str] = (), *, name: str = "train"
) -> TrainConfig:
    """As `load`, from text; errors refer to it as `source`, and `name` is the default name of the run."""
    values, read = values_of(text, source)
    return parse_as(TrainConfig, values, read, overrides, name)


def values_of(text: str, source: str) -> tuple[dict[str, Any], Source]:
    """Return the plain values of a config, section by section, and the place of each.

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
            hint="see docs/reference/config.md, or `stretto config --reference`",
        )
    # a section whose fields are all commented out is an empty one
    return {key: {} if value is None else value for key, value in values.items()}, read


def parse_as(schema: type[C], values: dict[str, Any], read: Source, overrides: Sequence[str], name: str) -> C:
    """Return the values, with overrides laid over them, as a job of this schema.

    Raises:
        StrettoError: as `load`.
    """
    CONFIG.check(values.pop("version", CONFIG.version), str(read.place(("version",))))
    move_deprecated(values, read)
    wrong = list[StrettoError]()
    _expand_model(values)
    for override in overrides:
        try:
            apply_override(override, values, read, schema)
        except StrettoError as error:
            wrong.append(error)
        _expand_model(values)
    if wrong:
        raise joined(wrong)
    _check_preset(values, read)
    run = values.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", name)
    marked = pop_required_markers(values, schema)
    config = replace(read_section(schema, values, read), required=marked)
    if isinstance(config, TrainConfig) and config.model.preset and not is_name(config.model.preset):
        # the sizes of a config.json, so that the file is not needed again
        section = model_section(replace(config.shape(), lora=None), config.model.initial())
        if config.model.vocab is None:  # the tokenizer's, then
            del section["vocab"]
        return replace(config, model=read_section(ModelConfig, section))
    return config


def _expand_model(values: dict[str, Any]) -> None:
    """Replace `model: FILE.py:NAME` by the section that it is short for."""
    if isinstance(model := values.get("model"), str):
        values["model"] = {"build": model}


def _check_preset(values: dict[str, Any], read: Source) -> None:
    """Refuse a preset from an override if the file sets fields of the model, which would change it."""
    model: Any = values.get("model")
    preset, place = model.get("preset") if isinstance(model, dict) else None, read.place(("model", "preset"))
    if preset is None or place.source == read.name:
        return
    harmless = (*_BESIDE_PRESET, *(["family"] if model.get("family") == "dlrm" else []))  # its only one
    changed = [
        ".".join(path)
        for path in _values_at(model, ("model",))
        if path[1] not in harmless and read.place(path).source == read.name
    ]
    if changed:
        few = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
        raise StrettoError(
            f"{place}: {read.name} sets {few}, which would change the preset",
            hint=f"'model={{preset: {preset}}}' takes the preset alone; a preset with changes is "
            "written into the file",
        )


def _values_at(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field that is not null."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _values_at(inner, (*path, name))
    elif value is not None:
        yield path


def dump(config: JobConfig, *, defaults: bool = True) -> str:
    """Return the resolved config as YAML that `load` reads back equal.

    Args:
        defaults: every field; false: those that differ from their defaults.
    """
    values = {"version": CONFIG.version, **plain_values(config, defaults=defaults)}
    return yaml.dump(values, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=100)


def plain_values(config: JobConfig, *, defaults: bool = True) -> dict[str, Any]:
    """The fields of the resolved config, section by section, as JSON and YAML hold them; `defaults` as of
    `dump`.
    """
    return set_required_markers(plain_section(config, defaults=defaults), config.required)


def read_config(path: Path) -> str:
    """Return the text of a config file, or of the example of that name if there is no such file.

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
        if is_example(path):
            return (EXAMPLES / f"{path}.yaml").read_text(encoding="utf-8")
        raise StrettoError(f"config {path} does not exist", hint=_neighbours(path)) from None
    except UnicodeDecodeError:
        raise StrettoError(f"config {path} is not UTF-8 text", hint="is it a YAML file?") from None
    except OSError as error:
        raise StrettoError(f"config {path} cannot be read: {error.strerror}") from None


def is_example(path: str | Path) -> bool:
    """True if a config's path is the name of an example, and no file has that name."""
    return str(path) in example_configs() and not Path(path).exists()


def example_configs() -> dict[str, str]:
    """Return what each example trains, by name: the first clause of the comment that it begins with."""
    examples = dict[str, str]()
    for path in _configs(EXAMPLES):
        comment = (
            path.read_text(encoding="utf-8").partition("\n\n")[0].replace("\n# ", " ").removeprefix("# ")
        )
        examples[path.stem] = re.split(r"[:.;] | \(|\.$", comment)[0]
    return examples


def _neighbours(path: Path) -> str | None:
    """Return a hint to a config beside a missing one or in the folder `configs` there, or to an example."""
    configs = [*_configs(path.parent), *_configs(path.parent / "configs")]
    if closest := nearest_file(path.stem, (config.stem for config in configs)):
        return f"did you mean {next(config for config in configs if config.stem == closest)}?"
    if path.stem in example_configs():  # a page's path, typed outside a clone
        return f"{path.stem}, without a folder and an ending, is the example that comes with the package"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.parent == Path() and not path.suffix and (closest := nearest_file(path.name, example_configs())):
        return f"did you mean {closest}? `stretto init` lists the examples"
    more = f" and {len(configs) - 8} more" if len(configs) > 8 else ""
    shown = ", ".join(map(str, configs[:8]))
    return f"there is {shown}{more}" if configs else f"no config in {path.parent}"


def _configs(folder: Path) -> list[Path]:
    """Return the YAML files in a folder that are not hidden, without folders and links to nothing."""
    files = (file for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern))
    return sorted(file for file in files if not file.name.startswith(".") and file.is_file())


def run_name(path: Path) -> str:
    """Return the name of a file or an example as that of a run: what suits no folder becomes a dash."""
    name = path.stem if path.suffix in (".yaml", ".yml") else path.name
    return re.sub(r"[^A-Za-z0-9_.+=@-]+", "-", name).lstrip(".+=@-") or "train"


def _kind(values: Any) -> str:
    return "a list" if isinstance(values, list) else "a single value"
