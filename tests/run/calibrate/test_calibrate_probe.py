"""The short measurement before the first training on a machine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.cli.jobs import job_type
from stretto.errors import StrettoError
from stretto.planner.machines import catalogue
from stretto.planner.machines.catalogue import find_cluster, history_path, local_profile, probe_path
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.describe import save_cluster
from stretto.run.calibrate import probe as module
from stretto.run.config import TrainConfig
from stretto.run.config.job import job_of
from stretto.run.train.launch import JobType
from stretto.run.train.prediction import prediction_line
from tiny_job import job

LONG = "train.steps=1000000000"


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[float]]:
    """An unknown CPU that is measured at once, with a half width; returns the seconds that each took."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(catalogue, "_DRIVER", tmp_path / "no-driver")
    taken = list[float]()

    def patch(width: float) -> list[float]:
        def calibrate(*, quick: bool, quiet: bool, device: str, seconds: float) -> Cluster:
            taken.append(seconds)
            if not width:
                raise StrettoError("too many ranks")
            cpu = find_cluster("cpu")
            core = replace(cpu.device, name="mine", kernels={"launch": 1e-6})
            return replace(cpu, device=core, name="mine", nodes=1, spread={"kernels": width})

        monkeypatch.setattr(module, "calibrate", calibrate)
        monkeypatch.setattr(module.time, "sleep", lambda _: None)
        monkeypatch.setattr(module, "OtherProcesses", lambda: nullcontext(Namespace(share=0.4)))
        return taken

    return patch


def probe(config: TrainConfig, quiet: bool = False) -> None:
    train = config.train
    module.probe(job_of(config), steps=train.steps, device=train.device, threads=train.threads, quiet=quiet)


def line(config: TrainConfig) -> str:
    return prediction_line(job_of(config), config.train.device, config.train.threads)


def test_a_machine_is_measured_once_and_predicts_from_then_on(
    measure: Callable[[float], list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken, config = measure(0.2), job(tmp_path, LONG)
    assert "rough" in line(config)
    probe(config)
    assert taken == [10.0]
    assert f"measuring it for 10 s, for predictions (--no-probe leaves this out); kept in {probe_path()}" in (
        capsys.readouterr().out
    )
    assert line(config).endswith("from the probe of this machine, which `stretto calibrate` makes exact")
    probe(config)
    assert len(taken) == 1
    assert find_cluster("here").name == "cpu"  # what a run depends on does not change with the probe
    assert history_path(local_profile()).name.endswith(".probe.runs.jsonl")
    save_cluster(replace(find_cluster("cpu"), nodes=1), catalogue.profile_path())
    assert local_profile() == catalogue.profile_path()


@pytest.mark.parametrize("overrides", [["train.steps=10"], [LONG, "train.threads=2"]])
def test_short_runs_and_those_that_are_not_predicted_begin_at_once(
    measure: Callable[[float], list[float]], tmp_path: Path, overrides: list[str]
) -> None:
    taken = measure(0.2)
    probe(job(tmp_path, *overrides))
    assert not taken
    assert not probe_path().exists()


@pytest.mark.parametrize(("width", "says"), [(0.9, "says too little"), (0.0, "too many ranks")])
def test_a_probe_that_says_nothing_is_not_kept_and_stops_nothing(
    measure: Callable[[float], list[float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    width: float,
    says: str,
) -> None:
    taken, config = measure(width), job(tmp_path, LONG)
    probe(config, quiet=True)
    assert taken
    printed = capsys.readouterr()
    assert says in printed.err
    assert not printed.out
    assert not probe_path().exists()
    assert "rough" in line(config)


@pytest.mark.parametrize("options", [[], ["--no-probe"]])
def test_a_training_probes_before_it_prints_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretto: CommandLine, options: list[str]
) -> None:
    probed = list[bool]()

    def run_job(kind: JobType[TrainConfig, object], config: TrainConfig, quiet: bool, port: int) -> None:
        if kind.print_start is not job_type(config).print_start:
            kind.print_start(config, None, quiet)
        raise StrettoError("far enough")

    def stop(*_: object, quiet: bool, **__: object) -> None:
        probed.append(quiet)
        raise StrettoError("probed")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stretto.run.train.launch.run_job", run_job)
    monkeypatch.setattr(module, "probe", stop)
    says = stretto.error("train", "quickstart", *options)
    assert ("probed" in says, probed) == ((False, []) if options else (True, [False]))


def test_a_busy_machine_is_not_probed(
    measure: Callable[[float], list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken = measure(0.2)
    monkeypatch.setattr(module, "OtherProcesses", lambda: nullcontext(Namespace(share=0.86)))
    probe(job(tmp_path, LONG))
    assert not taken
    assert "other processes use 86% of the cores" in capsys.readouterr().err
