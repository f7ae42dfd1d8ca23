"""The cluster of this machine: its profile, its driver, and corrections from earlier runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.planner.machines import catalogue as here
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.describe import save_cluster


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the profile in an empty configuration folder, on a machine without GPUs."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(here, "_DRIVER", tmp_path / "no-driver")
    here.profile_path().parent.mkdir(parents=True)
    return here.profile_path()


def keep_profile(path: Path) -> None:
    cpu = find_cluster("cpu")
    device = replace(cpu.device, name="mine", kernels={"launch": 1e-6})
    save_cluster(replace(cpu, name="mine", device=device, nodes=1), path)


def test_the_profile_is_in_the_user_s_configuration_folder(place: Path, tmp_path: Path) -> None:
    assert place.parent == tmp_path / "stretto" / "profiles"
    assert place.suffix == ".yaml"


def test_without_a_profile_it_is_the_catalogue_s_cpu(place: Path) -> None:
    cluster = here.cluster_here(4)
    assert (cluster.name, cluster.node) == ("cpu", 4)
    assert here.is_cpu(cluster)
    assert not here.is_measured(cluster)


def test_a_profile_takes_precedence_over_the_catalogue(place: Path) -> None:
    keep_profile(place)
    cluster = find_cluster("here:4")
    assert (cluster.name, cluster.device.name, cluster.node) == ("mine", "mine", 4)
    assert here.is_measured(cluster)


def test_the_driver_identifies_the_gpu(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "_DRIVER", tmp_path)
    (tmp_path / "0000:00").mkdir()
    information = "Model: \t NVIDIA H100 80GB HBM3\nIRQ: 12\n"
    (tmp_path / "0000:00" / "information").write_text(information)
    assert here.driver_name() == "NVIDIA H100 80GB HBM3"
    assert here.cluster_here(8).device.name == "h100-80gb-sxm"
    keep_profile(place)  # of the CPU, which a job for the GPU does not ask for
    assert here.cluster_here(8, "cuda").device.name == "h100-80gb-sxm"
    assert here.cluster_here(8, "cpu").device.name == "mine"


def test_a_broken_profile_is_an_error(place: Path) -> None:
    place.write_text("device: [")
    with pytest.raises(StrettoError, match="YAML"):
        here.cluster_here()


def add(place: Path, *ratios: float, cluster: str = "mine") -> None:
    for ratio in ratios:
        here.add_history(place, {"cluster": cluster, "ratio": ratio})


def test_a_few_runs_correct_the_next_prediction(place: Path) -> None:
    keep_profile(place)
    add(place, 1.4, 1.2)
    assert here.cluster_here().correction == 1.0  # two are no few
    add(place, 9.0, 1.3, cluster="another")
    assert here.cluster_here().correction == 1.0
    add(place, 1.1)
    assert here.cluster_here().correction == pytest.approx(1.2)


def test_a_correction_uses_recent_runs_and_is_limited(place: Path) -> None:
    keep_profile(place)
    add(place, *[1.5] * here.RECENT, *[0.9] * here.RECENT)
    assert here.cluster_here().correction == pytest.approx(0.9)
    add(place, *[50.0] * here.RECENT)
    assert here.cluster_here().correction == pytest.approx(3.0)


@pytest.mark.parametrize("line", ["{", "[]", '{"cluster": "mine"}', '{"cluster": "mine", "ratio": "fast"}'])
def test_invalid_lines_are_skipped(place: Path, line: str) -> None:
    add(place, 1.0)
    with here.history_path(place).open("a") as file:
        file.write(line + "\n" + json.dumps({"cluster": "mine", "ratio": -1}) + "\n")
    rows: list[dict[str, Any]] = here.history(place, "mine")
    assert [row["ratio"] for row in rows] == [1.0]


def test_runs_that_cannot_be_read_are_an_error_and_no_missing_correction(place: Path) -> None:
    keep_profile(place)
    here.history_path(place).mkdir()
    with pytest.raises(StrettoError, match=r"cannot read .*, by which predictions are corrected"):
        here.cluster_here()
