"""Every legal layout of small models equals one process; which layouts those are; what a file of them may
hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.schedule import names
from stretto.verify.cases import Case, cases_from_file, every_case, own_case
from stretto.verify.job import verify
from tiny_job import GPT, LLAMA, job

THREE = ("model.heads=6", "model.kv_heads=3", "model.head_dim=8", "model.ffn=48")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


@pytest.mark.parametrize(
    ("ranks", "model", "overrides"),
    [
        (4, GPT, ("batch.micro_size=2",)),
        (4, LLAMA, ("batch.global_size=8", "batch.micro_size=2", "optim.name=sgd", "optim.momentum=0.9")),
        (3, LLAMA, (*THREE, "batch.global_size=6")),
        (1, GPT, ("optim.clip=null",)),
    ],
)
def test_every_layout_equals_one_process(
    folder: Path, ranks: int, model: str, overrides: tuple[str, ...]
) -> None:
    config = job(folder, *overrides, model=model)
    cases = every_case(config, ranks)
    verdicts = verify(config, cases)
    assert [v.layout for v in verdicts] == [str(case) for case in cases]
    for verdict in verdicts:
        assert verdict.equal, verdict
        assert verdict.diagnosis is None
        assert max(verdict.loss_error, verdict.grad_error, verdict.norm_error, verdict.weight_error) <= 1e-9


def test_all_means_every_axis_every_schedule_every_number_of_chunks(folder: Path) -> None:
    config = job(folder)
    cases = every_case(config, 4)
    sizes = {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    assert {(c.tp, c.dp, c.pp) for c in cases} == sizes
    assert {c.schedule for c in cases} == set(names())
    # four layers (embedding, two blocks, head) make four stages at most
    assert {c.chunks for c in cases if c.schedule == "interleaved" and c.pp == 1} == {2, 3, 4}
    assert {c.chunks for c in cases if c.schedule == "interleaved" and c.pp == 2} == {2}
    assert not [c for c in cases if c.schedule == "interleaved" and c.pp == 4]
    assert len(set(map(str, cases))) == len(cases)


def test_layouts_that_the_model_cannot_take_are_left_out(folder: Path) -> None:
    three = job(folder, "batch.global_size=6", model=LLAMA)
    assert {(c.tp, c.dp, c.pp) for c in every_case(three, 3)} == {
        (1, 3, 1),
        (1, 1, 3),
    }  # 4 heads do not divide
    assert every_case(job(folder, "batch.global_size=8"), 7) == []


def test_the_own_layout_is_the_configs(folder: Path) -> None:
    config = job(folder, "layout.pp=2", "schedule.name=interleaved", "schedule.chunks=2", "schedule.group=4")
    case = own_case(config)
    assert str(case) == "tp1 dp1 pp2 interleaved chunks=2 group=4"
    assert case.ranks == 2
    applied = case.apply(config)
    assert applied.schedule == config.schedule
    assert applied.layout == config.layout
    assert applied.train.dtype == "float64"


def test_a_file_of_layouts(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "layouts.yaml"
    path.write_text(
        "- {tp: 2, pp: 2}\n- {tp: 4, schedule: gpipe}\n"
        "- {dp: 2, pp: 2, schedule: interleaved, chunks: 2, group: 2}\n"
    )
    assert cases_from_file(path, job(folder)) == [
        Case(2, 1, 2, "1f1b"),
        Case(4, 1, 1, "gpipe"),
        Case(1, 2, 2, "interleaved", 2, 2),
    ]


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("", "no list of layouts", "write lines such as"),
        ("tp: 2", "no list of layouts", "write lines such as"),
        ("- 3", "layout 1 is 3", "{tp: 2, dp: 2, pp: 1}"),
        ("- {tp: 2}\n- {chunk: 2}", "layout 2 has the key 'chunk'", "did you mean 'chunks'?"),
        ("- {tp: two}", "layout 1: tp is 'two', must be a whole number above 0", "write lines"),
        ("- {tp: true}", "layout 1: tp is True, must be a whole number above 0", "write lines"),
        ("- {dp: 0}", "layout 1: dp is 0, must be a whole number above 0", "write lines"),
        ("- {schedule: 1}", "layout 1: schedule is 1, must be the name of a schedule", "write lines"),
        ("- {schedule: gpip}", "layout 1: there is no schedule 'gpip'", "did you mean 'gpipe'?"),
        ("- {tp: 3}", "layout 1 (tp3 dp1 pp1 1f1b): layout.tp is 3: it must divide model.heads", "nearest"),
        ("- {tp: 2}\n- {tp: 4}", "layouts of [2, 4] ranks", "one file for each number"),
        ("- {tp: 2", "no YAML", "write lines such as"),
    ],
)
def test_a_bad_file_of_layouts(folder: Path, tmp_path: Path, text: str, says: str, hint: str) -> None:
    path = tmp_path / "layouts.yaml"
    path.write_text(text)
    with pytest.raises(StrettoError) as caught:
        cases_from_file(path, job(folder))
    assert caught.value.message.startswith(str(path))
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")


def test_no_file_of_layouts(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="cannot be read: No such file"):
        cases_from_file(tmp_path / "none.yaml", job(folder))


def test_a_model_that_is_too_large_for_the_proof_is_refused_at_once(folder: Path) -> None:
    config = job(folder, "model.hidden=65536", "model.layers=80")
    with pytest.raises(StrettoError, match="GiB, this machine has") as caught:
        verify(config, [own_case(config)])
    assert "model.layers=2" in (caught.value.hint or "")


def test_more_ranks_than_cores_can_bear_are_refused_at_once(folder: Path) -> None:
    with pytest.raises(StrettoError, match="100000 ranks are too many for the"):
        verify(job(folder), [Case(1, 100000, 1, "1f1b")])
