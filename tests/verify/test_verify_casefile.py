"""YAML files of layouts to prove: what they may contain, and the errors for what they may not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.job import Recompute
from stretto.layout import Layout
from stretto.run.config.section import plain_section
from stretto.verify.language.cases import cases_from_file, configured_job, describe, smaller, vary
from tiny_job import LLAMA, job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def test_a_file_of_layouts(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "layouts.yaml"
    path.write_text(
        "- {tp: 2, pp: 2}\n- {tp: 4, schedule: gpipe}\n"
        "- {dp: 2, pp: 2, schedule: interleaved, chunks: 2, group: 2}\n"
        "- {dp: 2, pp: 2, schedule: hanayo, waves: 1, group: null}\n"
    )
    cases = cases_from_file(path, job(folder))
    assert [describe(case) for case in cases] == [
        "tp2 dp1 pp2 1f1b",
        "tp4 dp1 pp1 gpipe",
        "tp1 dp2 pp2 interleaved chunks=2 group=2",
        "tp1 dp2 pp2 hanayo waves=1",
    ]
    assert cases[2].options == {"chunks": 2, "group": 2}
    assert {case.precision.dtype for case in cases} == {"float64"}


def test_a_file_takes_every_axis_and_feature(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "layouts.yaml"
    path.write_text(
        "- {tp: 2, cp: 2, sequence_parallel: true, context: ulysses, recompute: selective}\n"
        "- {tp: 2, dp: 2, ep: 2, expert_tp: 1, recompute: full, shard_inputs: true, schedule: zb-h1}\n"
        "- {cp: 4}\n"
    )
    config = job(folder, "model.moe.experts=4", model=LLAMA)
    cases = cases_from_file(path, config)
    assert cases[1].layout == Layout(tp=2, dp=2, ep=2, expert_tp=1)
    assert cases[1].recompute == Recompute(mode="full", shard_inputs=True)
    assert [describe(case) for case in cases] == [
        "tp2 cp2 dp1 pp1 sp ulysses recompute=selective 1f1b",
        "tp2 dp2 pp1 ep2 expert_tp1 recompute=full shard_inputs zb-h1",
        "tp1 cp4 dp1 pp1 1f1b",
    ]


def test_features_that_are_left_out_are_the_configs(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "layouts.yaml"
    path.write_text(
        "- {tp: 2, cp: 2}\n- {tp: 4, sequence_parallel: false, recompute: none}\n"
        "- {tp: 4, shard_inputs: true, sequence_parallel: false}\n"
    )
    overrides = ("layout.sequence_parallel=true", "layout.context=ulysses", "recompute.mode=full")
    config = job(folder, *overrides, "recompute.blocks=1")
    inherited, off, inputs = cases_from_file(path, config)
    assert [describe(case) for case in (inherited, off, inputs)] == [
        "tp2 cp2 dp1 pp1 sp ulysses recompute=full 1f1b",
        "tp4 dp1 pp1 ulysses 1f1b",
        "tp4 dp1 pp1 ulysses recompute=full shard_inputs 1f1b",
    ]
    assert (inherited.recompute.blocks, off.recompute.blocks) == (1, None)
    assert inputs.recompute == Recompute(mode="full", blocks=1, shard_inputs=True)


def test_a_file_takes_every_way_of_sharing(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "layouts.yaml"
    path.write_text(
        "- {dp: 4}\n- {dp: 4, mode: zero2}\n- {dp: 4, mode: zero3, shard_states: 2, offload: none}\n"
        "- {dp: 2, pp: 2, mode: zero3, reduce: step, gather: stage, offload: nvme, schedule: gpipe}\n"
    )
    overrides = ("dp.mode=zero3", "dp.shard_parameters=2", "dp.reduce=microbatch", "dp.offload=cpu")
    config = job(folder, *overrides)
    cases = cases_from_file(path, config)
    assert [describe(case) for case in cases] == [
        "tp1 dp4 pp1 zero3 shard_parameters=2 reduce=microbatch offload=cpu 1f1b",
        "tp1 dp4 pp1 zero2 1f1b",
        "tp1 dp4 pp1 zero3 shard_states=2 shard_parameters=2 reduce=microbatch 1f1b",
        "tp1 dp2 pp2 zero3 shard_parameters=2 reduce=step gather=stage offload=nvme gpipe",
    ]
    assert vary(configured_job(config), dp=4) == cases[0]
    assert cases[0].dp == DataParallelSettings(**plain_section(config.dp))
    assert cases[3].dp.path == tempfile.gettempdir()
    assert cases_from_file(path, job(folder, *overrides, "dp.path=/tmp/fast"))[3].dp.path == "/tmp/fast"
    assert smaller(config, 4).dp == DataParallelSettings()


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
        ("- {waves: 0}", "layout 1: waves is 0, must be a whole number above 0, or null", "write lines"),
        ("- {vertical_sync: 1}", "layout 1: vertical_sync is 1, must be true or false, or null", "write"),
        ("- {waves: 2}", "(tp1 dp1 pp1 1f1b waves=2): schedule is 1f1b with", "leave waves out"),
        ("- {tp: 3}", "layout 1 (tp3 dp1 pp1 1f1b): layout.tp is 3: it must divide model.heads", "nearest"),
        (
            "- {dp: 2, ep: 2}",
            "layout 1 (tp1 dp2 pp1 ep2 1f1b): layout.ep is 2: the model has no",
            "layout.ep=1",
        ),
        ("- {tp: 2, ep: 2, expert_tp: 2}", "ep=2 with expert_tp=2 does not divide the 2", "nearest ep"),
        ("- {context: rings}", "layout 1: context is 'rings', must be one of ring, ulysses", "write lines"),
        ("- {recompute: 1}", "layout 1: recompute is 1, must be one of none", "write lines"),
        (
            "- {recompute: auto}",
            "recompute.mode is auto: it needs the memory that a rank may use",
            "memory_gib=16",
        ),
        ("- {sequence_parallel: 1}", "sequence_parallel is 1, must be true or false", "write lines"),
        ("- {shard_inputs: true}", "recompute.mode=none does not store inputs", "recompute.mode=full"),
        ("- {mode: zero4}", "mode is 'zero4', must be one of server, ddp, zero1", "write lines"),
        ("- {path: /tmp}", "layout 1 has the key 'path'", "did you mean"),
        ("- {dp: 4, mode: zero2, shard_states: 3}", "dp.shard_states is 3: it must divide", "shard_states=2"),
        (
            "- {dp: 2, gather: stage}",
            "dp.gather is stage: dp.mode=ddp does not shard parameters",
            "dp.mode=zero3",
        ),
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
