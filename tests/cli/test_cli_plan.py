"""`stretto plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli.main import run
from stretto.planner.search import search as search_module
from stretto.run.config.job import job_of
from stretto.run.config.load import load
from stretto.run.config.required import FIELDS, settings

BIG = ["plan", "--model", "llama3-8b", "--cluster", "h100:64", "--batch", "256", "--sequence", "4096"]
FIXED = [
    "--fix",
    "tp=4",
    "--fix",
    "pp=2",
    "--fix",
    "cp=1",
    "--fix",
    "micro_batch=1",
    "--fix",
    "schedule=1f1b,zb-v",
]


def test_json_ranks_layouts_and_writes_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planned.yaml"
    assert run([*BIG, *FIXED, "--top", "2", "--write", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    first = facts["ranking"][0]
    assert first["low"] < first["step_time_s"] < first["high"]
    assert first["sizes"]["tp"] == 4
    assert sum(first["parts"].values()) == pytest.approx(first["step_time_s"])
    assert facts["candidates"] >= facts["feasible"] > 0
    job = job_of(load(path))
    assert job.layout.sizes == first["sizes"]
    assert (job.schedule, job.micro_batch, job.dp.mode) == (first["schedule"], 1, first["dp"]["mode"])
    assert facts["required"] == list(FIELDS)
    launch = ["launch", "slurm", str(path), "--nodes", "8"]
    assert run(launch) == 2
    assert "5 fields are marked REQUIRED in the config" in capsys.readouterr().err
    assert run([*launch, "data.source=.", *settings(facts["required"]).split()[1:]]) == 0
    assert "#SBATCH" in capsys.readouterr().out


def test_a_written_config_is_no_trap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a plan cannot know is marked; all commands but training take it as it is."""
    path = tmp_path / "planned.yaml"
    assert run([*BIG, *FIXED, "--top", "1", "--write", str(path)]) == 0
    assert f"wrote {path}: stretto train {path} data.source=PATH train.steps=1000" in capsys.readouterr().out
    text = path.read_text()
    assert "  steps: REQUIRED  # updates in the whole run\n" in text
    config = load(path)
    assert config.required == tuple(FIELDS)
    assert (config.data.vocab, config.shape().vocab, config.sample.tokens) == (128256, 128256, 0)
    for accepted in (["config"], ["memory"], ["predict", "--cluster", "h100:64"]):
        assert run([accepted[0], str(path), *accepted[1:]]) == 0
    capsys.readouterr()
    assert run(["train", str(path), "train.steps=5", "optim.lr=1e-3"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == (
        "error: 3 fields are marked REQUIRED in the config, and training needs them: data.source, "
        "checkpoint.every, run.dir"
    )
    assert "as in data.source=PATH checkpoint.every=500 run.dir=runs" in hint
    others = ["data.source=.", "checkpoint.every=null", f"run.dir={tmp_path}", "train.device=cpu"]
    words = ["train.steps=5", "optim.lr=1e-3", *others, "data.vocab=4096"]
    assert run(["train", str(path), *words]) == 2
    assert (
        "model.vocab is 128256: the data's tokenizer has 4096 entries, so 124160 rows of the embedding"
        in (capsys.readouterr().err)
    )


def test_a_plan_of_a_config_keeps_its_data_and_steps(tmp_path: Path) -> None:
    base, path = tmp_path / "base.yaml", tmp_path / "planned.yaml"
    base.write_text(
        "model: {preset: llama3-8b}\ndata: {source: text, sequence: 4096}\n"
        "train: {steps: 70}\noptim: {lr: REQUIRED}\nbatch: {global_size: 256}\n"
    )
    assert run(["plan", str(base), *BIG[3:5], *FIXED, "--top", "1", "--write", str(path)]) == 0
    config = load(path)
    assert (config.data.source, config.train.steps, config.required) == ("text", 70, ("optim.lr",))
    assert run(["plan", str(base), *BIG[1:5], *FIXED, "--top", "1", "--write", str(path)]) == 0
    assert load(path).data.source == "text"
    other = ["--model", "llama3.2-1b", *BIG[3:5], *FIXED, "--top", "1", "--write", str(path)]
    assert run(["plan", str(base), *other]) == 0
    assert load(path).model.preset == "llama3.2-1b"


def test_what_cannot_be_built_is_planned_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["plan", "--model", "nemotron4-15b", *BIG[3:], *FIXED, "--top", "1"]
    assert run(wanted) == 0
    assert "training cannot build this model yet: it has an MLP of kind relu2" in " ".join(
        capsys.readouterr().out.split()
    )
    monkeypatch.setattr(search_module, "search", lambda *_: pytest.fail("searched before the refusal"))
    assert run([*wanted, "--write", str(tmp_path / "no.yaml")]) == 2
    said = capsys.readouterr().err
    assert "not yet built" in said
    assert "`stretto catalogue NAME` says whether" in said
    assert not (tmp_path / "no.yaml").exists()


def test_text_gives_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BIG, *FIXED, "--top", "2"]) == 0
    said = capsys.readouterr().out
    facts = {line[:10].strip(): line[10:] for line in said.splitlines()[:6]}
    assert facts["model"] == "llama3-8b: 8.03 B parameters, 32 layers of width 4096"
    assert facts["batch"] == "256 x 4096 tokens, bfloat16"
    assert facts["cluster"].startswith("64 x h100")
    assert facts["node"].startswith("8 nodes of 8 devices, NVLink")
    assert facts["network"].endswith("GB/s per device between nodes")
    assert facts["software"] == "today"
    assert "computes for" in said
    assert "rejected, " in said


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_nothing_is_cut_on_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are left out and texts wrap at spaces; no cell ends in an ellipsis."""
    from io import StringIO

    from rich.console import Console

    from stretto.cli import plan as command

    to = Console(file=StringIO(), width=width)
    monkeypatch.setattr(command, "report", lambda facts, as_json, text: text(to))
    assert run([*BIG, *FIXED, "--top", "2"]) == 0
    said = to.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= width
    head = next(line for line in said.splitlines() if "step s" in line).split()
    assert {"GiB", "fits"} <= set(head)
    assert ("tokens/s" in head) == (width >= 60)


def test_the_page_has_the_commands_that_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, config = tmp_path / "plan.html", tmp_path / "planned.yaml"
    assert run([*BIG, *FIXED, "--top", "1", "--html", str(page), "--write", str(config)]) == 0
    text = page.read_text(encoding="utf-8")
    again = " ".join([*BIG, *FIXED, "--top", "1", "--write", str(config)])
    assert f"<code>stretto {again}</code>" in text
    predict = f"stretto predict {config} --cluster h100:64"
    assert f"<code>{predict}</code>" in text
    capsys.readouterr()
    assert run([*predict.split()[1:], "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)["rows"][0]["step_time_s"]
    assert f"<b>{seconds:.4g} s</b> a step" in text


@pytest.mark.slow
def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "--model", "gpt3-175b", "--cluster", "rtx-4090:8", "--batch", "8"]
    assert run([*small, "--fix", "micro_batch=1", "--fix", "schedule=1f1b"]) == 1
    said = capsys.readouterr().out
    assert "nothing fits" in said
    assert "lacks" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--fix", "tpp=8"], "did you mean 'tp'"),
        (["--fix", "tp=x"], "not a number"),
        (["--fix", "schedule=1f2b"], "did you mean '1f1b'"),
        (["--fix", "tp"], "as in --fix tp=8"),
        (["--objective", "speed"], "tokens_per_dollar"),
        (["--precision", "bf17"], "bf16"),
        (["--fix", "tp=3"], "no layout"),
    ],
)
def test_what_is_wrong_is_told(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BIG, *more]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_planned_config_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(
        "model: {family: llama, layers: 4, hidden: 64, heads: 4}\n"
        "data: {sequence: 64, vocab: 512}\nbatch: {global_size: 8}\nsample: {tokens: 0}\n"
    )
    wanted = ["plan", "tiny.yaml", "--cluster", "a100:2", "--fix", "tp=2", "--top", "1"]
    assert run([*wanted, "--write", "planned.yaml"]) == 0
    capsys.readouterr()
    assert run(["train", "planned.yaml", "train.steps=2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"] == 2


def test_a_length_that_nobody_gave_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BIG[:-2], *FIXED, "--top", "1"]) == 0
    note = "note: no --sequence: planned for samples of 8,192 tokens, as llama3-8b was pretrained"
    assert capsys.readouterr().out.startswith(note)
    assert run([*BIG, *FIXED, "--top", "1"]) == 0
    assert "no --sequence" not in capsys.readouterr().out


def test_a_search_that_is_cut_short_never_says_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["plan", "--model", "deepseek-v3", "--cluster", "hgx-h800:2048", "--batch", "15360"]
    assert run([*large, "--seconds", "0.1"]) == 3
    said = capsys.readouterr().out
    assert "cut short after" in said
    assert "nothing was found that fits" in said
    assert "nothing fits" not in said
    assert run([*large, "--seconds", "0.1", "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert (facts["complete"], facts["gap"], facts["ranking"]) == (False, None, [])


def test_the_safe_and_the_plain_layouts_are_beside_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BIG, *FIXED, "--room", "20", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["complete"]
    assert facts["plain"]["FSDP"] is None  # tp=4 is fixed
    safe = facts["safe"]["memory"]
    assert safe["device"]["high_gib"] + 20 <= safe["capacity_gib"]
    assert run([*BIG, *FIXED, "--room", "20"]) == 0
    said = capsys.readouterr().out
    assert "fastest that certainly fits with 20 GiB free: " in said
    assert "FSDP: none was found that fits" in said


def test_a_batch_without_data_parallelism_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "gpt3-175b", "--cluster", "dgx-a100-80gb:1024", "--batch", "1537"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: batch is 1537, which has no common divisor with the 1024 devices: ")
    assert hint == "hint: nearest is 1536; or fix dp=1"
