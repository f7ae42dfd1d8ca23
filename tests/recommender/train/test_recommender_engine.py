"""A recommender's step on ranks is that of one process: rows, states, dense weights, loss, norm, logits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import on_ranks
from recommender_jobs import ROWS, Job, config_of, difference, placements_of, run, run_all
from stretto.errors import StrettoError
from stretto.recommender.placement import TablePlacement
from stretto.recommender.tables import replicated
from stretto.recommender.train.engine import Recommender

CLOSE = 1e-12
MIX = ("row", "column", "data", "table")
VARIED = {"hot": None, "weighted": True, "pooling": "mean"}


def jobs() -> dict[str, Job]:
    """Each placement, rule, kind of ids and option, not all with all: `stretto verify` takes more."""
    basic = {
        f"{split} {rule}": Job(rule, (split,))
        for split in ("table", "row", "column", "data")
        for rule in ("sgd", "rowwise_adagrad")
    }
    varied = {f"mix {rule}": Job(rule, MIX, **VARIED) for rule in ("adagrad", "lazy_adam", "rowwise_adagrad")}
    return {
        **basic,
        **varied,
        "turned mix": Job("rowwise_adagrad", MIX[::-1], hot=(3, 1, 4, 2, 8), dense="sgd"),
        "many ids": Job("rowwise_adagrad", ("row",), hot=(20, 16, 30, 1, 9)),
        "many ids of copies": Job("rowwise_adagrad", ("data",), hot=(20, 16, 30, 1, 9)),
        "clipped copies": Job("adagrad", ("data",), clip=0.05, record=True, **VARIED),
        "clipped": Job("lazy_adam", MIX, clip=0.05, dense="lamb", record=True, **VARIED),
        "clipped columns": Job("rowwise_adagrad", ("column",), clip=0.05, record=True),
        "products": Job("rowwise_adagrad", MIX, ids="quotient-remainder", **VARIED),
        "hashed": Job("adagrad", MIX, ids="hash", hot=None, weighted=True, record=True),
        "hashed rows, evicted": Job(
            "rowwise_adagrad", ("row",), ids="hash", steps=5, table={"evict_every": 2, "admit": 2}
        ),
        "hashed columns": Job("rowwise_adagrad", ("column",), ids="hash", steps=4, table={"evict_every": 2}),
        "apart": Job("rowwise_adagrad", MIX, overlap=False, **VARIED),
        "cross layers": Job("sgd", MIX, model={"interaction": "dcn", "cross_layers": 2, "cross_rank": 3}),
        "cached": Job("lazy_adam", MIX, place="cpu", steps=5, **VARIED),
        "cached columns": Job("rowwise_adagrad", ("column",), place="cpu", steps=5, **VARIED),
        "split": Job("split_sgd", MIX, **VARIED),
    }


@pytest.mark.parametrize(
    ("ranks", "first", "step"),
    [(2, 0, 2), (3, 1, 4), *(pytest.param(r, 0, 1, marks=pytest.mark.slow) for r in (2, 3))],
)
def test_ranks_compute_what_one_process_does(ranks: int, first: int, step: int) -> None:
    named = dict(list(jobs().items())[first::step])
    alone = [run(replace(job, place="device")) for job in named.values()]
    by_rank = on_ranks(ranks, run_all, list(named.values()))
    wrong = dict[str, float]()
    for number, name in enumerate(named):
        error = difference([alone[number]], [outcomes[number] for outcomes in by_rank])
        if not error <= CLOSE:
            wrong[name] = error
    assert not wrong


def ways_sent(jobs: Sequence[Job]) -> list[set[str]]:
    """How the gradients of copied tables are sent."""
    ways = list[set[str]]()
    for job in jobs:
        ways.append(set())
        with pytest.MonkeyPatch.context() as patch:
            for kind in (replicated._SentRows, replicated._SentBags):

                def noted(
                    self: Any, gradient: Tensor, send: Any = kind.send, name: str = kind.__name__
                ) -> None:
                    ways[-1].add(name)
                    send(self, gradient)

                patch.setattr(kind, "send", noted)
            run(job)
    return ways


def test_copies_send_rows_or_bags_whichever_is_less() -> None:
    """Bags of many ids, or one id of tables with fewer rows than samples."""
    many = Job("sgd", ("data",), hot=(20, 16, 30, 1, 9), table={"rows": 5000})
    few = Job("sgd", ("data",), table={"rows": 3})
    for ways in on_ranks(2, ways_sent, [many, few, replace(few, **VARIED)]):
        assert ways == [{"_SentBags"}, {"_SentRows"}, {"_SentRows"}]


def test_the_comparison_sees_a_row_that_differs() -> None:
    outcome, other = run(Job()), run(Job())
    key = next(iter(other.rows))
    assert difference([outcome], [other]) == 0
    other.rows[key] += 1e-9
    assert difference([outcome], [other]) > CLOSE


def test_a_batch_that_was_not_announced_is_taken_all_the_same() -> None:
    """The announced one is dropped, and hash tables have not counted it."""
    from recommender_jobs import batch_of, rows_of, train_step

    def trained(wrong: bool) -> object:
        job = Job(ids="hash")
        config = config_of(job, 1)
        tables = config.table_specs()
        recommender = Recommender(config, tables, placements_of(job, tables, 1))
        batches = [batch_of(job, step) for step in range(3)]
        train_step(recommender, batches[0], batches[2] if wrong else batches[1])
        train_step(recommender, batches[1])
        rows = rows_of(recommender)
        recommender.close()
        return rows

    assert trained(True) == trained(False)


def test_a_prediction_changes_nothing() -> None:
    from recommender_jobs import batch_of, rows_of, train_step

    job = Job("adagrad", ids="hash", place="cpu")
    config = config_of(job, 1)
    tables = config.table_specs()
    recommender = Recommender(config, tables, placements_of(job, tables, 1))
    batches = [batch_of(job, step) for step in range(3)]
    train_step(recommender, batches[0], batches[1])
    before = rows_of(recommender)
    recommender.predict(batches[2])
    assert rows_of(recommender) == before
    train_step(recommender, batches[1])
    assert rows_of(recommender) != before
    recommender.close()


def test_tables_in_files_are_those_in_memory(tmp_path: Path) -> None:
    job = Job("rowwise_adagrad", steps=5, **VARIED)
    there = run(replace(job, place="disk", folder=str(tmp_path)))
    assert difference([run(job)], [there]) == 0


def test_16_bits_on_the_wire_are_near_and_not_the_same() -> None:
    exact = Job("sgd", MIX, dtype="float32", hot=(3, 1, 4, 2, 8))
    narrow = replace(exact, wire="bfloat16")
    both = on_ranks(2, run_all, [exact, narrow])
    error = difference([outcomes[0] for outcomes in both], [outcomes[1] for outcomes in both])
    assert 1e-6 < error < 5e-2  # 8 bits, in three steps of a large rate


def test_a_growing_table_is_on_the_device_or_refused() -> None:
    job = Job(ids="hash")
    config = config_of(job, 1)
    tables = config.table_specs()
    placements = dict(placements_of(job, tables, 1))
    placements["C2"] = TablePlacement("table", (0,), "cpu")
    with pytest.raises(StrettoError, match=r"table C2: place cpu with ids: hash"):
        Recommender(config, tables, placements)


def test_a_loss_of_a_part_adds_up() -> None:
    """Each rank's loss is its samples' share of the mean over the global batch."""
    job = Job("sgd", steps=1)
    outcome = run(job)
    assert len(ROWS) == 5
    assert outcome.losses[0] == pytest.approx(0.69, abs=0.2)
    assert torch.isfinite(outcome.logits).all()
