"""Layouts by number of ranks: which is taken, and what is refused before a rank starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.recommender.config.check import check as check_recommender
from stretto.recommender.config.load import parse_config
from stretto.recommender.config.schema import RecommenderConfig
from stretto.run.config import TrainConfig
from stretto.run.config.check import check
from stretto.run.config.for_ranks import for_ranks, rank_choices
from stretto.run.config.load import dump, parse

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
    assert for_ranks(three, 4) == replace(config, elastic=for_ranks(three, 4).elastic)
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


MIXED = """
model: {family: llama, layers: 4, hidden: 32, heads: 4}
layout: {dp: 2, tp: 2}
batch: {global_size: 24, micro_size: 4}
schedule: {name: interleaved, chunks: 2}
elastic:
  layouts:
    - {dp: 3}
    - {pp: 2, micro_size: 3, schedule: 1f1b}
    - {}
"""


@given(chain=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))
def test_a_layout_is_the_same_whichever_came_before(chain: list[int]) -> None:
    config = parse(MIXED)
    for ranks in chain:
        config = for_ranks(config, ranks)
    straight = for_ranks(parse(MIXED), chain[-1])
    assert config == straight
    check(config)
    assert rank_choices(config) == [4, 3, 2, 1]
    again = parse(dump(config))  # config.yaml of the run reads as the same layouts
    for ranks in rank_choices(again):
        assert for_ranks(again, ranks).batch == for_ranks(straight, ranks).batch
        assert for_ranks(again, ranks).schedule == for_ranks(straight, ranks).schedule


def test_a_job_that_has_become_smaller_keeps_the_batch_of_its_config() -> None:
    layouts = "elastic.layouts=[{pp: 2, micro_size: 3}, {dp: 3}]"
    four = job(layouts, "batch.global_size=12", "batch.micro_size=2")
    check(four)
    three = for_ranks(for_ranks(four, 2), 3)
    assert three.batch.micro_size == 2
    check(three)  # of 3 samples each, 12 are no whole number of microbatches on 3 replicas


def test_a_layout_is_checked_under_all_rules() -> None:
    """Rules that ask for the program of a batch that does not divide say so."""
    for fields in ((), ("guard.check_memory=1",), ("finetune.freeze=[embed.*]", "guard.on_nonfinite=skip")):
        with pytest.raises(StrettoError) as caught:
            check(job("elastic.layouts=[{dp: 3}]", *fields))
        assert caught.value.message.startswith("elastic.layouts.0: batch.global_size is 12")
        with pytest.raises(StrettoError) as caught:
            check(job("layout.dp=3", *fields))
        assert caught.value.message.startswith("batch.global_size is 12")


def clicks(*overrides: str) -> RecommenderConfig:
    text = "model: {family: dlrm, preset: dlrm-kaggle}\nlayout: {ranks: 4}\nbatch: {global_size: 8}\n"
    config = parse_config(text, "clicks.yaml", overrides, name="clicks")
    assert isinstance(config, RecommenderConfig)
    return config


def test_a_recommender_takes_numbers_of_ranks() -> None:
    config = clicks("elastic.ranks=[3, 1]")
    check_recommender(config)
    assert config.rank_choices == [4, 3, 1]
    assert config.for_ranks(3).layout.ranks == 3
    with pytest.raises(StrettoError, match=r"elastic.ranks has no layout of 2 ranks; the config's are of 4"):
        config.for_ranks(2)
    for numbers, says in (
        ("[9]", "elastic.ranks.0: batch.global_size is 8"),
        ("[0]", "elastic.ranks.0 is 0"),
    ):
        with pytest.raises(StrettoError) as caught:
            check_recommender(clicks(f"elastic.ranks={numbers}"))
        assert caught.value.message.startswith(says), caught.value.message
