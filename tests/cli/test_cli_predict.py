"""`stretto predict`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from command_line import CommandLine

CONFIGS = Path(__file__).parents[2] / "configs"
LLAMA = ["--model", "llama3-8b", "--cluster", "dgx-h100:16"]
LAYOUT = ["tp=4", "pp=2", "micro=1", "batch=64"]


def test_one_layout(stretto: CommandLine) -> None:
    report = stretto.json("predict", *LLAMA, *LAYOUT)
    (row,) = report["rows"]
    assert report["error"] is None
    assert (row["layout"], row["gpus"], row["schedule"]) == ("tp4 dp2 pp2", 16, "1f1b")
    assert row["low"] < row["step_time_s"] < row["high"]
    assert sum(row["parts"].values()) == pytest.approx(row["step_time_s"], rel=0.02)
    assert row["tokens_per_s"] == pytest.approx(64 * 8192 / row["step_time_s"])
    assert 0.1 < row["mfu"] < 0.8
    assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 989, rel=0.01)
    assert row["memory_gib"] == row["memory"]["allocated"]["gib"] <= row["memory"]["device"]["gib"]
    assert (row["verdict"], row["zero"]) == ("fits", "zero1")
    assert {"dp", "zero", "sp", "precision", "attention"} <= row["defaults"].keys()


def test_people_s_text(stretto: CommandLine) -> None:
    text = stretto("predict", *LLAMA, *LAYOUT)
    for word in ("step time", "tokens/s", "MFU", "HFU", "memory, device", "fits", "where the time goes", "█"):
        assert word in text
    assert "defaults: seq=8192 (the model's); dp=2" in text


def test_the_speed_of_a_slow_device_is_not_rounded_to_nothing(stretto: CommandLine) -> None:
    config = str(CONFIGS / "quickstart.yaml")
    report = stretto.json("predict", config, "--cluster", "cpu:4")
    line = next(
        line for line in stretto("predict", config, "--cluster", "cpu:4").splitlines() if "TFLOP/s" in line
    )
    rate = float(line.split()[3])
    assert rate == pytest.approx(report["rows"][0]["tflops_per_gpu"], rel=5e-3)
    assert 0 < rate < 0.1


def test_what_does_not_fit_is_a_no(stretto: CommandLine) -> None:
    arguments = ["--model", "llama3-70b", "--cluster", "dgx-h100:8", "tp=1", "zero=0", "batch=8"]
    (row,) = stretto.json("predict", *arguments, code=1)["rows"]
    assert row["verdict"] == "does not fit"


def test_a_config(stretto: CommandLine) -> None:
    config = str(CONFIGS / "llama-1b-64gpu.yaml")
    (row,) = stretto.json("predict", config, "--cluster", "dgx-a100-80gb")["rows"]
    assert row["gpus"] == 64
    (other,) = stretto.json("predict", config, "recompute.mode=full", "--cluster", "dgx-a100-80gb")["rows"]
    assert other["step_time_s"] > row["step_time_s"]
    assert other["memory_gib"] < row["memory_gib"]
    assert not row["defaults"]


def test_devices_that_a_config_leaves_idle_are_named(stretto: CommandLine) -> None:
    config = str(CONFIGS / "llama-1b-64gpu.yaml")
    (row,) = stretto.json("predict", config, "--cluster", "h100:128")["rows"]
    assert row["defaults"] == {"devices": "64 of 128, as many as the config's layout has"}
    (row,) = stretto.json("predict", config, "--cluster", "h100:64")["rows"]
    assert not row["defaults"]


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ([*LLAMA, "tp=3", "batch=64"], "tp=3"),
        ([*LLAMA, "tq=4"], "did you mean 'tp'"),
        ([*LLAMA, "tp"], "is not of the form key=value"),
        ([*LLAMA, "tp=4", "tp=2"], "given twice"),
        ([*LLAMA, "dp=3", "tp=4", "batch=64"], "dp=3 is not 16 GPUs"),
        ([*LLAMA, "batch=63", "tp=4", "dp=4"], "batch.global_size is 63"),
        ([*LLAMA, "tp=4", "notes=today"], "is not a field of a layout"),
        ([*LLAMA, "schedule=clockwise", "pp=2", "batch=64"], "clockwise"),
        ([*LLAMA, "tflops_per_gpu=400"], "is not a field of a layout"),
        (["--model", "llama9-8b", "--cluster", "dgx-h100"], "llama9-8b"),
        (["--model", "llama3-8b", "--cluster", "quantum"], "quantum"),
        (["--model", "llama3-8b"], "--cluster is missing"),
        (["--cluster", "dgx-h100"], "--model is missing"),
        (["--table", "nowhere.csv"], "cannot read"),
        (["--table", "nowhere.csv", "tp=4"], "leave one of them out"),
        ([*LLAMA, "--out", "x.csv"], "--out needs --table"),
    ],
)
def test_bad_input(stretto: CommandLine, arguments: list[str], phrase: str) -> None:
    errors = stretto.error("predict", *arguments)
    assert "error:" in errors
    assert "hint:" in errors
    assert phrase in errors


TABLE = """\
model,gpu,gpus,tp,pp,chunks,seq,micro,batch,recompute,iter_time_s,tflops_per_gpu,peak_mem_gib,oom,x_hue
llama3-8b,H100,16,4,1,,8192,1,64,none,1.2,,,,red
llama3-8b,H100,16,4,2,2,8192,1,64,full,,400,30,,blue
llama3-8b,H100,16,8,1,,8192,1,64,none,,,,1,
lama3-9b,V100-32GB,64,,,,1024,16,1024,none,180,,,,
llama3-8b,H100,16,4,1,,8192,1,64,sometimes,1.1,,,,
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(TABLE)
    return path


def test_a_table(stretto: CommandLine, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    report = stretto.json("predict", "--table", str(table), "--out", str(out))
    assert [bool(row["refused"]) for row in report["rows"]] == [False, False, False, True, True]
    assert report["error"]["rows"] == report["baseline"]["rows"] == 2
    assert report["error"]["groups"] == 1
    assert {"mape", "median", "worst", "bias", "regret", "concordance"} <= report["error"].keys()
    assert report["rows"][0]["error"] == pytest.approx(report["rows"][0]["step_time_s"] / 1.2 - 1)
    assert report["memory"]["rows"] == 1
    assert sum(report["memory"]["out_of_memory"].values()) == 1
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["x_hue"] for row in written] == ["red", "blue", "", "", ""]  # its own columns, unchanged
    assert float(written[1]["error_pct"]) == pytest.approx(100 * report["rows"][1]["error"], rel=1e-4)
    assert "allowed: none, selective, full" in written[4]["refused"]
    assert report["rows"][1]["defaults"]["flops_counted"].startswith("model")
    assert "zero=" in written[0]["defaults"]


def test_a_table_as_text(stretto: CommandLine, table: Path) -> None:
    text = stretto("predict", "--table", str(table))
    for word in (
        "5 rows, 3 predicted",
        "two lines",
        "measured twice",
        "2.2%",
        "out of memory: 1 row",
        "row 2: tflops_per_gpu is taken as model FLOPs",
        "recompute is 'sometimes', allowed: none, selective, full",
    ):
        assert word in text


def test_defaults_are_listed_and_rows_shown_cell_by_cell(stretto: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("model,gpu,gpus,tp,batch,step_time_s\nllama3-8b,h100,16,2,64,1.2\nllama3-8b,,8,2,64,1\n")
    text = stretto("predict", "--table", str(path), "--no-memory")
    for phrase in (
        "defaults of empty cells",
        "software=today: 1 row",
        "zero=1: 1 row",
        "the row has no GPU; fill in gpu, as in A100-80GB-SXM (row 2)",
    ):
        assert phrase in text
    text = stretto("predict", "--table", str(path), "--row", "1", "--no-memory")
    for phrase in (
        "default",
        "8192 (the model's)",
        "what the others leave",
        "measured: 1.2 s by step_time_s",
    ):
        assert phrase in text
    assert "not predicted: the row has no GPU" in stretto(
        "predict", "--table", str(path), "--row", "2", "--no-memory"
    )
    assert "has no row 3" in stretto.error("predict", "--table", str(path), "--row", "3")
    assert "--row needs --table" in stretto.error("predict", *LLAMA, "--row", "1")
    rows = stretto.json("predict", "--table", str(path), "--row", "2", "--no-memory")["rows"]
    assert [row["row"] for row in rows] == [2]


def test_a_written_table_is_a_table(stretto: CommandLine, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    first = stretto.json("predict", "--table", str(table), "--out", str(out), "--no-memory")
    again = stretto.json("predict", "--table", str(out), "--no-memory")
    assert again["error"] == first["error"]


def test_a_table_with_a_column_that_there_is_not(stretto: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(TABLE.replace("x_hue", "hue"))
    errors = stretto.error("predict", "--table", str(path))
    assert "no column 'hue'" in errors
    assert "--table-columns" in errors


def test_the_columns_of_a_table(stretto: CommandLine) -> None:
    text = stretto("predict", "--table-columns")
    assert "| `flops_counted` |" in text
    assert stretto.json("predict", "--table-columns") == {"columns": text}
