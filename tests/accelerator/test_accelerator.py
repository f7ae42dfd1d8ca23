"""Devices that are not CUDA's: a simulated NPU, which torch loads as it loads a vendor's plug-in.

Its tensors have a device of their own and never mix with the host's, so that jobs on it show that nothing is
made in the wrong place and nothing goes by a device's name. Its streams wait for each other only where they
are told to, so that a missing wait is found. Of kernels it says nothing: they are the CPU's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from texts import banner_of, open_tokens
from tiny_job import job

HERE = Path(__file__).parent
SOURCE = Path(stretto.__file__).parents[1]  # with a planted fault, where there is one
Reports = dict[str, dict[str, Any]]


def compiled(compiler: str, cache: Path) -> Path:
    """The library of the device. It takes long to compile, so it is kept in a folder for later runs of the
    same sources with the same torch and compiler.
    """
    root = Path(torch.__file__).parent
    includes = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    links = [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-ltorch_cpu", "-lc10"]
    command = [
        compiler,
        "-O1",
        "-shared",
        "-fPIC",
        "-std=c++20",
        *includes,
        str(HERE / "kernels.cpp"),
        *links,
    ]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = [
        file.read_text(encoding="utf-8") for file in sorted(HERE.iterdir()) if file.suffix in (".cpp", ".h")
    ]
    key = hashlib.sha256("\0".join((*sources, *command, version, torch.__version__)).encode()).hexdigest()
    library, unfinished = cache / f"{key[:16]}.so", cache / f"{os.getpid()}.so"
    if not library.exists():
        done = subprocess.run(
            [*command, "-o", str(unfinished)], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        unfinished.replace(library)  # whole or not at all
    return library


@pytest.fixture(scope="module")
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of processes in which torch has the devices: compiled, and installed as an entry point."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the simulated device")
    folder = tmp_path_factory.mktemp("npu")
    cache = getattr(request.config, "cache", None)  # none with `-p no:cacheprovider`
    library = compiled(compiler, folder if cache is None else cache.mkdir("npu"))
    metadata = folder / "stretto_fake_npu-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stretto-fake-npu\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nstretto_fake_npu = stretto_fake_npu:load\n")
    path = os.pathsep.join(map(str, (SOURCE, HERE.parent, HERE, folder)))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "STRETTO_FAKE_NPU": str(library),
        "STRETTO_FAKE_NPU_RACES": str(folder / "races"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def report(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reports]:
    """What the named cases of `on_npu.py` report, in one process."""

    def run(*cases: str, timeout: float = 240) -> Reports:
        folder, races = tmp_path_factory.mktemp("cases"), Path(environment["STRETTO_FAKE_NPU_RACES"])
        command = [sys.executable, str(HERE / "on_npu.py"), str(folder), *cases]
        races.unlink(missing_ok=True)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stderr[-6000:]
        if cases != ("tables",):  # streams may use other rows of one table at a time
            assert not races.exists(), f"what was used without waiting:\n{races.read_text()[:3000]}"
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def reports(report: Callable[..., Reports]) -> Reports:
    """Of the cases that take little time."""
    return report("about", "parts", "sharded", "copies", "graphs", "waiting", timeout=400)


def test_auto_is_the_plug_in_s_device_and_its_library(reports: Reports) -> None:
    about = reports["about"]
    assert about["auto"] == "npu"
    assert about["count"] == 4
    assert about["device"] == ["npu:2", 2]  # by LOCAL_RANK, and current
    assert about["backends"] == ["hccl", "gloo"]


def test_what_is_not_there_is_named_with_what_is(reports: Reports) -> None:
    about = reports["about"]
    assert about["absent"].startswith("train.device is xpu, but there is no such device here: torch sees npu")
    assert about["gloo"].startswith("train.backend is gloo, which does not send tensors of npu")
    assert "this torch has hccl" in about["gloo"]


def test_names_and_memory_are_the_device_s(reports: Reports) -> None:
    about = reports["about"]
    assert about["name"] == "Ascend 910B, simulated"
    assert about["memory"] == 2**36
    assert about["grown_gib"] == pytest.approx(2**-8, rel=0.01)  # a million float32
    assert about["kernels"] is False


def test_random_state_is_the_device_s_and_is_restored(reports: Reports) -> None:
    about = reports["about"]
    assert about["states"] == ["cpu", "npu"]
    assert about["drew"]
    assert about["restored"]  # by `set_random_states`, and after `forked_random`


def test_tensors_of_host_and_device_do_not_mix(reports: Reports) -> None:
    """Else the jobs here would show little."""
    assert "same device" in reports["about"]["mixed"]


def test_copies_run_on_streams_of_the_device(reports: Reports) -> None:
    parts = reports["parts"]
    values = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert parts["store"] == ["npu:0", values]
    assert parts["written"] == [2 * value for value in values]
    assert {"on a stream", "wait for an event", "wait for a stream"} <= {*parts["store_calls"]}
    assert parts["gradient"] == ["cpu", "torch.float64", [0.0, 1.0, 2.0, 3.0]]
    assert parts["gradient_calls"] == ["wait for a stream", "on a stream"]
    assert parts["on_host"] == ["cpu"]
    assert parts["offload_calls"] == ["wait for a stream", "on a stream"]
    assert parts["offloaded"]


def test_every_wait_of_a_copy_is_needed(reports: Reports) -> None:
    """Streams, as far as they do not wait, work in any order: what is left out is found each time."""
    copies = reports["copies"]
    assert copies["races"] == []
    assert copies["deferred"] > 40
    assert copies["values"]["host 1"] == pytest.approx([exp(4.0 * x) for x in (1, 2, 3, 4)], rel=1e-6)
    assert copies["values"]["rows 3"] == [4.0] * 4
    assert copies["values"]["samples 2"] == [20.0, 30.0]
    missed = [wait for wait, found in copies["found"].items() if not found]
    # this one is missed if the copy of the slots' numbers to the device, a call before, has waited for the
    # updates as well, which depends on which thread comes first
    assert {*missed} <= {"recommender.stores.cached._move: wait_event"}
    assert len(copies["found"]) >= 15


def test_threads_of_the_device_and_of_python_do_not_lock_each_other_out(
    report: Callable[..., Reports],
) -> None:
    """A store's thread waits for a copy while the rank's gathers a layer."""
    assert report("threads", timeout=60)["threads"] == {"resized": 32}


@pytest.mark.slow
def test_training_waits_for_what_it_uses(report: Callable[..., Reports]) -> None:
    ranks = report("ranks", timeout=900)["ranks"]
    assert {name: of["races"] for name, of in ranks.items()} == {name: [] for name in ranks}
    assert all(ranks[name]["deferred"] for name in ("pipeline", "zero2", "host", "files"))


def test_a_step_is_timed_by_events(reports: Reports) -> None:
    assert reports["parts"]["spans"] == ["wait 0F0", "0F0"]
    assert reports["parts"]["span_calls"] == ["synchronise npu:0"]


def test_a_repeated_forward_draws_the_same_numbers(reports: Reports) -> None:
    assert reports["parts"]["drawn"]
    assert reports["parts"]["drawn_again"]


def close(computed: list[list[float | None]], expected: list[list[float | None]], rel: float) -> None:
    """Losses and norms of the same number of steps, which fall."""
    assert len(computed) == len(expected) > 0
    for row, other in zip(computed, expected, strict=True):
        assert row == pytest.approx(other, rel=rel)


def test_jobs_on_devices_train_like_those_on_the_cpu(reports: Reports) -> None:
    sharded = reports["sharded"]
    close(sharded["npu"], sharded["cpu"], 1e-11)
    assert sharded["npu_memory"] > 0
    assert sharded["cpu_memory"] is None


def test_the_first_line_of_a_run_names_its_devices(tmp_path: Path) -> None:
    for kind, ranks in (("npu", "on 2 ranks (dp2, npu), 1f1b"), ("cpu", "on 2 ranks (dp2), 1f1b")):
        config = job(tmp_path, "layout.dp=2", f"train.device={kind}")
        tokens = open_tokens(config)
        assert ranks in banner_of(tokens, config)


def equal_with_and_without_graphs(of: dict[str, Any]) -> None:
    """Losses, norms, evaluations, loss scales and weights, of steps of which most were replayed."""
    assert of["replayed"] == of["microbatches"] - 3 > 0
    assert of["graphed"] == pytest.approx(of["plain"], rel=1e-12, nan_ok=True)
    assert of["weights"] < 1e-12
    assert of["scales"][0] == of["scales"][1]


def test_a_graph_of_a_microbatch_computes_what_the_microbatch_does(reports: Reports) -> None:
    graphs = reports["graphs"]
    for of in graphs.values():
        equal_with_and_without_graphs(of)
    # some steps overflow, others do not: the graph has no loss scale of its own
    scales, _ = graphs["float16"]["scales"]
    assert any(low < high for low, high in pairwise(scales))
    assert any(low > high for low, high in pairwise(scales))


@pytest.mark.slow
def test_graphs_of_every_kind_of_job(report: Callable[..., Reports]) -> None:
    for of in report("graphs_all", timeout=900)["graphs_all"].values():
        equal_with_and_without_graphs(of)


@pytest.mark.slow
def test_a_run_with_graphs_goes_on_from_its_checkpoint(report: Callable[..., Reports]) -> None:
    runs = report("resumed_graphs", timeout=600)["resumed_graphs"]
    close(runs["graphed"], runs["plain"], 1e-12)
    close(runs["resumed"], runs["plain"][3:], 1e-12)


ONCE = {"run/train/agreement.py wait: copy to cpu": 1}
TABLES = "engine/parallel/expert/dispatch.py _table: copy to cpu"  # one a layer and microbatch


def test_the_host_waits_for_the_device_once_a_step(reports: Reports) -> None:
    """What ranks agree on, with the norm and the tokens that count: whatever else is computed stays there."""
    waits = reports["waiting"]
    assert waits == {"sharded in float16": ONCE, "experts": ONCE | {TABLES: 4}}


@pytest.mark.slow
def test_where_the_host_waits_in_every_kind_of_job(report: Callable[..., Reports]) -> None:
    waits = report("waiting_all")["waiting_all"]
    assert waits.pop("experts") == ONCE | {TABLES: 4}
    assert waits.pop("experts together") == ONCE | {TABLES: 8}
    spoiled = "run/train/rank_model.py first_bad_weight: _local_scalar_dense"
    assert waits.pop("asynchronous") == ONCE | {spoiled: 1}
    assert waits.pop("server") == ONCE | {"run/train/batches.py _from_server: _local_scalar_dense": 1}
    assert {name: of for name, of in waits.items() if of != ONCE} == {}


@pytest.mark.slow
def test_an_error_is_reported_before_what_is_queued_times_out(
    report: Callable[..., Reports],
) -> None:
    failing = report("failing")["failing"]
    assert "rank 0 failed: pipeline rank 0 at 0F0: a broken layer, in step 2" in failing["error"]
    assert failing["seconds"] < failing["timeout"]


@pytest.mark.slow
def test_a_checkpoint_of_devices_goes_on_elsewhere(report: Callable[..., Reports]) -> None:
    pipelines = report("pipelines")["pipelines"]
    close(pipelines["npu"], pipelines["cpu"], 1e-11)
    close(pipelines["resumed"], pipelines["cpu"][3:], 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "rel"),
    # in 16 bits weight gradients of the CPU are summed in float32, those of the device in 16
    [("tensors", 1e-11), ("experts", 1e-11), ("short", 0.05), ("tables", 1e-11)],
)
def test_other_jobs_on_devices_train_like_those_on_the_cpu(
    report: Callable[..., Reports], case: str, rel: float
) -> None:
    result = report(case)[case]
    close(result["npu"], result["cpu"], rel)


@pytest.mark.slow
def test_a_device_is_calibrated_and_named(report: Callable[..., Reports]) -> None:
    result = report("calibrated")["calibrated"]
    assert result["device"].startswith("npu-")
    assert result["notes"] == "Ascend 910B, simulated"
    assert result["memory"] == 2**36
    assert result["precisions"] == ["bf16", "fp32"]
    assert result["link"] == "hccl"
    assert "all-reduce" in result["collectives"]
    assert result["computing"] is None  # ranks share no cores
    assert result["too_many"].startswith("5 ranks, but there are 4 devices of kind npu here")
