"""Layouts by number of ranks: which is taken, and what is refused before a rank starts."""

from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto.recommender.config import for_ranks as recommender
from stretto.recommender.config.check import check as check_recommender
from stretto.recommender.config.load import parse_config
from stretto.recommender.config.schema import RecommenderConfig
from stretto.run.config import TrainConfig
from stretto.run.config.check import check
from stretto.run.config.for_ranks import for_ranks, rank_choices
from stretto.run.config.load import parse

CONFIG = """
model: {family: llama, layers: 4, hidden: 32, heads: 4}
layout: {dp: 2, tp: 2, order: tp-dp-pp, sequence_parallel: true}
batch: {global_size: 12, micro_size: 3}
schedule: {name: gpipe}
elastic:
  layouts:
    - {dp: 3, micro_size: 2}
    - {pp: 2, schedule: 1f1b}
    - {}
"""


def job(*overrides: str) -> TrainConfig:
    return parse(CONFIG, overrides=overrides)


def test_the_number_of_ranks_takes_a_layout() -> None:
    config = job()
    check(config)
    assert rank_choices(config) == [4, 3, 2, 1]
    assert for_ranks(config, 4) == config
    three = for_ranks(config, 3)
    assert (three.layout.dp, three.layout.tp, three.layout.sequence_parallel) == (3, 1, True)
    assert (three.batch.micro_size, three.batch.global_size, three.schedule.name) == (2, 12, "gpipe")
    assert rank_choices(three) == [4, 3, 2, 1]
    assert for_ranks(three, 4) == config.model_copy(update={"elastic": for_ranks(three, 4).elastic})
    two = for_ranks(config, 2)
    assert (two.layout.pp, two.layout.dp, two.layout.order) == (2, 1, "tp-dp-pp")
    assert (two.batch.micro_size, two.schedule.name) == (3, "1f1b")
    assert for_ranks(config, 1).layout.to_layout().world == 1


def test_a_number_without_a_layout_is_refused() -> None:
    with pytest.raises(StrettoError) as caught:
        for_ranks(job(), 7)
    assert "no layout of 7 ranks; the config's are of 4, 3, 2, 1" in caught.value.message
    assert "start 4 ranks" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ("[{dp: 5}]", "elastic.layouts.0: batch.global_size is 12"),
        ("[{dp: 3}]", "elastic.layouts.0: batch.global_size is 12"),  # of 3 samples each on 3 replicas
        ("[{tp: 3, micro_size: 2}]", "elastic.layouts.0: layout.tp is 3"),
        ("[{pp: 8}]", "elastic.layouts.0: layout.pp is 8"),
        ("[{}, {pp: 4}]", "elastic.layouts.1: it has 4 ranks, as layout has"),
        ("[{}, {}]", "elastic.layouts.1: it has 1 rank, as elastic.layouts.0 has"),
        ("[{pp: 2, schedule: nosuch}]", "elastic.layouts.0: schedule is nosuch"),
    ],
)
def test_every_layout_is_checked_before_a_rank_starts(layouts: str, says: str) -> None:
    with pytest.raises(StrettoError) as caught:
        check(job(f"elastic.layouts={layouts}"))
    assert caught.value.message.startswith(says), caught.value.message


def clicks(*overrides: str) -> RecommenderConfig:
    text = "model: {family: dlrm, preset: dlrm-kaggle}\nlayout: {ranks: 4}\nbatch: {global_size: 8}\n"
    config = parse_config(text, "clicks.yaml", overrides, name="clicks")
    assert isinstance(config, RecommenderConfig)
    return config


def test_a_recommender_takes_numbers_of_ranks() -> None:
    config = clicks("elastic.ranks=[3, 1]")
    check_recommender(config)
    assert recommender.rank_choices(config) == [4, 3, 1]
    assert recommender.for_ranks(config, 3).layout.ranks == 3
    with pytest.raises(StrettoError, match=r"elastic.ranks has no layout of 2 ranks; the config's are of 4"):
        recommender.for_ranks(config, 2)
    for numbers, says in (
        ("[9]", "elastic.ranks.0: batch.global_size is 8"),
        ("[0]", "elastic.ranks.0 is 0"),
    ):
        with pytest.raises(StrettoError) as caught:
            check_recommender(clicks(f"elastic.ranks={numbers}"))
        assert caught.value.message.startswith(says), caught.value.message
