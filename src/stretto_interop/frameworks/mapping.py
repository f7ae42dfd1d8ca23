"""The mapping between a job and a framework's settings, declared once for both directions.

A framework is a list of rules. Each names the fields of a job that it is about and the settings that it
writes, and turns one into the other. All rules of a framework together are about every field: one that the
framework has no setting for is refused by name if it would change the job (`restricted`), and listed if it
would not (`ignored`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, TypeVar

from stretto.errors import Problem, StrettoError, nearest
from stretto.job.job import Job
from stretto.job.presets import PRESETS, preset
from stretto.job.rules import problems
from stretto.job.shape import ModelShape, fields_of
from stretto.planner.assumptions import Assumptions, software_profile
from stretto.planner.machines.reading import shipped
from stretto.run.config.run_checks import raise_first
from stretto_interop.frameworks.fields import (
    JOB,
    MODEL,
    NAMES,
    PRICED,
    RUN,
    RUN_DEFAULTS,
    JobValues,
    job_from,
    name_of,
    reading,
    values_of,
)

Settings = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Unset:
    """The value of an undecided setting, for which a framework writes a placeholder.

    Attributes:
        field: the field of the job.
        example: a possible value.
    """

    field: object
    example: Any

    @property
    def name(self) -> str:
        """The field's name."""
        return name_of(self.field)


@dataclass(kw_only=True)
class FileSettings:
    """Settings from a file of another framework that a setting names.

    Attributes:
        fields: values by field name; they override those of the settings.
        lost, differs: as in `Migration`, by setting.
    """

    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    differs: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(kw_only=True)
class ParsedSettings:
    """The contents of a framework's text.

    Attributes:
        settings: values by name.
        unsupported: settings whose values cannot be read: the error, and True if a price depends on them.
        deprecated: settings of other versions, and the current settings that they are read as.
        files: paths of files of other frameworks, by the setting that names them.
        notes: sentences about what may look otherwise in the text.
    """

    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    unsupported: dict[str, tuple[StrettoError, bool]] = field(
        default_factory=dict[str, tuple[StrettoError, bool]]
    )
    deprecated: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class Start:
    """The way in which a script is started.

    Attributes:
        devices: number of processes, if the text does not give it.
        wins: True if `devices` overrides the text.
        arguments: command-line arguments of the script.
        variables: the environment.
        program: what the script trains ("gpt"), if the name of its program is unknown.
    """

    devices: int | None = None
    wins: bool = False
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    program: str | None = None


Values = Mapping[Any, Any]  # by field
Writer = Callable[[JobValues], Settings]
Reader = Callable[[Settings], Values]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Fields of a job and the settings that they become.

    Attributes:
        fields: names of the fields that the rule maps or refuses.
        settings: names of the settings that it writes and reads.
        write: returns the settings of a job; raises Problem for a value that the framework does not have.
            Settings whose absence means the same may be left out.
        read: returns values by field, without those whose settings are absent; None if the settings do not
            describe a job.
        notes: yields comments on what is written: fields left out because they do not change what is
            computed, and differences that no setting removes.
    """

    fields: tuple[str, ...]
    settings: tuple[str, ...]
    write: Writer
    read: Reader | None
    notes: Callable[[JobValues], Iterable[str]]


@dataclass(frozen=True, kw_only=True)
class ExternalFramework:
    """A framework whose configs can be written and read.

    Attributes:
        name: its name for `--emit` and `--from`.
        title: its full name, with the version of its settings.
        rules: together they cover all `fields.NAMES`.
        render: returns the framework's text for settings, with notes as comments.
        parse: reads such a text, given its source (for errors) and how it is started; None if it cannot be
            read.
        unpriced: name patterns of settings that change no time or memory, and why.
        unread: name patterns of settings that are refused when read, and why.
        as_run: returns the job as the framework runs it, for predictions, given the settings that were read
            (empty: as they are written).
        remarks: yields sentences on what a prediction of such settings leaves out.
        software: returns the name of its kernels' profile (`planner/data/software.yaml`) for the settings
            that were read.
        overlaps: True if, with the settings that were read, gradients are reduced during the backward.
        plans: choices that a search for it is restricted to, as `--fix` takes them.
        needless: settings that no rule reads and a run does not need, and why.
        lost: returns why a setting that no rule reads has no counterpart for this value; None if it needs
            none.
        is_default: True if a value is the framework's default.
        differs: yields settings that rules read, and how a run differs from them.
        files: readers of files that settings name, given the path, the values so far, and the names of fields
            that settings have set.
    """

    name: str
    title: str
    rules: Sequence[Rule]
    render: Callable[[Settings, Sequence[str]], str]
    parse: Callable[[str, str, Start], ParsedSettings] | None = None
    unpriced: Mapping[str, str] = field(default_factory=dict[str, str])
    unread: Mapping[str, str] = field(default_factory=dict[str, str])
    as_run: Callable[[Job, Settings], Job]
    remarks: Callable[[Settings], Iterable[str]] = lambda _: ()
    software: Callable[[Settings], str]
    overlaps: Callable[[Settings], bool] = lambda _: True
    plans: Sequence[str] = ()
    needless: Mapping[str, str] = field(default_factory=dict[str, str])
    lost: Callable[[str, Any], str | None] = lambda _, __: None
    is_default: Callable[[str, Any], bool] = lambda _, __: False
    differs: Callable[[Settings], Iterable[tuple[str, str]]] = lambda _: ()
    files: Mapping[str, Callable[[str, Settings, Collection[str]], FileSettings]] = field(
        default_factory=dict[str, Callable[[str, Settings, Collection[str]], FileSettings]]
    )

    @property
    def assumptions(self) -> Assumptions:
        """How its software executes a job written for it."""
        return Assumptions(software=software_profile(self.software({})))

    def why_unread(self, setting: str) -> str | None:
        """Return why a setting is refused when read, or None if it is not."""
        return _matching(self.unread, setting)

    @property
    def settings(self) -> dict[str, Rule]:
        """Every setting that a rule writes and reads."""
        return {name: rule for rule in self.rules for name in rule.settings}


@dataclass(frozen=True, kw_only=True)
class ForeignJob:
    """A job of another framework.

    Attributes:
        assumptions: how its software executes the job with these settings.
        ignored: settings that change no time or memory, by reason.
        remarks: sentences on what the prediction leaves out.
        settings: all settings that were read.
    """

    job: Job
    assumptions: Assumptions
    ignored: Mapping[str, tuple[str, ...]]
    remarks: Sequence[str]
    settings: Settings


# ------------------------------------------------------------------ rules


def rule(
    fields: object,
    settings: str | Iterable[str] = (),
    write: Writer = lambda _: {},
    read: Reader | None = None,
    notes: Callable[[JobValues], Iterable[str]] = lambda _: (),
) -> Rule:
    """Return a rule with functions of its own.

    Args:
        fields: a field, or a tuple of them.
        settings: names of settings, as a sequence or in one string.
    """
    names = settings.split() if isinstance(settings, str) else settings
    several: tuple[object, ...] = fields if isinstance(fields, tuple) else (fields,)
    return Rule(
        fields=tuple(map(name_of, several)), settings=tuple(names), write=write, read=read, notes=notes
    )


def under(section: str, names: str) -> tuple[str, ...]:
    """Return the names of settings in a section: `under("zero", "stage ratio")` is zero.stage and
    zero.ratio.
    """
    return tuple(f"{section}.{name}" for name in names.split())


# fields of a run's data, machine, reports and safeguards that frameworks keep elsewhere
AROUND = (
    *under("data", "tokenizer vocab end_of_text begin_of_text text_field format on_error split"),
    *under("data", "shuffle shuffle_window cache cache_gib chat_template too_long"),
    *under("train", "device backend threads timeout_s start_s hang_s restarts grace_s hooks"),
    *under("eval", "every batches"),
    *under("metrics", "to project tensorboard_dir peak_tflops trace profile profile_memory spans"),
    *under("sample", "prompt tokens temperature top_k"),
    *under("elastic", "layouts"),
    *under("run", "name dir private"),
    *under("guard", "on_nonfinite on_spike spike_sigma spike_window max_skips"),
    *under("guard", "check_replicas check_memory on_mismatch"),
    *under("checkpoint", "if_busy keep_every keep_best resume may_differ"),
)


USER_MODEL = under("model", "build arguments")  # of a model from a user's file


def renamed(
    setting: str,
    field: T,
    *,
    default: Any = None,
    to: Callable[[T], Any] = lambda value: value,
    back: Callable[[Any], T] = lambda value: value,
    notes: Callable[[JobValues], Iterable[str]] = lambda _: (),
) -> Rule:
    """Return the rule of a field that is a setting and is always written.

    Args:
        default: the framework's own value if the setting is absent.
        to, back: convert the field's value to the setting's, and back.
    """

    def write(values: JobValues) -> Settings:
        value = values[field]
        return {setting: Unset(field, value) if values.is_open(field) else to(value)}

    def read(settings: Settings) -> Values:
        value = settings.get(setting, default)
        return {} if value is None else {field: back(value)}

    return rule(field, [setting], write, read, notes)


def optional(setting: str, field: object) -> Rule:
    """Return the rule of a field that is a setting and is not written if the field is None."""
    name = name_of(field)
    return rule(
        field,
        [setting],
        write=lambda values: {} if values.values[name] is None else {setting: values.values[name]},
        read=lambda settings: {name: settings.get(setting)},
    )


def one_of(
    setting: str,
    field: Hashable,
    values: Mapping[Hashable, Any],
    *,
    default: Any,
    instead: str,
    also: Mapping[Any, Hashable] | None = None,
) -> Rule:
    """Return the rule of a field that is a setting, for the values that the framework has; others are
    refused.

    Args:
        values: the setting's value for each of the field's; if several map to one, it is read as the first.
        instead: a sentence that tells what the framework has.
        also: further values of the setting that are read and never written, with the field's values.
    """
    allowed: dict[Any, Hashable] = dict(also or {})
    for value, of_setting in values.items():
        allowed.setdefault(of_setting, value)

    def write(among: JobValues) -> Settings:
        require(among, field, values, instead)
        return {setting: values[among[field]]}

    def read(settings: Settings) -> Values:
        value = settings.get(setting, default)
        if value in allowed:
            return {field: allowed[value]}
        raise StrettoError(
            f"{setting} is {value}: not modelled here", hint=f"what is: {', '.join(map(str, allowed))}"
        )

    return rule(field, [setting], write, read)


def flag(setting: str, field: bool, *, when: bool = True) -> Rule:
    """Return the rule of a boolean field, whose setting is present if the field is `when`."""
    return rule(
        field,
        [setting],
        write=lambda values: {setting: True} if bool(values[field]) is when else {},
        read=lambda settings: {field: when if setting in settings else not when},
    )


def restricted(field: T, allowed: Iterable[T], instead: str) -> Rule:
    """Return the rule of a field that the framework has no setting for: only the values that it implements
    are accepted.
    """
    accepted = tuple(allowed)

    def write(values: JobValues) -> Settings:
        require(values, field, accepted, instead)
        return {}

    return rule(field, write=write)


def absent(instead: str, presence: object, fields: tuple[object, ...]) -> Rule:
    """Return the rule of all fields of a part of the model that the framework does not have.

    Args:
        presence: the field that is None in a job without the part.
    """

    def write(values: JobValues) -> Settings:
        require(values, presence, (None,), instead)
        return {}

    return rule((presence, *fields), write=write)


def without_encoder(instead: str, *fields: object) -> Rule:
    """Return the rule of the fields of a model with an encoder, for a framework without one.

    Args:
        fields: further fields, which have no values of their own in a decoder.
    """

    def write(values: JobValues) -> Settings:
        sequence = values[JOB.sequence]
        decoder = ((MODEL.encoder_layers, 0), (JOB.target_sequence, sequence), (JOB.encoder_pp, None))
        for entry, value in decoder:
            require(values, entry, (value,), instead)
        return {}

    return rule((JOB.target_sequence, JOB.encoder_pp, *fields), write=write)


def unsplit_experts(instead: str, settings: str | Iterable[str], read: Reader) -> Rule:
    """Return the rule of the tensor parallelism of experts, for a framework without it."""

    def write(values: JobValues) -> Settings:
        job = values.job
        split = job.layout.tp if job.expert_tp is None else job.expert_tp
        if job.layout.ep > 1 and split > 1:
            raise refused(JOB.expert_tp, split, instead, [1])
        return {}

    return rule(JOB.expert_tp, settings, write, read)


def ignored(reason: str, fields: object) -> Rule:
    """Return the rule of fields that do not change what a step computes and that the framework has no setting
    for; those that differ from their defaults are listed in a comment.
    """

    def notes(values: JobValues) -> Iterable[str]:
        changed = (name for name in listed.fields if values[name] != RUN_DEFAULTS.get(name))
        return (f"left out: {name}={shown(values[name])} ({reason})" for name in changed)

    listed = rule(fields, notes=notes)
    return listed


def next_token(instead: str) -> tuple[Rule, ...]:
    """Return the rules of a decoder's objective, of options of objectives with an encoder, and of parts of
    the user's in Python files.
    """
    data = RUN.data
    return (
        restricted(data.objective, (None, "causal"), instead),
        ignored(
            "no spans are cut out of the text",
            (data.noise_density, data.mean_span_length, data.sentinels, data.first_sentinel),
        ),
        restricted(JOB.loss, (None,), "the framework computes the cross-entropy"),
        *(restricted(name, (None, {}), "the framework builds its own models") for name in USER_MODEL),
        restricted(JOB.optimiser.arguments, ({},), "classes of other frameworks take other arguments"),
    )


def require(values: JobValues, field: object, allowed: Iterable[Any], instead: str) -> None:
    """Raise Problem, as of `refused`, for a value that is not allowed."""
    accepted = tuple(allowed)
    if values[field] not in accepted:
        raise refused(field, values[field], instead, accepted)


def refused(field: object, value: Any, instead: str, allowed: Iterable[Any]) -> Problem:
    """Return the error for a value that a framework does not have.

    Args:
        instead: a sentence that tells what the framework has.
        allowed: values that it takes; the error suggests the nearest.
    """
    texts = [shown(item) for item in allowed]
    closest = nearest(shown(value), texts) or (texts[0] if texts else None)
    name = name_of(field)
    return Problem(name, shown(value), instead, None if closest is None else f"nearest: {name}={closest}")


def shown(value: Any) -> str:
    """Format a value as in a config."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {inner}' for key, inner in value.items())}}}"  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return str(list(value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownArgumentType]


def check_batch(job: Job) -> None:
    """Raise Problem if the batch is not a whole number of microbatches in each replica."""
    if job.microbatches is None:
        step = job.layout.dp * job.micro_batch
        rule = f"it must be a multiple of micro_size x dp, which is {step}"
        fix = f"nearest: batch.global_size={max(1, round(job.global_batch / step)) * step}"
        raise Problem("batch.global_size", job.global_batch, rule, fix)


def describe_model(shape: ModelShape) -> str:
    """Describe a model: the preset with its sizes, or the sizes."""
    name = next((name for name in PRESETS if preset(name) == shape), None)
    if name is not None:
        return name
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "bias")
    features = [f"{size}={getattr(shape, size)}" for size in sizes]
    plain = ModelShape(family=shape.family, **{size: getattr(shape, size) for size in (*sizes, "sequence")})

    def differing(name: str, value: Any, default: Any) -> Iterator[str]:
        if value == default:
            return
        if not is_dataclass(value):
            yield f"{name}={shown(value)}"
            return
        for entry in fields(value):
            inner = entry.default if default is None else getattr(default, entry.name)
            yield from differing(f"{name}.{entry.name}", getattr(value, entry.name), inner)

    for name in fields_of(shape):
        if name not in ("sequence", *sizes):
            features += differing(name, getattr(shape, name), getattr(plain, name))
    return f"{shape.family} with {', '.join(features)}"


# ------------------------------------------------------------------ both directions


def emit(framework: ExternalFramework, job: Job, run: JobValues | None = None, about: str = "") -> str:
    """Return the job in the framework's format.

    Args:
        run: values of the run around the job; None for a plan's job, which leaves them open.
        about: first lines, written as comments.

    Raises:
        StrettoError: a value that the framework does not have; the message counts any others.
    """
    settings, notes = settings_of(framework, values_of(job, run))
    return framework.render(settings, [*about.splitlines(), *notes])


def settings_of(framework: ExternalFramework, values: JobValues) -> tuple[dict[str, Any], list[str]]:
    """Return the framework's settings, and a note for each field that it has no setting for and that does not
    change what is computed.

    Raises:
        StrettoError: as `emit`.
    """
    settings, notes, wrong = _written(framework, values)
    raise_first(wrong)
    return settings, notes


def refusals(framework: ExternalFramework, job: Job, run: JobValues | None = None) -> list[Problem]:
    """Return the values of a job that the framework does not have; `run` as in `emit`."""
    try:
        return _written(framework, values_of(job, run))[2]
    except StrettoError as error:  # of no single field
        return [error if isinstance(error, Problem) else error.within("layout")]


def _written(
    framework: ExternalFramework, values: JobValues
) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """Return the settings and notes of `settings_of`, and the values that the framework does not have."""
    settings: dict[str, Any] = {}
    notes, wrong = list[str](), list[Problem]()
    for rule in framework.rules:
        if rule.fields and values.unsaid.issuperset(rule.fields):
            continue  # the framework's own defaults
        try:
            settings |= rule.write(values)
        except Problem as problem:
            wrong.append(problem)
        notes += rule.notes(values)
    return settings, notes, wrong


def read_rule(rule: Rule, settings: Settings) -> dict[str, Any]:
    """Return the values that a rule reads, by name.

    Raises:
        StrettoError: a value that is not modelled, or of a type that the setting does not take.
    """
    assert rule.read is not None
    present = [f"{name} is {shown(settings[name])}" for name in rule.settings if name in settings]
    with reading(", ".join(present) or ", ".join(rule.settings)):
        return {name_of(field): value for field, value in rule.read(settings).items()}


def read(
    framework: ExternalFramework,
    text: str,
    source: str,
    devices: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ForeignJob:
    """Return the job that a framework's text describes.

    Args:
        source: where the text comes from, for errors.
        devices: devices of the cluster, for a text that does not give their number.
        overrides: values by name; they override the text.

    Raises:
        StrettoError: not such a text, an unknown setting, a value that is not modelled, or a job that is not
            legal.
    """
    if framework.parse is None:
        raise StrettoError(f"what {framework.title} runs cannot be read", hint="it can be written: --emit")
    with reading(source):
        parsed = framework.parse(text, source, Start(devices=devices))
    settings = parsed.settings
    for error, matters in parsed.unsupported.values():
        if matters:
            raise error
    for name, path in parsed.files.items():
        hint = "`stretto migrate` reads it; predict takes the config that this makes"
        raise StrettoError(f"{source}: --{name} {path} is a file that is not priced", hint=hint)
    mapped, unpriced = framework.settings, dict[str, list[str]]()
    for name, value in settings.items():
        if name in mapped:
            continue
        if (reason := framework.why_unread(name)) is not None:
            raise StrettoError(f"{source}: {name} is {shown(value)}: {reason}", hint=f"leave {name} out")
        reason = _matching(framework.unpriced, name)
        if reason is None:
            closest = nearest(name, [*mapped, *framework.unpriced, *framework.unread])
            hint = f"did you mean {closest}?" if closest else None
            raise StrettoError(f"{source}: {framework.title} has no {name}", hint=hint)
        unpriced.setdefault(reason, []).append(name)
    values, unread = dict[str, Any](), list[str]()
    for rule in framework.rules:
        if rule.read is not None:
            try:
                values |= read_rule(rule, settings)
            except StrettoError as error:
                if PRICED & set(rule.fields) or not all(name.startswith("data.") for name in rule.fields):
                    raise
                unread.append(f"not read, and no part of the price: {error.message}")
    values |= overrides or {}
    if values.get("model.family") is None:
        raise StrettoError(f"{source} does not say which model it is", hint="say it with --model")
    with reading(f"{source}: its settings together"):
        job = job_from(values)
        raise_first(problems(job))
        variables = [name for name in parsed.unsupported if name.startswith("$")]
        return ForeignJob(
            job=framework.as_run(job, settings),
            assumptions=Assumptions(
                software=software_profile(framework.software(settings)), overlap=framework.overlaps(settings)
            ),
            ignored={reason: tuple(names) for reason, names in unpriced.items()},
            remarks=(
                *parsed.notes,
                *unread,
                *framework.remarks(settings),
                *(f"nothing tells what {name} holds: it is taken to be empty" for name in variables),
            ),
            settings=settings,
        )


def _matching(patterns: Mapping[str, str], name: str) -> str | None:
    return next((reason for pattern, reason in patterns.items() if fnmatchcase(name, pattern)), None)


def unmapped(framework: ExternalFramework) -> tuple[set[str], set[str]]:
    """Return the fields that no rule covers, and those that several cover or that do not exist."""
    about = [name for rule in framework.rules for name in rule.fields]
    return set(NAMES) - set(about), {name for name in about if about.count(name) > 1 or name not in NAMES}


# ------------------------------------------------------------------ settings that no field is about


def others(name: str, kind: Literal["unpriced", "unread"]) -> dict[str, str]:
    """Return name patterns of a framework's settings that change no price (`unpriced`) or are refused when
    read (`unread`), and why.
    """
    return {pattern: reason for reason, patterns in _lists(name)[kind].items() for pattern in patterns}


@cache
def _lists(name: str) -> Mapping[str, Mapping[str, Sequence[str]]]:
    return shipped("stretto_interop.frameworks", name)
