"""The mapping between our choices and a framework's settings, declared once for both directions.

A framework is a list of rules. Each rule names the choices it is about and the settings it writes, and turns
one into the other. All rules of a framework together are about every choice: what the framework has no word
for is refused by name where it would change the job (`only`), and listed where it would not (`aside`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from stretto.errors import Problem, StrettoError, nearest
from stretto.planner.assumptions import Assumptions, software_profile
from stretto.run.config.run_checks import raise_first
from stretto.run.config.schema import TrainConfig
from stretto.spec.attention import AttentionShape
from stretto.spec.job import Job
from stretto.spec.presets import PRESETS, preset
from stretto.spec.rules import problems
from stretto.spec.shape import ModelShape, fields_of
from stretto_interop.frameworks.choices import (
    NAMES,
    PRICED,
    RUN_DEFAULTS,
    Choices,
    choices_of,
    job_from,
    reading,
)

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Open:
    """The value of an undecided setting: a framework writes a place to fill in.

    Attributes:
        choice: the name of ours.
        example: a value that it could have.
    """

    choice: str
    example: Any


@dataclass(frozen=True)
class Unread:
    """A setting that is there and whose value could not be taken.

    Attributes:
        matters: to a price.
    """

    error: StrettoError
    matters: bool


@dataclass(frozen=True)
class Former:
    """A setting of another version, which is read as others that stand beside it.

    Attributes:
        instead: these, as they would be said.
    """

    instead: str


@dataclass(frozen=True)
class Remark:
    """No setting: what of the text is not as it may look, in a sentence."""

    text: str


@dataclass(frozen=True)
class NamedFile:
    """A setting that names a file of another framework's.

    Attributes:
        text: of the file, where the script writes it itself; None: it is to be read.
    """

    path: str
    text: str | None = None


@dataclass(kw_only=True)
class Beside:
    """What such a file says beside the settings.

    Attributes:
        fields: choices, which win.
        lost, differs: as those of a `Migration`, by the setting.
    """

    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    differs: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Choices and the settings they become.

    Attributes:
        choices: names of ours that the rule maps or refuses.
        settings: names of theirs that it writes and reads.
        write: settings of a job; raises Problem for a choice that the framework does not have. Of `settings`
            it may leave out those that the framework then takes for the same.
        read: choices of their settings, which lack what was left out; None: they say nothing about a job.
        notes: what is written beside the settings, as comments: choices that are left out since they change
            nothing of what is computed, and differences that no setting removes.
    """

    choices: tuple[str, ...]
    settings: tuple[str, ...] = ()
    write: Callable[[Choices], Settings]
    read: Callable[[Settings], Mapping[str, Any]] | None = None
    notes: Callable[[Choices], Iterable[str]] = lambda _: ()


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a text is started, where it is a script.

    Attributes:
        devices: processes, where the text does not say how many there are.
        wins: `devices` is right whatever the text says.
        words: behind the script's name.
        variables: of the environment.
        program: what it trains, "gpt", where its program's name does not tell.
    """

    devices: int | None = None
    wins: bool = False
    words: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    program: str | None = None


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework whose configs can be written and read.

    Attributes:
        name: as `--emit` and `--from` take it.
        title: with the version that its settings are of.
        rules: together about all `choices.NAMES`.
        render: settings, and notes for comments, as the text that the framework takes.
        parse: the settings of such a text and what stands beside them; None: it cannot be read. It takes the
            text, where it comes from (for errors), and how it is started.
        unpriced: settings, by patterns of their names, that change no time or memory, and why.
        unread: settings that are refused when read, by patterns, and why.
        as_run: a job as the framework runs it, with what it keeps and fuses, for predictions; of the job and
            the settings that were read (none: as they are written).
        remarks: what a prediction of such settings leaves out, in sentences.
        software: profile of its kernels (`planner/data/software.yaml`), as jobs are written for it.
        software_read: the profile where settings that were read choose it; None: it is `software`.
        overlaps: whether gradients are reduced while the backward computes; of the settings that were read.
        plans: choices that a search for it is fixed to, as `--fix` takes them.
        needless: settings that no rule reads and that a run here is the same without, and why.
        lost: why a setting that no rule reads, with that value, has no counterpart here; None: it needs none.
        usual: whether a value is what the framework takes where the setting is left out.
        differs: settings that rules read, and in what a run here is not as they say.
        files: settings that name files of other frameworks, and how these are read: of the file, the values
            of all choices, and those that settings name.
    """

    name: str
    title: str
    rules: Sequence[Rule]
    render: Callable[[Settings, Sequence[str]], str]
    parse: Callable[[str, str, Start], Settings] | None = None
    unpriced: Mapping[str, str] = field(default_factory=dict[str, str])
    unread: Mapping[str, str] = field(default_factory=dict[str, str])
    as_run: Callable[[Job, Settings], Job]
    remarks: Callable[[Settings], Iterable[str]] = lambda _: ()
    software: str
    software_read: Callable[[Settings], str] | None = None
    overlaps: Callable[[Settings], bool] = lambda _: True
    plans: Sequence[str] = ()
    needless: Mapping[str, str] = field(default_factory=dict[str, str])
    lost: Callable[[str, Any], str | None] | None = None
    usual: Callable[[str, Any], bool] | None = None
    differs: Callable[[Settings], Iterable[tuple[str, str]]] = lambda _: ()
    files: Mapping[str, Callable[[NamedFile, Settings, Collection[str]], Beside]] = field(
        default_factory=dict[str, Callable[[NamedFile, Settings, Collection[str]], Beside]]
    )

    @property
    def assumptions(self) -> Assumptions:
        """How its software executes a job that is written for it."""
        return Assumptions(software=software_profile(self.software))

    def assumptions_of(self, settings: Settings) -> Assumptions:
        """How its software executes a job of settings that were read."""
        name = self.software if self.software_read is None else self.software_read(settings)
        return Assumptions(software=software_profile(name), overlap=self.overlaps(settings))

    def why_unread(self, setting: str) -> str | None:
        """Why a setting is refused when it is read; None: it is not."""
        return _matching(self.unread, setting)

    @property
    def settings(self) -> dict[str, Rule]:
        """Every setting that a rule writes and reads."""
        return {name: rule for rule in self.rules for name in rule.settings}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A job of another framework.

    Attributes:
        assumptions: how its software executes the job with these settings.
        ignored: settings that change no time or memory, by the reason.
        remarks: what the prediction leaves out, in sentences.
        settings: all that were read.
    """

    job: Job
    assumptions: Assumptions
    ignored: Mapping[str, tuple[str, ...]]
    remarks: Sequence[str]
    settings: Settings


# ------------------------------------------------------------------ rules


def under(section: str, names: str) -> tuple[str, ...]:
    """The names of a text, under a section: `under("layout", "tp cp")` is layout.tp and layout.cp."""
    return tuple(f"{section}.{name}" for name in names.split())


def same(
    setting: str,
    choice: str,
    *,
    usual: Any = None,
    to: Callable[[Any], Any] = lambda value: value,
    back: Callable[[Any], Any] = lambda value: value,
) -> Rule:
    """One choice that is one setting, which is always written.

    Args:
        usual: what the framework takes where the setting is left out, in its own values.
        to, back: from our value to theirs, and back.
    """

    def write(choices: Choices) -> Settings:
        value = choices[choice]
        return {setting: Open(choice, value) if choice in choices.open else to(value)}

    def read(settings: Settings) -> Mapping[str, Any]:
        value = settings.get(setting, usual)
        return {} if value is None else {choice: back(value)}

    return Rule(choices=(choice,), settings=(setting,), write=write, read=read)


def one_of(
    setting: str,
    choice: str,
    values: Mapping[Hashable, Any],
    *,
    usual: Any,
    instead: str,
    also: Mapping[Any, Hashable] | None = None,
) -> Rule:
    """One choice that is one setting, for the values that the framework has; others are refused.

    Args:
        values: theirs by ours; several of ours may be one of theirs, which then reads as the first.
        instead: what the framework has, in a sentence that names it.
        also: ours by further values of theirs, which are read and never written.
    """

    def write(choices: Choices) -> Settings:
        value = choices[choice]
        if value not in values:
            raise refused(choice, value, instead, values)
        return {setting: values[value]}

    def read(settings: Settings) -> Mapping[str, Any]:
        value = settings.get(setting, usual)
        known: dict[Any, Hashable] = dict(also or {})
        for ours, theirs in values.items():
            known.setdefault(theirs, ours)
        if value in known:
            return {choice: known[value]}
        allowed = ", ".join(map(str, known))
        raise StrettoError(f"{setting} is {value}: not modelled here", hint=f"what is: {allowed}")

    return Rule(choices=(choice,), settings=(setting,), write=write, read=read)


def flag(setting: str, choice: str, *, when: bool = True) -> Rule:
    """One choice of yes or no that is a setting which is there or not; it is there for `when`."""

    def write(choices: Choices) -> Settings:
        return {setting: True} if bool(choices[choice]) is when else {}

    def read(settings: Settings) -> Mapping[str, Any]:
        return {choice: when if setting in settings else not when}

    return Rule(choices=(choice,), settings=(setting,), write=write, read=read)


def only(choice: str, allowed: Iterable[Any], instead: str) -> Rule:
    """One choice that the framework has no setting for; values other than what it does are refused."""
    known = tuple(allowed)

    def write(choices: Choices) -> Settings:
        if choices[choice] not in known:
            raise refused(choice, choices[choice], instead, known)
        return {}

    return Rule(choices=(choice,), write=write)


def without(section: str, kind: type[Any], tells: str, instead: str) -> Rule:
    """All choices of a part that the framework does not have.

    Args:
        kind: the dataclass whose fields they are.
        tells: the field that says whether a job has the part: it is None where not.
    """

    def write(choices: Choices) -> Settings:
        value = choices[f"{section}.{tells}"]
        if value is not None:
            raise refused(f"{section}.{tells}", value, instead, (None,))
        return {}

    return Rule(choices=tuple(f"{section}.{one.name}" for one in fields(kind)), write=write)


def without_encoder(instead: str, *choices: str) -> Rule:
    """What only a model with an encoder has, which the framework has no setting for.

    Args:
        choices: beside the length of the decoder's samples and the ranks that encode.
    """

    def write(among: Choices) -> Settings:
        usual = {f"model.attention.{one.name}": one.default for one in fields(AttentionShape)}
        usual |= {"model.encoder_layers": 0, "layout.encoder_pp": None}
        usual["data.target_sequence"] = among["data.sequence"]
        for name in ("model.encoder_layers", "data.target_sequence", "layout.encoder_pp", *choices):
            if among[name] != usual[name]:
                raise refused(name, among[name], instead, (usual[name],))
        return {}

    return Rule(choices=("data.target_sequence", "layout.encoder_pp", *choices), write=write)


def aside(why: str, *choices: str) -> Rule:
    """Choices that change nothing of what a step computes, and that the framework has no setting for; those
    that are not the usual ones are listed beside what is written.
    """

    def notes(among: Choices) -> Iterable[str]:
        changed = (name for name in choices if among[name] != RUN_DEFAULTS.get(name))
        return (f"left out: {name}={shown(among[name])} ({why})" for name in changed)

    return Rule(choices=choices, write=lambda _: {}, notes=notes)


def next_token(instead: str) -> tuple[Rule, Rule]:
    """The objective of a decoder alone, and what belongs to those of a model with an encoder."""
    names = ("noise_density", "mean_span_length", "sentinels", "first_sentinel")
    return (
        only("data.objective", (None, "causal"), instead),
        aside("no spans are cut out of the text", *(f"data.{name}" for name in names)),
    )


def rule(
    choices: Sequence[str],
    settings: Sequence[str],
    write: Callable[[Choices], Settings],
    read: Callable[[Settings], Mapping[str, Any]] | None,
    notes: Callable[[Choices], Iterable[str]] = lambda _: (),
) -> Rule:
    """A rule of functions of its own."""
    return Rule(choices=tuple(choices), settings=tuple(settings), write=write, read=read, notes=notes)


def refused(choice: str, value: Any, instead: str, allowed: Iterable[Any]) -> Problem:
    """The error of a choice that a framework does not have.

    Args:
        instead: what it has, in a sentence that names it.
        allowed: values that it would take; the nearest is the fix.
    """
    texts = [shown(one) for one in allowed]
    near = nearest(shown(value), texts) or (texts[0] if texts else None)
    return Problem(choice, shown(value), instead, None if near is None else f"nearest: {choice}={near}")


def shown(value: Any) -> str:
    """A value as a config has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {one}' for key, one in value.items())}}}"  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return str(list(value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownArgumentType]


def check_batch(job: Job) -> None:
    """Raise Problem for a batch that is no whole number of microbatches in each replica."""
    if job.microbatches is None:
        step = job.layout.dp * job.micro_batch
        rule = f"it must be a multiple of micro_size x dp, which is {step}"
        fix = f"nearest: batch.global_size={max(1, round(job.global_batch / step)) * step}"
        raise Problem("batch.global_size", job.global_batch, rule, fix)


def model_words(shape: ModelShape) -> str:
    """A model in words: the preset of its sizes, or the sizes."""
    name = next((name for name in PRESETS if preset(name) == shape), None)
    if name is not None:
        return name
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "bias")
    words = [f"{size}={getattr(shape, size)}" for size in sizes]
    usual = ModelShape(family=shape.family, **{size: getattr(shape, size) for size in (*sizes, "sequence")})
    rest = [name for name in fields_of(shape) if name not in ("sequence", *sizes)]
    words += [word for name in rest for word in _differing(name, getattr(shape, name), getattr(usual, name))]
    return f"{shape.family} with {', '.join(words)}"


def _differing(name: str, value: Any, usual: Any) -> Iterator[str]:
    """What of a field is not usual; field by field where it is a shape of its own."""
    if value == usual:
        return
    if not is_dataclass(value):
        yield f"{name}={shown(value)}"
        return
    for one in fields(value):
        default = one.default if usual is None else getattr(usual, one.name)
        yield from _differing(f"{name}.{one.name}", getattr(value, one.name), default)


# ------------------------------------------------------------------ both directions


def emit(framework: Framework, job: Job, config: TrainConfig | None = None, about: str = "") -> str:
    """The job as the framework takes it.

    Args:
        config: what the job is of, for choices of the run around it; None: a plan's, which leaves them open.
        about: first lines, as comments.

    Raises:
        StrettoError: a choice that the framework does not have; tells how many more there are.
    """
    choices = choices_of(job, config)
    settings, notes = settings_of(framework, choices)
    return framework.render(settings, [*about.splitlines(), *notes])


def settings_of(framework: Framework, choices: Choices) -> tuple[dict[str, Any], list[str]]:
    """The framework's settings, and a line for each choice that it has no setting for and that changes
    nothing of what is computed.

    Raises:
        StrettoError: as `emit`.
    """
    settings, notes, wrong = _written(framework, choices)
    raise_first(wrong)
    return settings, notes


def refusals(framework: Framework, job: Job, config: TrainConfig | None = None) -> list[Problem]:
    """The choices of a job that the framework does not have.

    Args:
        config: as in `emit`.
    """
    try:
        return _written(framework, choices_of(job, config))[2]
    except StrettoError as error:  # of no single choice
        return [error if isinstance(error, Problem) else error.within("layout")]


def _written(framework: Framework, choices: Choices) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """Settings and notes of `settings_of`, and the choices that the framework does not have."""
    settings: dict[str, Any] = {}
    notes, wrong = list[str](), list[Problem]()
    for rule in framework.rules:
        if rule.choices and choices.unsaid.issuperset(rule.choices):
            continue  # the framework's own defaults
        try:
            settings |= rule.write(choices)
        except Problem as problem:
            wrong.append(problem)
        notes += rule.notes(choices)
    return settings, notes, wrong


def read_rule(rule: Rule, settings: Settings) -> Mapping[str, Any]:
    """The choices of a rule.

    Raises:
        StrettoError: a value that is not modelled, or of a kind that the setting does not take.
    """
    assert rule.read is not None
    there = [f"{name} is {shown(settings[name])}" for name in rule.settings if name in settings]
    with reading(", ".join(there) or ", ".join(rule.settings)):
        return rule.read(settings)


def read(
    framework: Framework,
    text: str,
    source: str,
    devices: int | None = None,
    beside: Mapping[str, Any] | None = None,
) -> Reading:
    """The job that a framework's text describes.

    Args:
        source: where the text comes from, for errors.
        devices: of the cluster, where the text does not say how many there are.
        beside: choices that are said beside the text, and win.

    Raises:
        StrettoError: not such a text, a setting that nothing is known of, a value that is not modelled, or a
            job that is not legal.
    """
    if framework.parse is None:
        raise StrettoError(f"what {framework.title} runs cannot be read", hint="it can be written: --emit")
    with reading(source):
        parsed = framework.parse(text, source, Start(devices=devices))
    known, ignored = framework.settings, dict[str, list[str]]()
    for name, value in parsed.items():
        if isinstance(value, Unread) and value.matters:
            raise value.error
        if isinstance(value, NamedFile):
            hint = "`stretto migrate` reads it; predict takes the config that this makes"
            raise StrettoError(f"{source}: --{name} {value.path} is a file that is not priced", hint=hint)
        if name in known or name.startswith("$") or isinstance(value, Former | Remark):
            continue
        if (why := framework.why_unread(name)) is not None:
            raise StrettoError(f"{source}: {name} is {shown(value)}: {why}", hint=f"leave {name} out")
        why = _matching(framework.unpriced, name)
        if why is None:
            near = nearest(name, [*known, *framework.unpriced, *framework.unread])
            hint = f"did you mean {near}?" if near else None
            raise StrettoError(f"{source}: {framework.title} has no {name}", hint=hint)
        ignored.setdefault(why, []).append(name)
    settings = {
        name: value for name, value in parsed.items() if not isinstance(value, Former | Unread | Remark)
    }
    values, unread = dict[str, Any](), list[str]()
    for rule in framework.rules:
        if rule.read is not None:
            try:
                values |= read_rule(rule, settings)
            except StrettoError as error:
                if PRICED & set(rule.choices) or not all(name.startswith("data.") for name in rule.choices):
                    raise
                unread.append(f"not read, and no part of the price: {error.message}")
    values |= beside or {}
    if values.get("model.family") is None:
        raise StrettoError(f"{source} does not say which model it is", hint="say it with --model")
    with reading(f"{source}: its settings together"):
        job = job_from(values)
        raise_first(problems(job))
        return Reading(
            job=framework.as_run(job, settings),
            assumptions=framework.assumptions_of(settings),
            ignored={why: tuple(names) for why, names in ignored.items()},
            remarks=(
                *(value.text for value in parsed.values() if isinstance(value, Remark)),
                *unread,
                *framework.remarks(settings),
                *(
                    f"nothing tells what {name} holds: it is taken to be empty"
                    for name in parsed
                    if name[0] == "$"
                ),
            ),
            settings=settings,
        )


def _matching(patterns: Mapping[str, str], name: str) -> str | None:
    return next((why for pattern, why in patterns.items() if fnmatchcase(name, pattern)), None)


def unmapped(framework: Framework) -> tuple[set[str], set[str]]:
    """Choices that no rule is about, and those that several are, or that there are none of."""
    about = [name for rule in framework.rules for name in rule.choices]
    return set(NAMES) - set(about), {name for name in about if about.count(name) > 1 or name not in NAMES}
