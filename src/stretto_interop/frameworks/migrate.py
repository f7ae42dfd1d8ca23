"""A framework's text as a config of ours, with the fate of every setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from stretto.errors import StrettoError
from stretto.job.initial import Initial
from stretto.job.rules import problems
from stretto.run.config.check import find_problems
from stretto.run.config.data import DataConfig
from stretto.run.config.load import parse, plain_values
from stretto.run.config.required import FIELDS, REQUIRED, comment_required_markers
from stretto.run.config.run_checks import raise_first
from stretto.run.config.schema import TrainConfig
from stretto.run.config.source import CoreDumper
from stretto.run.config.validation import wrong_fields
from stretto.run.config.written import model_section
from stretto_interop.frameworks.fields import (
    JOB,
    MODEL,
    RUN,
    RUN_DEFAULTS,
    job_from,
    name_of,
    reading,
    values_of,
)
from stretto_interop.frameworks.mapping import ExternalFramework, Settings, Start, read_rule

# a run needs them, and no default would be right
_NEEDED = tuple(map(name_of, (RUN.data.source, RUN.train.steps, JOB.optimiser.lr)))
_VOCAB = name_of(MODEL.vocab)
_TOKENIZER = name_of(RUN.data.tokenizer)
_TRAINED = DataConfig.vocab  # entries of a tokenizer that is trained


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """The settings of one rule that the text has, and the fields that they became."""

    settings: Settings
    fields: Mapping[str, Any]


@dataclass(kw_only=True)
class Migration:
    """A framework's text as a config.

    Attributes:
        text: the YAML.
        config: the resolved config.
        mapped: settings and the fields that they became.
        needless: settings that a run does not need, by reason.
        lost: settings without a full counterpart, and why.
        differs: settings that are mapped, and how the run differs.
        notes: sentences on what the text leaves open.
        missing: sentences on what this machine lacks to run the config.
    """

    text: str = ""
    config: TrainConfig | None = None
    mapped: list[Mapped] = field(default_factory=list[Mapped])
    needless: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    differs: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])

    @property
    def required(self) -> tuple[str, ...]:
        """The fields left to fill in."""
        return () if self.config is None else self.config.required


def migrate(
    framework: ExternalFramework,
    text: str,
    source: str,
    start: Start | None = None,
    overrides: Sequence[str] = (),
    *,
    name: str = "train",
    migration: Migration | None = None,
) -> Migration:
    """Turn a text into a config; each of its settings becomes a field, is needless, or is named as lost.

    Args:
        source: name of the text, for errors.
        overrides: fields that override the text, such as "train.steps=10".
        name: the run's name, if the text has none.
        migration: is filled, and has the fate of settings even if an error is raised.

    Raises:
        StrettoError: no such text, sizes that make no model, or a job that is not legal.
    """
    assert framework.parse is not None
    with reading(source):
        parsed = framework.parse(text, source, start or Start())
    migration = Migration() if migration is None else migration
    migration.notes += parsed.notes
    for setting, instead in parsed.deprecated.items():
        migration.needless.setdefault(f"read as {instead}", []).append(setting)
    for setting, (error, _) in parsed.unsupported.items():
        migration.lost[setting] = f"{error.message.removeprefix(f'{source}: ')}{_hint(error)}"
    values = _read(framework, parsed.settings, migration)
    for setting, path in parsed.files.items():
        added = framework.files[setting](
            path, values, {name for rule in migration.mapped for name in rule.fields}
        )
        values |= added.fields
        migration.lost |= added.lost
        migration.differs |= added.differs
        if added.fields:
            migration.mapped.append(Mapped(settings={setting: path}, fields=added.fields))
    for setting, value in parsed.settings.items():
        if setting in framework.settings:
            continue
        if (reason := framework.lost(setting, value)) is not None:
            migration.lost[setting] = reason
        else:
            migration.needless.setdefault(framework.needless.get(setting, "the default"), []).append(setting)
    migration.differs |= dict(framework.differs(parsed.settings))
    try:
        sections = _sections(values, migration, name)
    except StrettoError:
        _find_unbuilt(values, framework, migration)
        raise
    _accept(sections, migration)
    for required in _NEEDED:
        section, key = required.split(".")
        if key not in sections.setdefault(section, {}):
            sections[section][key] = REQUIRED
    about = f"{source} ({framework.title})"
    migration.text = _written(sections, migration, about)
    migration.config = parse(migration.text, source, overrides, name=name)
    if overrides:
        migration.text = _written(
            _overridden(plain_values(migration.config), sections, overrides), migration, about
        )
    _check(migration)
    return migration


def _hint(error: StrettoError) -> str:
    return f" ({error.hint})" if error.hint else ""


def _read(framework: ExternalFramework, settings: Settings, migration: Migration) -> dict[str, Any]:
    """Return the values of all rules; the settings of a rule that cannot read them are lost."""
    values = dict[str, Any]()
    vocab_is_default = False
    for rule in framework.rules:
        present = {name: settings[name] for name in rule.settings if name in settings}
        if not rule.fields:
            if present:
                migration.needless.setdefault("how a kernel works is Stretto's own", []).extend(present)
            continue
        if rule.read is None:
            migration.lost |= dict.fromkeys(present, "it is written here, and not read")
            continue
        try:
            read = read_rule(rule, settings)
        except StrettoError as error:
            if "world-size" in present:
                raise
            note = f"{error.message}{_hint(error)}"
            if present:
                migration.lost |= dict.fromkeys(present, note)
            elif _VOCAB not in rule.fields and note not in migration.notes:
                migration.notes.append(note)
            continue
        values |= read
        if present and read:
            migration.mapped.append(Mapped(settings=present, fields=read))
        elif _VOCAB in read:
            vocab_is_default = bool(framework.needless)
        for name, value in () if read else present.items():  # as those of experts in a model without any
            if framework.is_default(name, value):
                migration.needless.setdefault("the default", []).append(name)
            else:
                migration.lost[name] = framework.lost(name, value) or "by itself it has no field here"
    if vocab_is_default and values.get(_TOKENIZER) is not None:
        del values[_VOCAB]  # the tokenizer knows better how many entries it has than its kind
    return values


def _find_unbuilt(values: Mapping[str, Any], framework: ExternalFramework, migration: Migration) -> None:
    """Name the settings without which the model has fewer parts that can be planned and not yet built."""
    numbers = {**values, _VOCAB: values.get(_VOCAB) or _TRAINED}
    parts = job_from(numbers).shape.unsupported_parts
    for rule in framework.rules:
        with suppress(StrettoError, TypeError):  # no model is without it
            job = job_from({name: value for name, value in numbers.items() if name not in rule.fields})
            if gone := [part for part in parts if part not in job.shape.unsupported_parts]:
                instead = " ".join(f"--{k} {v}" for k, v in rule.write(values_of(job)).items())
                reason = f"{', '.join(gone)} can be planned, not yet built; mapped would be {instead}"
                migration.lost[rule.settings[0]] = reason
    migration.mapped = [item for item in migration.mapped if not migration.lost.keys() & item.settings.keys()]


def _sections(values: Mapping[str, Any], migration: Migration, name: str) -> dict[str, dict[str, Any]]:
    """Return the sections of the config, with defaults of the other framework where they differ from
    Stretto's.
    """
    explicit = {field for rule in migration.mapped for field in rule.fields}
    vocab = values.get(_VOCAB)
    with reading("its arguments together"):
        job = job_from({**values, _VOCAB: vocab or _TRAINED})
    model = model_section(job.shape)
    if vocab is None:
        del model["vocab"]
    elif values.get(_TOKENIZER) is None and vocab < _TRAINED:
        values = {**values, "data.vocab": max(257, vocab)}
    initial = asdict(Initial())
    model |= {key: value for key, value in asdict(job.initial).items() if value != initial[key]}
    sections: dict[str, dict[str, Any]] = {"model": model}
    for path in RUN_DEFAULTS:
        section, _, key = path.partition(".")
        if section == "model" or path not in values:
            continue
        value = values[path]
        value = list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
        if path not in explicit and value == RUN_DEFAULTS[path]:
            continue
        inside = sections.setdefault(section, {})
        *inner, key = key.split(".")
        for deeper in inner:
            inside = inside.setdefault(deeper, {})
        inside[key] = value
    sections.setdefault("run", {}).setdefault("name", name)
    # a text at the end would load the whole model in one process
    sections["sample"] = {"tokens": 0}
    return sections


def _accept(sections: dict[str, dict[str, Any]], migration: Migration) -> None:
    """Remove values that no config takes; their settings are lost."""
    while True:
        path, message = next(iter(wrong_fields(TrainConfig, sections).items()), ((), ""))
        if not message:
            return
        inside: Any = sections
        for key in path[:-1]:
            inside = inside.get(key, {})
        if len(path) < 2 or inside.pop(path[-1], None) is None:
            raise StrettoError(f"no config holds this job: {message}")
        field = ".".join(map(str, path))
        reason = f"no config takes it: {message}"
        for rule in migration.mapped:
            if field in rule.fields:
                migration.lost |= dict.fromkeys(rule.settings, reason)


def _overridden(
    resolved: Mapping[str, Any], sections: Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the sections as written, with resolved values for the fields that overrides set."""
    overridden = {name: dict(fields) for name, fields in sections.items()}
    for override in overrides:
        *path, key = override.partition("=")[0].split(".")
        target: Any = overridden
        source: Any = resolved
        for name in path:
            target, source = target.setdefault(name, {}), source[name]
        target[key] = source[key]
    return overridden


def _written(sections: Mapping[str, Any], migration: Migration, about: str) -> str:
    """Return the YAML, with settings that have no counterpart as comments above it."""
    lines = [f"# From {about}, by `stretto migrate`."]
    lines += [f"# not mapped: {name}: {reason}" for name, reason in migration.lost.items()]
    lines += [f"# differs: {name}: {reason}" for name, reason in migration.differs.items()]
    filled = {name: fields for name, fields in sections.items() if fields}
    text = yaml.dump(filled, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(lines) + "\n" + comment_required_markers(text)


def _check(migration: Migration) -> None:
    """Raise for a job that is not legal anywhere; record what this machine lacks."""
    assert migration.config is not None
    from stretto.run.config.job import job_of

    raise_first(problems(job_of(migration.config)))
    fields = set(migration.required)
    migration.notes += [f"{name} is to be filled in: {FIELDS[name][1]}" for name in sorted(fields)]
    try:
        lacking = find_problems(migration.config)
    except OSError as error:  # such as a path that is too long for this machine
        migration.missing = [f"files of this config cannot be looked for: {error.strerror}"]
    else:
        migration.missing = [f"{problem.message}{_hint(problem)}" for problem in lacking]
