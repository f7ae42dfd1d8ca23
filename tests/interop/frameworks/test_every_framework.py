"""Of every framework: each choice is mapped, refused by name, or listed; none is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest

from stretto.cli.interop import NAMES as OFFERED
from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape, RopeScaling
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.experts import ExpertShape
from stretto.job.job import Job, Recompute
from stretto.job.lora import LoraShape
from stretto.job.optimiser import Optimiser, RateSchedule
from stretto.job.presets import preset
from stretto.layout.layout import Layout
from stretto.program import schedule
from stretto.run.config.data import MixturePhase
from stretto.run.config.schema import ElasticLayout, TrainConfig
from stretto.run.config.section import find
from stretto_interop.frameworks.fields import NAMES, RUN_DEFAULTS, JobValues, values_of
from stretto_interop.frameworks.mapping import ExternalFramework, settings_of, unmapped
from stretto_interop.frameworks.registry import FRAMEWORKS

# other values of choices whose type or usual value suggests none
OTHERS: dict[str, tuple[Any, ...]] = {
    "metrics.to": (["wandb"], ["tensorboard", "mlflow"]),
    "metrics.project": ("gpt",),
    "train.hooks": (["mine.py:MyHooks"],),
    "model.build": ("mine.py:build",),
    "model.arguments": ({"width": 64},),
    "metrics.profile_memory": ([0],),
    "train.device": ("auto", "cpu", "cuda"),
    "train.backend": ("auto", "gloo", "nccl"),
    "data.phases": ([MixturePhase(from_step=5, weights={"a": 1.0})],),
    "layout.stages": ((2, 9, 9, 6),),
    "layout.order": ("tp-cp-ep-pp-dp", "dp-tp-cp-ep-pp"),
    "layout.expert_tp": (1, 2),
    "elastic.layouts": ([ElasticLayout(dp=2)], "auto"),
    "schedule.name": ("gpipe", "zb-h1", "interleaved"),
    "schedule.file": (schedule("1f1b", 2, 2),),
    "schedule.memory": (2.0,),
    "schedule.placement": ("vee",),
    "schedule.objective": ("span",),
    "schedule.vertical_sync": (True,),
    "schedule.split": (False,),
    "schedule.chunks": (2,),
    "model.family": ("gpt", "llama"),
    "model.unmodelled_features": (("a clamped gate",),),
    "model.mlp": ("gelu", "relu2", "swiglu", "geglu", "swiglu_clamped"),
    "model.norm": ("layer", "rms", "rms1p"),
    "model.position_embedding": ("learned", "rotary"),
    "model.block_norms": ("pre", "sandwich"),
    "model.rope.type": ("linear", "dynamic", "yarn", "llama3"),
    "model.moe.group_score": ("max", "top2"),
    "model.moe.score": ("softmax", "sigmoid"),
    "model.moe.drop": ("position", "probs"),
    "model.attention.norm": ("head", "all"),
    "model.attention.qkv_bias": (True, False),
    "model.attention.proj_bias": (True, False),
    "lora.targets": (("q_proj",), ("v_proj",)),
    "finetune.freeze": (("blocks.*",),),
    "precision.keep": (("blocks.*",),),
    "optim.betas": ((0.8, 0.95), (0.9, 0.9)),
    "optim.no_decay": (("blocks.*",),),
    "optim.arguments": ({"eps": 1e-6},),
    "train.loss": ("mine.py:loss",),
    "data.source": ("other.txt",),
    "data.chat": ("assistant", "all"),
    "data.chat_template": ("chat.jinja",),
    "data.packing": ("documents", "none"),
    "data.tokenizer": ("tokenizer.json",),
    "data.split": ("90,5,5",),
    "data.cache": ("cache",),
    "data.text_field": ("content",),
    "dp.path": ("/scratch",),
    "checkpoint.resume": ("auto", "runs/other"),
    "checkpoint.may_differ": (["rope"],),
    "run.name": ("other",),
    "run.dir": ("elsewhere",),
    "sample.prompt": ("Once",),
    "eval.every": (50,),
    "checkpoint.every": (50,),
}


# choices that tell whether a model has a part, whose other choices say nothing without it
PARTS = ("model.moe.experts", "model.attention.latent.kv_rank", "model.rope.type", "lora.rank")
# choices that mean something with certain values of another only: a framework may refuse that one
WITH = {
    **{f"lora.{name}": "lora.rank" for name in ("rank", "alpha", "dropout", "targets", "rslora")},
    "optim.momentum": "optim.name",
    "optim.rate.decay": "optim.rate.schedule",
    "optim.rate.decay_fraction": "optim.rate.schedule",
}


def bases() -> Iterator[JobValues]:
    """Jobs in which different choices mean something, with the run around them."""
    plain = Job(shape=preset("gpt2"), layout=Layout(tp=2, pp=2, dp=2), global_batch=8, schedule="1f1b")
    llama = Job(
        shape=preset("llama3-8b"),
        layout=Layout(tp=2, cp=2, dp=4, pp=4),
        global_batch=32,
        schedule="interleaved",
        options={"chunks": 2, "group": 4},
        sequence_parallel=True,
        dp=DataParallelSettings(mode="zero1", shard_states=4),
        precision=Precision(dtype="float16"),
        recompute=Recompute("full", blocks=2),
        optimiser=Optimiser(rate=RateSchedule(schedule="wsd")),
    )
    experts = Job(
        shape=preset("mixtral-8x7b"),
        layout=Layout(tp=2, dp=4, ep=4, expert_tp=1),
        expert_tp=1,
        global_batch=32,
        dp=DataParallelSettings(mode="zero3"),
        precision=Precision(dtype="bfloat16"),
    )
    moe = ExpertShape(experts=8, capacity=1.5, shared_ffn=1024)
    windowed = AttentionShape(window=128, full_every=2)
    shape = replace(preset("mixtral-8x7b"), moe=moe, attention=windowed)
    scaled = RopeScaling(type="llama3", factor=8.0, original_positions=8192)
    yarn = RopeScaling(type="yarn", factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    grouped = replace(
        preset("deepseek-v3").moe or moe,
        correction=True,
        groups=8,
        top_groups=4,
        group_score="top2",
        scale=2.5,
    )
    stretched = replace(preset("deepseek-v3"), rope=yarn, moe=grouped)
    rest = [
        replace(experts, shape=shape, dp=DataParallelSettings(mode="zero1")),
        replace(experts, shape=preset("deepseek-v3")),
        replace(experts, shape=stretched),
        replace(llama, shape=replace(preset("llama3-8b"), rope=scaled)),
        replace(llama, shape=replace(preset("llama3-8b"), lora=LoraShape(rank=8, alpha=16.0))),
        replace(plain, layout=Layout(), optimiser=Optimiser(name="sgd", momentum=0.9)),
        replace(
            plain, layout=Layout(dp=8), dp=DataParallelSettings(mode="zero3"), recompute=Recompute("full")
        ),
        replace(plain, layout=Layout(dp=2, cp=2), context="ulysses", precision=experts.precision),
        replace(
            experts,
            shape=preset("llama3-8b"),
            expert_tp=None,
            layout=Layout(dp=4),
            dp=DataParallelSettings(mode="zero3", offload="nvme", path="/nvme"),
        ),
    ]
    sharded = Job(
        shape=preset("llama3-8b"),
        layout=Layout(dp=8),
        global_batch=32,
        dp=DataParallelSettings(mode="zero3"),
        precision=Precision(dtype="bfloat16"),
        recompute=Recompute("full"),
        optimiser=Optimiser(rate=RateSchedule(schedule="wsd")),
    )
    staged = replace(
        sharded,
        shape=replace(preset("llama3-8b"), layers=24),
        layout=Layout(dp=2, pp=4, tp=2),
        dp=DataParallelSettings(mode="zero2", reduce="step"),
    )
    exchanged = replace(
        sharded,
        layout=Layout(dp=4, cp=2),
        context="ulysses",
        dp=DataParallelSettings(mode="zero3", offload="nvme", path="/local"),
        precision=Precision(dtype="float16"),
        optimiser=Optimiser(),
    )
    for job in (plain, llama, experts, *rest, sharded, staged, exchanged):
        values = dict(values_of(job).values) | {"checkpoint.every": 100, "eval.every": 100}
        yield JobValues({**values, "metrics.to": ["tensorboard", "wandb"]})


BASES = tuple(bases())


def others(name: str, value: Any) -> Iterator[Any]:
    """Other values that a choice could have."""
    if value is None and name in PARTS:
        return
    if name in OTHERS:
        yield from (other for other in OTHERS[name] if other != value)
        return
    _, field = find(TrainConfig, tuple(name.split(".")))
    literals = [word for kind in get_args(field.type) or () for word in get_args(kind)] if field else []
    literals += [word for word in (get_args(field.type) if field else ()) if isinstance(word, str)]
    if literals and isinstance(value, str | None):
        yield from (word for word in dict.fromkeys(literals) if word != value)
    elif isinstance(value, bool) or (value is None and isinstance(RUN_DEFAULTS.get(name), bool)):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value or 3, value + 1)
    elif isinstance(value, float):
        yield value / 2 or 0.25
    elif value is None:
        yield from (2, 0.5)


def divides(choices: JobValues) -> bool:
    """Whether the batch makes whole microbatches; no schedule is made without."""
    global_batch, micro, dp = (
        choices[name] for name in ("batch.global_size", "batch.micro_size", "layout.dp")
    )
    return global_batch % (micro * dp) == 0


def outcome(framework: ExternalFramework, choices: JobValues) -> list[object]:
    """What each rule writes, and notes, or its refusal; one refusal does not hide another."""
    outcomes: list[object] = []
    for rule in framework.rules:
        try:
            outcomes.append((dict(rule.write(choices)), list(rule.notes(choices))))
        except StrettoError as error:
            outcomes.append(error.message)
    return outcomes


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda framework: framework.name)
def test_every_choice_has_one_rule(framework: ExternalFramework) -> None:
    assert unmapped(framework) == (set(), set())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda framework: framework.name)
def test_another_value_is_written_or_refused(framework: ExternalFramework, name: str) -> None:
    """In one job at least: a number of experts means nothing to a model without any."""
    values = {value for base in BASES for value in map(repr, others(name, base[name]))}
    assert values, f"no other value of {name} is tried"
    assert any(is_told(framework, at, name) for at in range(len(BASES)))


def is_told(framework: ExternalFramework, at: int, name: str) -> bool:
    """Whether some other value of a choice makes a difference to the job, or needs what the framework
    refuses.
    """
    base, before = BASES[at], outcome_of_base(framework.name, at)
    if any(isinstance(line, str) and line.startswith(f"{WITH.get(name)} is") for line in before):
        return True
    changes = (replace(base, values={**base.values, name: value}) for value in others(name, base[name]))
    return any(divides(changed) and outcome(framework, changed) != before for changed in changes)


@cache
def outcome_of_base(framework: str, at: int) -> list[object]:
    return outcome(FRAMEWORKS[framework], BASES[at])


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda framework: framework.name)
def test_some_of_the_jobs_are_written(framework: ExternalFramework) -> None:
    """A framework that refused all of them would pass the test above."""
    written = [base for base in BASES if not any(isinstance(line, str) for line in outcome(framework, base))]
    assert written
    for base in written:
        assert framework.render(*settings_of(framework, base)).strip()


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda framework: framework.name)
def test_no_setting_is_of_two_rules(framework: ExternalFramework) -> None:
    settings = [name for rule in framework.rules for name in rule.settings]
    assert len(settings) == len(set(settings))


def test_help_offers_every_framework() -> None:
    assert set(OFFERED) == set(FRAMEWORKS)
