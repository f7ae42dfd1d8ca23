"""One line declares a field: schema, limits, errors, overrides, reference, record and comparison follow."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

from stretto.errors import Problem, StrettoError
from stretto.job import shape as shapes
from stretto.job.field import Field, check_fields, declared
from stretto.job.huggingface import differences
from stretto.job.job import Execution
from stretto.job.optimiser import Optimiser
from stretto.job.shape import ModelShape
from stretto.run.config import model, reference, section, validation
from stretto.run.config.job import job_of
from stretto.run.config.load import dump, parse
from stretto.run.config.schema import TrainConfig
from stretto.run.config.source import Source


@dataclass(frozen=True, kw_only=True)
class WiderOptimiser(Optimiser):
    nesterov: Annotated[float, Field("Weight of the look-ahead.", ge=0, lt=1)] = 0.5


@dataclass(frozen=True, kw_only=True)
class WiderConfig(TrainConfig):
    optim: WiderOptimiser = field(default_factory=WiderOptimiser)


EXAMPLES = Path(__file__).parents[3] / "examples"
MODEL = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4}


def read(*overrides: str) -> WiderConfig:
    values: dict[str, Any] = {"model": MODEL}
    source = Source("job.yaml")
    for override in overrides:
        validation.apply_override(override, values, source, WiderConfig)
    return validation.read_section(WiderConfig, values, source)


def test_a_field_of_the_optimiser_is_one_line() -> None:
    assert read().optim.nesterov == 0.5
    assert read("optim.nesterov=0.25").optim.nesterov == 0.25
    with pytest.raises(StrettoError) as caught:
        read("optim.nesterov=1")
    assert str(caught.value).startswith("override 'optim.nesterov=1': optim.nesterov is 1, must be a number")
    with pytest.raises(StrettoError, match=r"did you mean optim.nesterov\?"):
        read("optim.nestrov=1")
    page = reference.reference([("", WiderConfig)])
    row = "| `nesterov` | a number at least 0 and below 1 | `0.5` | Weight of the look-ahead. |"
    assert row in page
    assert "nesterov: 0.25" in dump(read("optim.nesterov=0.25"), defaults=False)
    assert "nesterov" not in dump(read(), defaults=False)
    with pytest.raises(Problem, match="nesterov is 2"):
        check_fields(WiderOptimiser(nesterov=2.0))


@pytest.fixture
def wider_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """`ModelShape` with another field, as if its line stood there, and its section of a config."""

    @dataclass(frozen=True, kw_only=True)
    class WiderShape(ModelShape):
        residual_scale: Annotated[float, Field("Factor of each block's output.", gt=0)] = 1.0

    for module in (shapes, model):
        monkeypatch.setattr(module, "ModelShape", WiderShape)

    @model.changes_of(WiderShape, others=model.Initial)
    class WiderModel:
        preset: Annotated[str | None, Field("Name of a known model.")] = None
        shape = model.ModelConfig.shape

    yield WiderModel
    declared.cache_clear()
    section.config_fields.cache_clear()


def test_a_field_of_the_model_is_one_line(wider_model: type) -> None:
    config: Any = validation.read_section(wider_model, MODEL)
    plain = config.shape(100, 16)
    changed = validation.read_section(wider_model, {**MODEL, "residual_scale": 0.5})
    other = changed.shape(100, 16)  # pyright: ignore[reportAttributeAccessIssue]
    assert (config.residual_scale, plain.residual_scale, other.residual_scale) == (None, 1.0, 0.5)
    row = section.config_fields(wider_model)["residual_scale"]
    assert section.allowed(row) == "a number above 0, or null"
    assert row.field is not None
    assert row.field.doc == "Factor of each block's output; null: the preset's, else 1."
    with pytest.raises(Problem, match="residual_scale is 0"):
        replace(other, residual_scale=0.0)
    # a record of an earlier version, without the field, is the plain model; a run that changed it is not
    record = shapes.shape_to_record(plain)
    assert "residual_scale" not in record
    assert shapes.shape_from_record(record) == plain
    assert shapes.shape_from_record(shapes.shape_to_record(other)) == other != plain
    assert differences(plain, other) == {"residual_scale": (1.0, 0.5)}  # which a resumed run compares
    narrow = parse(f"model: {MODEL}")  # ranks get the configs of today's models, whose parts are the same
    assert pickle.loads(pickle.dumps(narrow)) == narrow


def test_a_field_of_train_that_a_job_has_reaches_it_by_its_name() -> None:
    values = {"attention": "explicit", "compile": "blocks", "graphs": "off"}
    values |= {"vocab_multiple": 8, "loss_chunk": 32, "loss": f"{EXAMPLES}/my_parts.py:loss"}
    assert set(values) == set(declared(Execution))
    config = parse("model: {family: gpt, layers: 2, hidden: 64, heads: 4}\n")
    job = job_of(replace(config, train=replace(config.train, **values)))
    assert {name: getattr(job, name) for name in values} == values
