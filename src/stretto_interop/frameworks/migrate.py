"""A framework's text as a config of ours, with the fate of every setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from stretto.errors import StrettoError
from stretto.run.config.check import find_problems
from stretto.run.config.data import DataConfig
from stretto.run.config.load import parse, plain_values
from stretto.run.config.required import FIELDS, REQUIRED, explain_marks
from stretto.run.config.run_checks import raise_first
from stretto.run.config.schema import TrainConfig
from stretto.run.config.source import CoreDumper
from stretto.run.config.validation import wrong_fields
from stretto.run.config.written import model_section
from stretto.spec.initial import Initial
from stretto.spec.rules import problems
from stretto_interop.frameworks.choices import RUN_DEFAULTS, job_from, reading
from stretto_interop.frameworks.mapping import (
    Former,
    Framework,
    NamedFile,
    Remark,
    Settings,
    Start,
    Unread,
    read_rule,
)

# without them there is no run, and nothing of ours would be right by itself
_NEEDED = ("data.source", "train.steps", "optim.lr")
_SIZE = "model.vocab"
_TRAINED = DataConfig.vocab  # entries of a tokenizer that is trained


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """Settings of one rule that the text has, and the fields of a config that they became."""

    settings: Settings
    fields: Mapping[str, Any]


@dataclass(kw_only=True)
class Migration:
    """A config of another framework's text.

    Attributes:
        text: the YAML.
        config: as it resolves.
        mapped: settings and what they became.
        needless: settings that a run here is the same without, by the reason.
        lost: settings without a counterpart, or of which only a part is taken, and why.
        differs: settings that are mapped, and in what the run is not as they say.
        notes: what the text leaves open, in sentences.
        here: what this machine lacks to run the config, in sentences.
    """

    text: str = ""
    config: TrainConfig | None = None
    mapped: list[Mapped] = field(default_factory=list[Mapped])
    needless: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    differs: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    here: list[str] = field(default_factory=list[str])

    @property
    def required(self) -> tuple[str, ...]:
        """Fields that are left to fill in."""
        return () if self.config is None else self.config.required


def migrate(
    framework: Framework,
    text: str,
    source: str,
    start: Start | None = None,
    overrides: Sequence[str] = (),
    *,
    name: str = "train",
) -> Migration:
    """The config of a text, in which each of its settings is a field, needless, or named as lost.

    Args:
        source: where the text comes from, for errors.
        overrides: fields that are said beside the text, as in "train.steps=10", and win.
        name: of the run, where the text has none.

    Raises:
        StrettoError: no such text, sizes that make no model, or a job that is not legal.
    """
    assert framework.parse is not None
    with reading(source):
        parsed = framework.parse(text, source, start or Start())
    made = Migration()
    for setting, value in parsed.items():
        if isinstance(value, Former):
            made.needless.setdefault(f"read as {value.instead}", []).append(setting)
        elif isinstance(value, Unread):
            made.lost[setting] = f"{value.error.message.removeprefix(f'{source}: ')}{_hint(value.error)}"
        elif isinstance(value, Remark):
            made.notes.append(value.text)
    other = Former | Unread | NamedFile | Remark
    settings = {key: value for key, value in parsed.items() if not isinstance(value, other)}
    values = _read(framework, settings, made)
    for setting, value in parsed.items():
        if isinstance(value, NamedFile):
            beside = framework.files[setting](
                value, values, {name for one in made.mapped for name in one.fields}
            )
            values |= beside.fields
            made.lost |= beside.lost
            made.differs |= beside.differs
            if beside.fields:
                made.mapped.append(Mapped(settings={setting: value.path}, fields=beside.fields))
    for setting, value in settings.items():
        if setting not in framework.settings:
            _without_rule(framework, setting, value, made)
    made.differs |= dict(framework.differs(settings))
    sections = _sections(values, made, name)
    _accept(sections, made)
    for required in _NEEDED:
        section, key = required.split(".")
        if key not in sections.setdefault(section, {}):
            sections[section][key] = REQUIRED
    about = f"{source} ({framework.title})"
    made.text = _written(sections, made, about)
    made.config = parse(made.text, source, overrides, name=name)
    if overrides:
        made.text = _written(_less(plain_values(made.config), sections, overrides), made, about)
    _check(made)
    return made


def _hint(error: StrettoError) -> str:
    return f" ({error.hint})" if error.hint else ""


def _read(framework: Framework, settings: Settings, made: Migration) -> dict[str, Any]:
    """The choices of all rules; a rule that cannot read its settings loses them."""
    values = dict[str, Any]()
    for rule in framework.rules:
        there = {name: settings[name] for name in rule.settings if name in settings}
        if not rule.choices:
            if there:
                made.needless.setdefault("how a kernel works is Stretto's own", []).extend(there)
            continue
        if rule.read is None:
            made.lost |= dict.fromkeys(there, "it is written here, and not read")
            continue
        try:
            choices = read_rule(rule, settings)
        except StrettoError as error:
            if "world-size" in there:
                raise
            if there:
                made.lost |= dict.fromkeys(there, f"{error.message}{_hint(error)}")
            elif _SIZE not in rule.choices and (note := f"{error.message}{_hint(error)}") not in made.notes:
                made.notes.append(note)
            continue
        values |= choices
        if there and not choices:
            _without_field(framework, there, made)
        elif there:
            made.mapped.append(Mapped(settings=there, fields=dict(choices)))
        elif _SIZE in choices and framework.needless:
            values["guess"] = choices[_SIZE]
    if "guess" in values and values.get("data.tokenizer") is not None:
        del values[_SIZE]  # the tokenizer knows better how many entries it has than its kind
    values.pop("guess", None)
    return values


def _without_field(framework: Framework, settings: Settings, made: Migration) -> None:
    """Settings that say nothing of a job, as those of experts where there are none."""
    for name, value in settings.items():
        if framework.usual is not None and framework.usual(name, value):
            made.needless.setdefault("the usual value", []).append(name)
        else:
            why = framework.lost(name, value) if framework.lost is not None else None
            made.lost[name] = why or "by itself it has no field here"


def _without_rule(framework: Framework, name: str, value: Any, made: Migration) -> None:
    why = framework.lost(name, value) if framework.lost is not None else None
    if why is not None:
        made.lost[name] = why
    else:
        made.needless.setdefault(framework.needless.get(name, "the usual value"), []).append(name)


def _sections(values: Mapping[str, Any], made: Migration, name: str) -> dict[str, dict[str, Any]]:
    """The sections of the config; of what the text leaves out, those values that are not usual here."""
    said = {field for one in made.mapped for field in one.fields}
    vocab = values.get(_SIZE)
    with reading("its arguments together"):
        job = job_from({**values, _SIZE: vocab or _TRAINED})
    model = model_section(job.shape)
    if vocab is None:
        del model["vocab"]
    elif values.get("data.tokenizer") is None and vocab < _TRAINED:
        values = {**values, "data.vocab": max(257, vocab)}
    usual = asdict(Initial())
    model |= {key: value for key, value in asdict(job.initial).items() if value != usual[key]}
    sections: dict[str, dict[str, Any]] = {"model": model}
    for path in RUN_DEFAULTS:
        section, _, key = path.partition(".")
        if section == "model" or path not in values:
            continue
        value = values[path]
        value = list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
        if path not in said and value == RUN_DEFAULTS[path]:
            continue
        at = sections.setdefault(section, {})
        *inner, key = key.split(".")
        for one in inner:
            at = at.setdefault(one, {})
        at[key] = value
    sections.setdefault("run", {}).setdefault("name", name)
    # a text at the end would load the whole model in one process
    sections["sample"] = {"tokens": 0}
    return sections


def _accept(sections: dict[str, dict[str, Any]], made: Migration) -> None:
    """Leave out values that no config takes; their settings are lost."""
    while True:
        path, message = next(iter(wrong_fields(TrainConfig, sections).items()), ((), ""))
        if not message:
            return
        at: Any = sections
        for key in path[:-1]:
            at = at.get(key, {})
        if len(path) < 2 or at.pop(path[-1], None) is None:
            raise StrettoError(f"no config holds this job: {message}")
        field = ".".join(map(str, path))
        why = f"no config takes it: {message}"
        for one in made.mapped:
            if field in one.fields:
                made.lost |= dict.fromkeys(one.settings, why)


def _less(
    resolved: Mapping[str, Any], sections: Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The sections as written, with the fields that were said beside them as they resolve."""
    made = {name: dict(fields) for name, fields in sections.items()}
    for override in overrides:
        *path, key = override.partition("=")[0].split(".")
        at: Any = made
        source: Any = resolved
        for one in path:
            at, source = at.setdefault(one, {}), source[one]
        at[key] = source[key]
    return made


def _written(sections: Mapping[str, Any], made: Migration, about: str) -> str:
    """The YAML, with what has no counterpart as comments above it."""
    lines = [f"# From {about}, by `stretto migrate`."]
    lines += [f"# not mapped: {name}: {why}" for name, why in made.lost.items()]
    lines += [f"# differs: {name}: {why}" for name, why in made.differs.items()]
    kept = {name: fields for name, fields in sections.items() if fields}
    text = yaml.dump(kept, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(lines) + "\n" + explain_marks(text)


def _check(made: Migration) -> None:
    """Raise for a job that is not legal anywhere; note what this machine lacks."""
    assert made.config is not None
    from stretto.run.config.job import job_of

    raise_first(problems(job_of(made.config)))
    fields = set(made.required)
    made.notes += [f"{name} is to be filled in: {FIELDS[name][1]}" for name in sorted(fields)]
    made.here = [f"{one.message}{_hint(one)}" for one in find_problems(made.config)]
