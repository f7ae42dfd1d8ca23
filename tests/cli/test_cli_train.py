"""`stretto train` from the command line: bad input, what it prints, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import stretto.run.train.launch as launch_module
import train_runs
from stretto.cli.main import run
from stretto.errors import StrettoError
from stretto.run.data.build import build
from tiny_job import job_file, write_text
from train_runs import at_step, fail, send_self, spoil_a_weight

pytestmark = pytest.mark.apart


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def config(folder: Path) -> str:
    return str(job_file(folder))


def broken_text(kind: str) -> Callable[[Path], str]:
    """A source with something wrong, in a folder of its own."""

    def make(folder: Path) -> str:
        path = folder / "bad.txt"
        match kind:
            case "empty":
                path.write_text("")
            case "blank":
                path.write_text(" \n \n")
            case "encoding":
                path.write_bytes("naïve café, ".encode("latin-1") * 100)
            case "short":
                path.write_text("too short")
            case _:
                return str(folder / "none.txt")
        return str(path)

    return make


def broken_tokens(kind: str) -> Callable[[Path], str]:
    """A token folder that is not whole."""

    def make(folder: Path) -> str:
        text = write_text(folder / "text.txt")
        tokens = build(text, folder / "tokens", vocab=300).path / "tokens.bin"
        data = bytearray(tokens.read_bytes())
        if kind == "truncated":
            del data[-100:]
        else:
            data[50] ^= 1
        tokens.write_bytes(data)
        return str(tokens.parent)

    return make


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (broken_text("missing"), "none.txt: there is no such file or folder"),
        (broken_text("empty"), "bad.txt: empty file"),
        (broken_text("blank"), "holds no text"),
        (broken_text("encoding"), "bad.txt"),
        (broken_text("short"), "one sample of sequence 16 needs 17"),
        (broken_tokens("truncated"), "tokens.bin: truncated"),
        (broken_tokens("corrupt"), "tokens.bin: corrupt in chunk 0"),
    ],
)
def test_bad_text_ends_with_2_before_ranks_start(
    config: str,
    tmp_path: Path,
    source: Callable[[Path], str],
    says: str,
    capfd: pytest.CaptureFixture[str],
    no_ranks: None,
) -> None:
    assert run(["train", config, f"data.source={source(tmp_path)}", f"run.dir={tmp_path}/runs"]) == 2
    check_error(capfd, says)
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))


def check_error(capfd: pytest.CaptureFixture[str], says: str) -> None:
    """Nothing on stdout; on stderr lines of errors, perhaps with hints, after those of progress."""
    captured = capfd.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("data")]
    assert lines[0].startswith("error: ")
    assert says in lines[0]
    assert all(line.startswith(("error: ", "hint: ")) for line in lines)
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(set(errors)) == len(errors)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model.heds=4"], "there is no field model.heds"),
        (["train.steps=many"], "train.steps is 'many', must be a whole number"),
        (["layout.tp=3"], "layout.tp is 3: it must divide model.heads"),
        (["schedule.name=1fb1"], "1fb1"),
        (["schedule.name=interleaved", "schedule.chunks=9"], "9 stages"),
        (["batch.global_size=7", "layout.dp=2"], "batch.global_size is 7"),
        (["layout.dp=1000", "batch.global_size=1000"], "1000 ranks are too many for the"),
        (["train.device=cuda"], "train.device is cuda, but there is no such device here: torch sees cpu"),
        (["train.device=npu"], "train.device is npu, but there is no such device here: torch sees"),
        (["train.device=gpu"], "train.device is 'gpu', must be auto or a kind of device"),
        (
            ["train.device=cpu", "train.backend=nccl"],
            "train.backend is nccl, which does not send tensors of cpu",
        ),
        (["--resume", "nowhere"], "checkpoint.resume is nowhere: there is no such folder"),
        (["run.dir={config}"], "run.dir"),
        (["data.tokenizer={config}"], "not a tokenizer"),
        (["--port", "99999"], "'--port': 99999 is not in the range 0<=x<=65535"),
    ],
)
def test_bad_settings_end_with_2_before_ranks_start(
    config: str, arguments: list[str], says: str, capfd: pytest.CaptureFixture[str], no_ranks: None
) -> None:
    if "train.device=cuda" in arguments and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU")
    assert run(["train", config, *(a.format(config=config) for a in arguments)]) == 2
    check_error(capfd, says)


def test_no_config_ends_with_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "none.yaml"]) == 2
    check_error(capfd, "config none.yaml does not exist")


def test_a_port_in_use_ends_with_2(config: str, capfd: pytest.CaptureFixture[str], no_ranks: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(["train", config, "--port", str(taken.getsockname()[1])]) == 2
    check_error(capfd, "cannot be used: Address already in use")


def test_a_free_port_is_used(config: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run(["train", config, "layout.dp=2", "train.steps=2", "run.name=port", "--port", str(port)]) == 0


def test_a_rerun_names_the_command_that_continues_the_run_before(
    config: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise StrettoError("no ranks")

    monkeypatch.setattr("stretto.cli.train._train_locally", end)
    for name in ("rerun", "rerun-2"):
        (folder / "runs" / name / "checkpoints" / "step-00000003").mkdir(parents=True)
        assert run(["train", config, "run.name=rerun", "layout.dp=2"]) == 2
        printed = capfd.readouterr().err.splitlines()
        former = f"{folder / 'runs' / name} has steps left; to continue it: stretto train {config}"
        assert printed == [f"{former} layout.dp=2 run.name={name} --resume auto", "error: no ranks"]
    for more in (["train.steps=3"], ["--resume", "auto"], ["run.name=other"]):  # done; goes on; is the first
        assert run(["train", config, "run.name=rerun", "layout.dp=2", *more]) == 2
        assert capfd.readouterr().err == "error: no ranks\n"


# ---------------------------------------------------------------------- a whole run


def test_a_rise_of_the_loss_is_the_last_line(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = ["train.steps=20", "optim.lr=3", "optim.rate.schedule=constant", "optim.rate.warmup=10"]
    assert run(["train", config, *overrides, "run.name=rises", "--json"]) == 0
    out, err = capfd.readouterr()
    assert err.splitlines()[-1].startswith("warning: the loss has risen: ")
    assert json.loads(out)["warning"] in err


def test_json_is_one_object_and_a_second_run_takes_a_new_name(
    config: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", config, "layout.tp=2", "layout.pp=2", "eval.every=2", "eval.batches=1", "--json"]
    assert run(arguments) == 0
    out, err = capfd.readouterr()
    report = json.loads(out)
    runs = folder / "runs"
    assert report["steps"] == 6
    assert 0 < report["loss"] < 6
    assert report["tokens_per_s"] > 0
    assert (report["run_dir"], report["layout"]) == (str(runs / "tiny"), "tp2 pp2")
    assert report["checkpoint"] == str(runs / "tiny" / "checkpoints" / "step-00000006")
    assert report["stopped"] is False
    assert report["warning"] is None
    banner = err.splitlines()
    first = next(i for i, line in enumerate(banner) if line.startswith("gpt of 35"))
    assert "on 4 ranks (tp2 pp2), 1f1b; 6 steps of 4 x 16 tokens in 4 microbatches of 1" in banner[first]
    ends = "vocabulary 300, texts end with <|endoftext|> (0); results in"
    assert ends in banner[first + 1]
    train, valid, test = banner[first + 2].split(", ")
    assert train.startswith("splits: train 7.1")
    assert valid.startswith("valid 377 tokens (evaluations read the first 64; ")
    assert test == "test 8 tokens"
    assert banner[first + 3] == "stages: 0 embed..blocks.0 | 1 blocks.1..head"
    assert banner[first + 4].startswith("predicted: ")
    assert "what it writes now:" in err
    assert "run folder: " in err
    prediction = json.loads((runs / "tiny" / "prediction.json").read_text(encoding="utf-8"))
    assert prediction["measured_s"] > 0
    left = {path.name for path in (runs / "tiny").iterdir()}
    files = {"config.yaml", "metrics.jsonl", "eval.jsonl", "tokenizer.json", "prediction.json"}
    assert left == files | {"checkpoints", "tokenizer_config.json"}
    small = ["layout.tp=1", "layout.pp=1", "train.steps=1", "sample.tokens=0"]
    assert run([*arguments, *small]) == 0
    assert json.loads(capfd.readouterr().out)["run_dir"] == str(runs / "tiny-2")
    assert run(["train", str(runs / "tiny" / "config.yaml"), "--resume", "auto", "--json"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert (again["steps"], again["loss"]) == (6, report["loss"])


def test_suggested_next_commands_are_legal(
    config: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", config, "layout.dp=2", "train.steps=2", "run.name=next"]) == 0
    text = capfd.readouterr().out
    shown = [line.split("#")[0].split() for line in text.splitlines() if line.startswith("  stretto ")]
    assert [argv[1] for argv in shown] == ["generate", "verify", "train"]
    for argv in shown:
        argv = [word.strip("'") for word in argv[1:]]
        if argv[0] == "generate":
            assert run([*argv[:2], "--tokens", "4"]) == 0
        if argv[0] == "train":
            assert run([*argv, "train.steps=2", "run.name=again"]) == 0


# ---------------------------------------------------------------------- a run that fails


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[..., None]]:
    """Let ranks run with hooks."""
    before = launch_module.run_ranks

    def plant(*hooks: train_runs.Hook) -> None:
        monkeypatch.setattr(launch_module, "run_ranks", train_runs.with_hooks(before, hooks))

    return plant


def failed(config: str, capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The stderr of a run that must end with exit code 1."""
    assert run(["train", config, "layout.pp=2", *arguments]) == 1
    return capfd.readouterr().err.splitlines()


def test_a_rank_that_raises_shows_its_traceback_then_the_error(
    config: str, capfd: pytest.CaptureFixture[str], faulty: Callable[..., None]
) -> None:
    faulty(at_step(2, 1, fail))
    lines = failed(config, capfd, "run.name=raises")
    start = lines.index("Traceback (most recent call last):")
    assert "KeyError: 'planted'" in lines[start:]
    assert [line for line in lines if line.startswith("error:")] == [
        "error: rank 1 failed: KeyError: 'planted'; the job was ended"
    ]
    assert lines[-1].startswith("error:")


def test_a_killed_rank_is_one_line_with_the_resume_command(
    config: str, folder: Path, capfd: pytest.CaptureFixture[str], faulty: Callable[..., None]
) -> None:
    faulty(at_step(4, 0, send_self, 9))
    lines = failed(config, capfd, "run.name=killed", "checkpoint.every=2")
    assert "Traceback (most recent call last):" not in lines
    assert lines[-2:] == [
        "error: rank 0 was killed by SIGKILL; the job was ended",
        "hint: the system kills the largest process when memory runs out",
    ]
    faulty()
    assert run(["train", config, "layout.pp=2", "run.name=killed", "--resume", "auto", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 6


def test_a_bad_loss_is_one_line_with_the_resume_command(
    config: str, folder: Path, capfd: pytest.CaptureFixture[str], faulty: Callable[..., None]
) -> None:
    faulty(at_step(4, 0, spoil_a_weight))
    lines = failed(config, capfd, "run.name=bad", "checkpoint.every=2")
    assert "Traceback (most recent call last):" not in lines
    assert lines[-2] == "error: step 4: the loss of microbatch 0 on rank 1 is not finite"
    go_on = f"stretto train {config} layout.pp=2 checkpoint.every=2 run.name=bad --resume auto"
    assert lines[-1] == f"hint: to continue from step-00000002: {go_on}"


def test_a_full_or_broken_disk_is_one_line(
    config: str, folder: Path, capfd: pytest.CaptureFixture[str], faulty: Callable[..., None]
) -> None:
    faulty(at_step(2, None, break_the_disk))
    lines = failed(config, capfd, "run.name=disk", "checkpoint.every=2")
    assert "Traceback (most recent call last):" not in lines
    assert lines[-1].startswith("error: rank 0: the disk is full")


def break_the_disk(_: Any) -> None:
    import errno

    import stretto.engine.checkpoint.folder as folders

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folders.sync_folder = full


def test_what_a_rank_finds_wrong_with_the_input_ends_with_2(
    config: str, folder: Path, capfd: pytest.CaptureFixture[str], faulty: Callable[..., None]
) -> None:
    assert run(["train", config, "layout.pp=2", "run.name=gone", "train.steps=2"]) == 0
    capfd.readouterr()
    gone = folder / "runs" / "gone"
    shutil.rmtree(gone / "checkpoints")
    (gone / "metrics.jsonl").unlink()
    (gone / "metrics.jsonl").mkdir()
    assert run(["train", config, "layout.pp=2", "run.name=gone", "train.steps=2"]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert errors[0].endswith("gone cannot be written to: Is a directory")
