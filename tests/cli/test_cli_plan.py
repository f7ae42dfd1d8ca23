"""`stretto plan`."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.planner import what_if
from stretto.planner.assumptions import software_profiles
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


def test_json_ranks_layouts_and_writes_a_config(tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "planned.yaml"
    report = stretto.json(*BIG, *FIXED, "--top", "2", "--write", str(path))
    first = report["ranking"][0]
    assert first["low"] < first["step_time_s"] < first["high"]
    assert first["sizes"]["tp"] == 4
    assert sum(first["parts"].values()) == pytest.approx(first["step_time_s"])
    assert report["candidates"] >= report["feasible"] > 0
    job = job_of(load(path))
    assert job.layout.sizes == first["sizes"]
    assert (job.schedule, job.micro_batch, job.dp.mode) == (first["schedule"], 1, first["dp"]["mode"])
    assert report["required"] == list(FIELDS)
    launch = ["launch", "slurm", str(path), "--nodes", "8"]
    assert "5 fields are marked REQUIRED in the config" in stretto.error(*launch)
    assert "#SBATCH" in stretto(*launch, "data.source=.", *settings(report["required"]).split()[1:])


def test_a_written_config_is_no_trap(tmp_path: Path, stretto: CommandLine) -> None:
    """What a plan cannot know is marked; all commands but training take it as it is."""
    path = tmp_path / "planned.yaml"
    assert f"wrote {path}: stretto train {path} data.source=PATH train.steps=1000" in stretto(
        *BIG, *FIXED, "--top", "1", "--write", str(path)
    )
    text = path.read_text()
    assert "  steps: REQUIRED  # updates in the whole run\n" in text
    config = load(path)
    assert config.required == tuple(FIELDS)
    assert (config.data.vocab, config.shape().vocab, config.sample.tokens) == (128256, 128256, 0)
    for accepted in (["config"], ["memory"], ["predict", "--cluster", "h100:64"]):
        stretto(accepted[0], str(path), *accepted[1:])
    error, hint = stretto.error("train", str(path), "train.steps=5", "optim.lr=1e-3").splitlines()
    assert error == (
        "error: 3 fields are marked REQUIRED in the config, and training needs them: data.source, "
        "checkpoint.every, run.dir"
    )
    assert "as in data.source=PATH checkpoint.every=500 run.dir=runs" in hint
    others = ["data.source=.", "checkpoint.every=null", f"run.dir={tmp_path}", "train.device=cpu"]
    overrides = ["train.steps=5", "optim.lr=1e-3", *others, "data.vocab=4096"]
    assert (
        "model.vocab is 128256: the data's tokenizer has 4096 entries, so 124160 rows of the embedding"
        in (stretto.error("train", str(path), *overrides))
    )


def test_a_plan_of_a_config_keeps_its_data_and_steps(tmp_path: Path, stretto: CommandLine) -> None:
    base, path = tmp_path / "base.yaml", tmp_path / "planned.yaml"
    base.write_text(
        "model: {preset: llama3-8b}\ndata: {source: text, sequence: 4096}\n"
        "train: {steps: 70}\noptim: {lr: REQUIRED}\nbatch: {global_size: 256}\n"
    )
    stretto("plan", str(base), *BIG[3:5], *FIXED, "--top", "1", "--write", str(path))
    config = load(path)
    assert (config.data.source, config.train.steps, config.required) == ("text", 70, ("optim.lr",))
    stretto("plan", str(base), *BIG[1:5], *FIXED, "--top", "1", "--write", str(path))
    assert load(path).data.source == "text"
    other = ["--model", "llama3.2-1b", *BIG[3:5], *FIXED, "--top", "1", "--write", str(path)]
    stretto("plan", str(base), *other)
    assert load(path).model.preset == "llama3.2-1b"


def test_what_cannot_be_built_is_planned_and_not_written(
    tmp_path: Path, stretto: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["plan", "--model", "nemotron4-15b", *BIG[3:], *FIXED, "--top", "1"]
    assert "training cannot build this model yet: it has an MLP of kind relu2" in " ".join(
        stretto(*wanted).split()
    )
    monkeypatch.setattr(search_module, "search", lambda *_: pytest.fail("searched before the refusal"))
    printed = stretto.error(*wanted, "--write", str(tmp_path / "no.yaml"))
    assert "not yet built" in printed
    assert "train a model without them" in printed
    assert not (tmp_path / "no.yaml").exists()


def test_text_gives_reasons(stretto: CommandLine) -> None:
    printed = stretto(*BIG, *FIXED, "--top", "2")
    lines = {line[:10].strip(): line[10:] for line in printed.splitlines()[:6]}
    assert lines["model"] == "llama3-8b: 8.03 B parameters, 32 layers of width 4096"
    assert lines["batch"] == "256 x 4096 tokens, bfloat16"
    assert lines["cluster"].startswith("64 x h100")
    assert lines["node"].startswith("8 nodes of 8 devices, NVLink")
    assert lines["network"].endswith("GB/s per device between nodes")
    assert lines["software"] == "today"
    assert "computes for" in printed
    assert "rejected, " in printed


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_nothing_is_cut_on_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, stretto: CommandLine
) -> None:
    """Columns are left out and texts wrap at spaces; no cell ends in an ellipsis."""
    from io import StringIO

    from rich.console import Console

    from stretto.cli import report

    to = Console(file=StringIO(), width=width)
    monkeypatch.setattr(report, "console", lambda: to)
    stretto(*BIG, *FIXED, "--top", "2")
    printed = to.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= width
    head = next(line for line in printed.splitlines() if "step s" in line).split()
    assert {"GiB", "fits"} <= set(head)
    assert ("tokens/s" in head) == (width >= 60)


def test_the_page_has_the_commands_that_go_on(tmp_path: Path, stretto: CommandLine) -> None:
    page, config = tmp_path / "plan.html", tmp_path / "planned.yaml"
    stretto(*BIG, *FIXED, "--top", "1", "--html", str(page), "--write", str(config))
    carried = re.search(
        r'<script id="answers" type="application/json">(.*?)</script>', page.read_text(), re.S
    )
    assert carried is not None
    plan = json.loads(carried[1])["plan"]
    again = " ".join([*BIG, *FIXED, "--top", "1", "--write", str(config)])
    predict = f"stretto predict {config} --cluster h100:64"
    assert {f"stretto {again}", predict} <= {*plan["commands"].values()}
    seconds = stretto.json(*predict.split()[1:])["rows"][0]["step_time_s"]
    assert plan["ranking"][0]["step_time_s"] == pytest.approx(seconds, rel=1e-12)


@pytest.mark.slow
def test_nothing_fits(stretto: CommandLine) -> None:
    small = ["plan", "--model", "gpt3-175b", "--cluster", "rtx-4090:8", "--batch", "8"]
    printed = stretto(*small, "--fix", "micro_batch=1", "--fix", "schedule=1f1b", code=1)
    assert "nothing fits" in printed
    assert "lacks" in printed


@pytest.mark.parametrize(
    ("more", "message"),
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
def test_what_is_wrong_is_told(more: list[str], message: str, stretto: CommandLine) -> None:
    assert message in stretto.error(*BIG, *more)


@pytest.mark.slow
def test_a_planned_config_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretto: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(
        "model: {family: llama, layers: 4, hidden: 64, heads: 4}\n"
        "data: {sequence: 64, vocab: 512}\nbatch: {global_size: 8}\nsample: {tokens: 0}\n"
    )
    wanted = ["plan", "tiny.yaml", "--cluster", "a100:2", "--fix", "tp=2", "--top", "1"]
    stretto(*wanted, "--write", "planned.yaml")
    report = stretto.json("train", "planned.yaml", "train.steps=2")
    assert report["steps"] == 2


def test_a_length_that_nobody_gave_is_named(stretto: CommandLine) -> None:
    of_model = ["plan", "--model", "llama3.1-8b", *BIG[3:-2], *FIXED, "--top", "1"]
    printed = " ".join(stretto(*of_model).split())
    assert "256 x 8192 tokens, bfloat16 (no --sequence: as in llama3.1-8b's config, before its" in printed
    assert "no --sequence" not in stretto(*BIG, *FIXED, "--top", "1")
    path = "configs/llama-1b-64gpu.yaml"
    report = stretto.json("plan", path, *BIG[3:5], "--fix", "mode=zero3", "--top", "1")
    assert report["defaults"] == {"batch": path, "sequence": path}
    job = job_of(load(path))
    assert (report["batch"], report["sequence"]) == (job.global_batch, job.sequence)


def test_software_is_set_and_shown_and_predicted_alike(tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "plan.yaml"
    plan = stretto.json(*BIG, *FIXED, "--top", "1", "--software", "tuned", "--write", path)
    assert plan["software"] == "tuned"
    row = stretto.json("predict", path, "--cluster", "h100:64", "--software", "tuned")["rows"][0]
    assert row["step_time_s"] == plan["ranking"][0]["step_time_s"]
    assert (
        row["step_time_s"] < stretto.json("predict", path, "--cluster", "h100:64")["rows"][0]["step_time_s"]
    )
    assert "software  eager" in stretto(*BIG, *FIXED, "--top", "1", "--software", "eager")
    assert "did you mean 'tuned'" in stretto.error(*BIG, "--software", "tund")
    listed = " ".join(stretto("plan", "--help").split())
    assert all(name in listed for name in software_profiles())


def test_changes_are_lines_of_the_plan(stretto: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["plan", "--model", "llama3-8b", "--cluster", "a100-40gb:16", "--batch", "96", "--sequence", "8192"]
    for fix in ("tp=1", "pp=1", "cp=1", "micro_batch=2", "mode=zero3", "sequence_parallel=false"):
        few += ["--fix", fix]
    names = ("141 GB cards", "fp8", "twice the network between nodes")
    every = what_if.changes
    monkeypatch.setattr(
        what_if, "changes", lambda task: [change for change in every(task) if change.name in names]
    )
    report = stretto.json(*few, "--what-if")
    found = {change["change"]: change for change in report["what_if"]["changes"]}
    cards, fp8 = found["141 GB cards"], found["fp8"]
    assert cards["gain"] == cards["tokens_per_s"] / report["ranking"][0]["tokens_per_s"] - 1 > 0
    assert (fp8["layout"], fp8["error"]) == (None, "a100-40gb-sxm has no 8-bit products")
    printed = stretto(*few, "--what-if")
    row = next(line for line in printed.splitlines() if "141 GB cards" in line)
    assert f"{cards['gain']:+.1%}" in row
    assert "not       fp8: a100-40gb-sxm has no 8-bit products" in printed
    assert "binds     compute: " in printed
    assert "what if" not in stretto(*few)
    assert "add --output FILE" in stretto.error(*few, "--what-if", "--emit", "deepspeed")
    recommender = stretto.error("plan", "--model", "dlrm-113b", "--cluster", "a100:16", "--what-if")
    assert "--what-if is for language models" in recommender


def test_a_plan_is_for_one_framework(stretto: CommandLine) -> None:
    few = [*BIG, *FIXED[2:], "--top", "1"]
    assert stretto.json(*few, "--for", "torchtitan")["framework"].startswith("torchtitan")
    assert "FSDP: forbidden by --fix pp=2" in stretto(*few, "--for", "torchtitan")
    wrong = stretto.error(*few, "--for", "torchtitan", "--emit", "megatron")
    assert "--for is torchtitan and --emit is megatron: a plan is for one framework" in wrong
    assert "--row is for --emit" in stretto.error(*few, "--for", "megatron", "--row", "2")


def test_a_search_that_is_cut_short_never_says_that_nothing_fits(
    stretto: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.planner.search.work._FIRST_ROUND", 0.06)
    large = ["plan", "--model", "deepseek-v3", "--cluster", "hgx-h800:2048", "--batch", "15360"]
    large += ["--fix", "tp=4", "--fix", "cp=2"]  # which forbid the plain alternatives
    printed = stretto(*large, "--seconds", "0.1", code=3)
    assert "cut short after" in printed
    assert "nothing was found that fits" in printed
    assert "nothing fits" not in printed
    report = stretto.json(*large, "--seconds", "0.1", code=3)
    assert (report["complete"], report["gap"], report["ranking"]) == (False, None, [])


def test_the_best_so_far_is_shown_and_ctrl_c_prints_it() -> None:
    arguments = ["--model", "llama3.1-405b", "--cluster", "dgx-h100:8192", "--batch", "2048"]
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm", COLUMNS="200")
        command = [sys.executable, "-m", "stretto.cli.main", "plan", *arguments, "--seconds", "1000"]
        os.execv(sys.executable, command)
    seen, stopped = "", False
    while True:
        try:
            seen += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # it has ended
            break
        if not stopped and "best so far" in seen:
            os.write(terminal, b"\x03")
            stopped = True
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert os.waitstatus_to_exitcode(status) == 0, plain[-3000:]
    best = re.search(r"best so far: (\S+) s, (tp\S+.*?) \(Ctrl-C", plain)
    assert best is not None
    assert f" 1. {best[2][:60]}" in plain
    assert re.search(rf"^ +1 +{re.escape(best[1])} ", plain, re.MULTILINE)
    assert "stopped; the best so far:" in plain
    assert "cut short" in plain
    assert "Traceback" not in plain


def test_the_safe_and_the_plain_layouts_are_beside_the_fastest(stretto: CommandLine) -> None:
    report = stretto.json(*BIG, *FIXED, "--room", "20")
    assert report["complete"]
    assert report["plain"]["FSDP"] is None  # tp=4 is fixed
    safe = report["safe"]["memory"]
    assert safe["device"]["high_gib"] + 20 <= safe["capacity_gib"]
    printed = stretto(*BIG, *FIXED, "--room", "20")
    assert "best that certainly fits with 20 GiB free: " in printed
    assert "hybrid FSDP: forbidden by --fix tp=4" in printed
    absent = [name for name, plain in report["plain"].items() if plain is None]
    assert absent[:3] == ["DDP", "FSDP", "hybrid FSDP"]
    reasons = {report["missing"][name] for name in absent}
    assert all(
        reason.startswith(("forbidden by --fix tp=4", "forbidden by --fix pp=2")) for reason in reasons
    )
    assert report["plain_safe"].keys() == report["plain"].keys()


def test_a_batch_without_data_parallelism_is_refused(stretto: CommandLine) -> None:
    error, hint = stretto.error(
        "plan", "--model", "gpt3-175b", "--cluster", "dgx-a100-80gb:1024", "--batch", "1537"
    ).splitlines()
    assert error.startswith("error: --batch is 1537, which has no common divisor with the 1024 devices: ")
    assert hint == "hint: nearest is 1536; or fix dp=1"
