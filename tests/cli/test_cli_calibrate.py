"""`stretto calibrate`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.cli.main import DONE, run
from stretto.planner.machines.catalogue import add_history, find_cluster, history_path, profile_path
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.describe import save_cluster
from stretto.run.calibrate import profile

calls = list[tuple[int | None, bool, bool, str, float]]()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is measured at once."""

    def calibrate(ranks: int | None, quick: bool, *, quiet: bool, device: str, seconds: float) -> Cluster:
        calls.append((ranks, quick, quiet, device, seconds))
        cpu = find_cluster("cpu")
        rows = [[4, 4, 4096, 0.002], [4, 4, 2**20, 0.004]]
        kernels = {"launch": 1e-6, "layer": 1e-3, "action": 5e-4}
        core = replace(cpu.device, name="mine", kernels=kernels)
        return replace(cpu, name="mine", device=core, nodes=1, computing=2, tables={"all-reduce": rows})

    monkeypatch.setattr(profile, "calibrate", calibrate)


def test_the_profile_is_written_to_its_usual_place(
    measured: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stretto: CommandLine,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    add_history(profile_path(), {"cluster": "mine", "ratio": 2.0})
    text = " ".join(stretto("calibrate", "--ranks", "3", "--device", "npu").split())
    assert calls[-1] == (3, False, False, "npu", 180.0)
    assert f"profile: {profile_path()}" in text
    assert "a block 1000 us, an action 500 us; ranks share 2 cores" in text
    assert find_cluster("here").name == "mine"
    assert not history_path(profile_path()).exists()  # it was of another profile


def test_json_is_one_object_with_profile_and_path(
    measured: None, tmp_path: Path, stretto: CommandLine
) -> None:
    out = tmp_path / "my.yaml"
    report = stretto.json("calibrate", "--quick", "--seconds", "20", "--out", out)
    assert calls[-1] == (None, True, True, "auto", 20.0)
    assert report["path"] == str(out)
    assert report["profile"]["layer_us"] == pytest.approx(1000)
    assert report["profile"]["collectives"]["all-reduce"][0] == [4, 4, 4096, 0.002]
    assert find_cluster(out).computing == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "{tmp}/none/here.yaml"], "no folder"),
        (["--out", "{tmp}/here.txt"], "a profile is a YAML file"),
        (["--out", "{tmp}/folder.yaml"], "cannot be written to"),
        (["--ranks", "0"], "--ranks"),
        (["--device", "gpu:1"], "--device is 'gpu:1', must be auto or a kind of device"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    measured: None, tmp_path: Path, stretto: CommandLine, arguments: list[str], says: str
) -> None:
    (tmp_path / "folder.yaml").mkdir()
    before = len(calls)
    error = stretto.error("calibrate", *(word.format(tmp=tmp_path) for word in arguments))
    assert error.startswith("error: ")
    assert says in error
    assert len(calls) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(measured: None, tmp_path: Path, stretto: CommandLine) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written to" in stretto.error("calibrate", "--out", str(tmp_path / "here.yaml"))


def test_peaks_do_not_fall_with_the_load_of_the_machine(
    measured: None, tmp_path: Path, stretto: CommandLine
) -> None:
    """MFU before and after a second calibration is of one peak."""
    out = tmp_path / "my.yaml"
    stretto("calibrate", "--out", out)
    faster = replace(find_cluster(out).device, tflops={"fp32": 0.2})
    save_cluster(replace(find_cluster(out), device=faster), out)
    stretto("calibrate", "--out", out)
    assert find_cluster(out).device.tflops == {"fp32": 0.2, "bf16": 0.06}
    save_cluster(replace(find_cluster(out), device=replace(faster, name="another")), out)
    stretto("calibrate", "--out", out)
    assert find_cluster(out).device.tflops == {"fp32": 0.12, "bf16": 0.06}
    out.write_text("device: [")
    assert "profile: " in stretto("calibrate", "--out", out)


def test_a_busy_machine_and_what_it_widens_are_reported(
    measured: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "this machine is busy: 40 runnable processes on 2 cores"
    monkeypatch.setattr("stretto.run.watch.machine.busy_text", lambda: text)
    out = tmp_path / "my.yaml"
    quiet = profile.calibrate
    monkeypatch.setattr(
        profile,
        "calibrate",
        lambda *args, **options: replace(
            quiet(*args, **options), spread={"kernels": 0.25}, notes="no time for attention"
        ),
    )
    assert run(["calibrate", "--out", str(out)]) == DONE
    printed, warned = capsys.readouterr()
    assert f"warning: {text}; intervals of predictions will be wider" in warned
    printed = " ".join(printed.split())
    assert "widened by how the measurements varied: kernels 25%" in printed
    assert "no time for attention" in printed
