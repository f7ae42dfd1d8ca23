"""`stretto generate`: the same text whatever layout trained the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chats import assistant, chat, tokenizer_folder, user, write_chats
from command_line import CommandLine
from stretto.cli.main import run
from stretto.engine.checkpoint.huggingface.exporting import export_huggingface
from tiny_job import LLAMA, job, job_file
from train_runs import tensors, train

LAYOUTS = {
    "single": (),
    "tp2": ("layout.tp=2",),
    "pp2": ("layout.pp=2", "schedule.name=interleaved", "schedule.chunks=2"),
    "dp2": ("layout.dp=2",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one job on several layouts; in float64, so that their weights are equal in float32."""
    folder = tmp_path_factory.mktemp("generate")
    for name, layout in LAYOUTS.items():
        train(job(folder, *layout, "train.dtype=float64", "train.steps=3", f"run.name={name}", model=LLAMA))
    return folder


def written(stretto: CommandLine, *arguments: object) -> dict[str, Any]:
    return stretto.json("generate", *map(str, arguments))


def test_every_layout_writes_the_same_text(folder: Path, stretto: CommandLine) -> None:
    runs = folder / "runs"
    texts = [written(stretto, runs / name, "--prompt", "a ", "--tokens", 24)["text"] for name in LAYOUTS]
    assert len(set(texts)) == 1
    assert texts[0].startswith("a ")
    assert len(texts[0]) > 12


def test_text_is_a_function_of_the_seed(folder: Path, stretto: CommandLine) -> None:
    run_ = folder / "runs" / "single"
    first, two, other = (written(stretto, run_, "--tokens", 24, "--seed", seed)["text"] for seed in (3, 3, 4))
    assert first == two != other
    greedy = [written(stretto, run_, "--temperature", 0, "--seed", seed)["text"] for seed in (1, 2)]
    assert greedy[0] == greedy[1]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--top-p", "3", "--top-p is 3.0, must be above 0 and at most 1"),
        ("--top-p", "nan", "--top-p is nan, must be a finite number"),
        ("--temperature", "nan", "--temperature is nan, must be a finite number"),
        ("--seed", str(2**64), f"--seed is {2**64}: must be between"),
        ("--device", "foo", "--device is foo, but there is no such device here"),
    ],
)
def test_a_bad_option_is_named_as_it_was_typed(
    folder: Path, stretto: CommandLine, option: str, value: str, message: str
) -> None:
    assert f"error: {message}" in stretto.error("generate", folder / "runs" / "single", option, value)


def test_a_run_its_checkpoints_and_one_checkpoint_are_all_names_of_it(
    folder: Path, stretto: CommandLine
) -> None:
    run_ = folder / "runs" / "single"
    newest = run_ / "checkpoints" / "step-00000003"
    for name in (run_, run_ / "checkpoints", newest):
        assert written(stretto, name, "--tokens", 4)["checkpoint"] == str(newest)


def test_people_get_the_text_alone(folder: Path, stretto: CommandLine) -> None:
    arguments = [str(folder / "runs" / "single"), "--prompt", "b", "--tokens", "8"]
    text = written(stretto, *arguments)["text"]
    assert stretto("generate", *arguments) == text + "\n"


@pytest.mark.parametrize(
    ("path", "says"),
    [("none", "none: no checkpoint there"), ("text.txt", "text.txt is a file")],
)
def test_no_checkpoint_ends_with_2(
    folder: Path, path: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(folder / path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.startswith("error: ")


def test_a_damaged_newest_checkpoint_is_passed_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job(folder, "train.steps=4", "checkpoint.every=2", "run.name=damaged", model=LLAMA)
    train(config)
    checkpoints = config.run.folder / "checkpoints"
    (checkpoints / "step-00000004" / "manifest.json").write_text("{}")
    assert run(["generate", str(config.run.folder), "--tokens", "4", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["checkpoint"] == str(checkpoints / "step-00000002")
    assert "step-00000004 is damaged" in captured.err


def test_a_tokenizer_that_is_gone_ends_with_2(folder: Path, stretto: CommandLine) -> None:
    config = job(folder, "train.steps=1", "optim.rate.warmup=0", "run.name=bare", model=LLAMA)
    train(config)
    (config.run.folder / "tokenizer.json").unlink()
    assert "no tokenizer.json beside checkpoint" in stretto.error("generate", str(config.run.folder))


def test_the_sample_at_the_end_of_training_equals_generate(
    folder: Path, tmp_path: Path, stretto: CommandLine
) -> None:
    config = job_file(tmp_path, LLAMA)
    printed = stretto("train", str(config), "layout.tp=2", "train.steps=2")
    shown = printed.split("what it writes now:\n\n")[1].split("\n\nrun folder")[0]
    options = ["--prompt", "def ", "--tokens", 8, "--seed", 1]
    assert written(stretto, tmp_path / "runs" / "tiny", *options)["text"] == shown


def test_what_training_saves_can_be_exported(folder: Path, tmp_path: Path) -> None:
    """The names under which a run writes its facts are those that the export reads."""
    config = job(folder, "run.name=single", model=LLAMA)
    files = export_huggingface(config.run.folder / "checkpoints" / "step-00000003", tmp_path / "out")
    assert {path.name for path in files} == {"config.json", "model.safetensors"}
    assert tensors(config, 3).keys() >= {"model.embed.tok.weight", "optim.exp_avg.embed.tok.weight"}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on conversations."""
    folder = tmp_path_factory.mktemp("talker")
    data = write_chats(folder / "chats.jsonl", [chat(2, f"question {i}") for i in range(30)])
    place = tokenizer_folder(folder / "tokenizer", "llama3")
    overrides = (f"data.source={data}", f"data.tokenizer={place}", "data.chat=assistant", "data.sequence=128")
    config = job(folder, *overrides, "train.steps=12", model=LLAMA)
    train(config)
    return config.run.folder


def test_several_prompts_are_written_as_each_alone(
    talker: Path, tmp_path: Path, stretto: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["question 1", "a", "question 2", "another"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts[1:]) + "\n\n")
    options = ["--tokens", 12, "--top-p", 0.95]
    assert run([str(x) for x in ("generate", talker, "--prompt", prompts[0], "--prompts",
                                 tmp_path / "prompts.txt", *options, "--json")]) == 0  # fmt: skip
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [output["prompt"] for output in outputs] == prompts
    for seed, output in enumerate(outputs):
        alone = written(stretto, talker, "--prompt", output["prompt"], *options, "--seed", seed)
        assert alone["text"] == output["prompt"] + output["text"]


def test_a_chat_is_answered_by_the_runs_own_template(
    talker: Path, tmp_path: Path, stretto: CommandLine
) -> None:
    options = ["--chat", "--tokens", 30, "--temperature", 0]
    report = written(stretto, talker, "--prompt", "question 3 0?", *options)
    start = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou help.<|eot_id|>"
    turn = "<|start_header_id|>user<|end_header_id|>\n\nquestion 3 0?<|eot_id|>"
    asked = f"{start}{turn}<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert report["outputs"] == [
        {"prompt": asked, "text": report["text"], "tokens": report["outputs"][0]["tokens"], "ended": False}
    ]
    rows = write_chats(tmp_path / "rows.jsonl", [[user("question 3 0?"), assistant("known")]])
    assert written(stretto, talker, "--prompts", rows, *options)["text"] == report["text"]
    assert "--chat answers them" in stretto.error("generate", str(talker), "--prompts", str(rows))
    assert "add --chat" in stretto.error(
        "generate", str(talker), "--prompt", "a", "--chat-template", "default"
    )


def test_a_chats_row_gives_its_template_tools_and_variables(
    talker: Path, tmp_path: Path, stretto: CommandLine
) -> None:
    template = tmp_path / "named.jinja"
    template.write_text("{{ tools[0].name }} {{ style }}: {{ messages[0].content }}")
    more = {"tools": [{"name": "add"}], "chat_template_kwargs": {"style": "brief"}}
    rows = [{name: [user("hello")], **more} for name in ("messages", "prompt")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--chat", "--chat-template", template, "--prompts", path, "--tokens", 1]
    outputs = written(stretto, talker, *options)["outputs"]
    assert [output["prompt"] for output in outputs] == ["add brief: hello"] * 2


def test_texts_and_tokens_end_a_text(talker: Path, stretto: CommandLine) -> None:
    options = ["--chat", "--prompt", "question 3 0?", "--tokens", 30, "--temperature", 0]
    uncut = written(stretto, talker, *options)["text"]
    cut = uncut[len(uncut) // 2 :][:2]
    ended = written(stretto, talker, *options, "--stop", cut)["outputs"][0]
    assert ended["text"] == uncut[: uncut.index(cut)]
    assert ended["ended"]
    assert stretto("generate", talker, *options, "--stop", cut) == uncut[: uncut.index(cut)] + "\n"


def test_a_run_without_a_template_answers_no_chat(folder: Path, stretto: CommandLine) -> None:
    assert "has no chat template" in stretto.error(
        "generate", str(folder / "runs" / "single"), "--chat", "--prompt", "a"
    )


def test_prompts_are_read_by_their_format(tmp_path: Path) -> None:
    from stretto.cli.generate import _prompts_from_file
    from stretto.errors import StrettoError

    class Wording:
        def prompt(self, text: str) -> str:
            return text

    for name, content in (
        ("a.json", '{"prompt": "one"}\n{"prompt": "two"}\n'),
        ("b.json", '[{"prompt": "one"}, {"prompt": "two"}]'),
        ("c.txt", "one\n\ntwo\n"),
    ):
        (tmp_path / name).write_text(content)
        assert _prompts_from_file(Wording(), tmp_path / name, chat=False) == ["one", "two"]  # pyright: ignore
    (tmp_path / "d.txt").write_bytes(b"caf\xe9")
    with pytest.raises(StrettoError, match="not UTF-8"):
        _prompts_from_file(Wording(), tmp_path / "d.txt", chat=False)  # pyright: ignore
