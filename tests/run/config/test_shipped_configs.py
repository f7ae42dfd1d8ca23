from __future__ import annotations

from pathlib import Path

import pytest

from stretto.program.action import ActionKind
from stretto.recommender.config.check import find_problems as find_recommender
from stretto.recommender.config.load import load_config, parse_config
from stretto.run.config.check import check, find_problems
from stretto.run.config.job import job_of
from stretto.run.config.load import dump, load
from stretto.run.config.schema import TrainConfig

CONFIGS = Path(__file__).parents[3] / "configs"
# fields that name what a user brings
BROUGHT = {"data.source", "data.tokenizer"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_loads_and_is_legal(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    assert config.run.name == path.stem
    problems = find_problems(config) if isinstance(config, TrainConfig) else find_recommender(config)
    assert [p for p in problems if p.field not in BROUGHT] == []
    assert parse_config(dump(config)) == config


def test_the_quickstart_needs_no_further_settings() -> None:
    config = load(CONFIGS / "quickstart.yaml")
    check(config, world=4)
    assert config.microbatches == 4
    assert config.layout.to_layout().world == 4


def test_the_cluster_config_uses_its_64_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = load(CONFIGS / "llama-1b-64gpu.yaml")
    check(config, world=64, devices=64)
    assert config.shape().vocab == 128256
    assert config.microbatches == 32


def test_a_zero_bubble_and_an_asynchronous_schedule_are_among_them() -> None:
    zero, late = load(CONFIGS / "zero-bubble.yaml"), load(CONFIGS / "pipedream-2bw.yaml")
    check(zero, world=4)
    check(late, world=4)
    assert ActionKind.W in {action.kind for action in job_of(zero).program().orders[0]}
    program = job_of(late).program()
    assert [sum(a.kind is ActionKind.UPDATE for a in order) for order in program.orders] == [2, 2]
