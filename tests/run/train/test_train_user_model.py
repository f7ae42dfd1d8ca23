"""A model of the user's in `stretto train`: from a file, tried before ranks start, resumed."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import CommandLine
from proofs import verify
from stretto.engine.user_model import UserModel, try_user_model
from stretto.errors import StrettoError
from stretto.job.user_shape import UserShape
from stretto.run.config import TrainConfig
from stretto.run.config.check import check, find_problems
from stretto.run.config.job import job_of
from stretto.run.config.load import dump, parse
from stretto.run.train.metrics import read_lines
from tiny_job import EIGHT, Changes, changes, job, job_text, varied
from train_runs import at_step, keep_notes, losses, same, send_self, tensors, train

pytestmark = pytest.mark.apart

STOP_AT_3 = at_step(3, 0, send_self, signal.SIGTERM)
MODEL = """
import torch
from torch import nn

class Embedding(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.register_buffer("places", torch.linspace(0.0, 1.0, 64))

    def forward(self, ids):
        x = self.tokens(ids) + self.places[: ids.shape[1], None]
        return x, ids.to(x.dtype)[..., None].cos()  # two tensors between layers

class Mix(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.linear = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, first):
        before = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.dropout(torch.tanh(self.linear(before))) * first, first

class Head(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.out = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x, first):
        return self.out(x)

def build(vocab=300, hidden=16, layers=6, tied=False):
    embedding, head = Embedding(vocab, hidden), Head(vocab, hidden)
    if tied:
        head.out.weight = embedding.tokens.weight
    return [embedding, *(Mix(hidden) for _ in range(layers)), head]
"""


def model(folder: Path, *change: str) -> str:
    """The model's file in a folder, with the folder's name, as one that no test has loaded; as a field."""
    path = folder / f"model_{folder.name}.py"
    path.write_text(MODEL.replace(*change) if change else MODEL, encoding="utf-8")
    return f"{path}:build"


def user_job(folder: Path, *overrides: str, change: tuple[str, ...] = ()) -> TrainConfig:
    """The tiny job with the model."""
    path = folder / f"model_{folder.name}.py"
    named = f"{path}:build" if path.exists() else model(folder, *change)
    return job(folder, "sample.tokens=0", *overrides, model=named)


def test_a_model_has_the_users_names_values_and_outputs(tmp_path: Path) -> None:
    build = model(tmp_path)
    before = torch.get_rng_state()
    built = UserModel(build, {"hidden": 8}, seed=5)
    assert torch.equal(before, torch.get_rng_state())  # the run's own numbers do not depend on it
    torch.manual_seed(5)
    layers: Any = nn.Sequential(*built.function(hidden=8))
    assert same(dict(built.state_dict()), dict(layers.state_dict()))
    ids = torch.arange(20).view(2, 10)
    x: Any = layers.eval()[0](ids)
    for layer in layers[1:]:
        x = layer(*x)
    assert torch.equal(built.eval()(ids), x)


def test_the_section_is_a_text_or_has_arguments(tmp_path: Path) -> None:
    build = model(tmp_path)
    short = user_job(tmp_path)
    text = job_text(tmp_path)
    given = parse(text, "tiny.yaml", [f"model={build}", "model.arguments={hidden: 8}"], name="tiny")
    assert (short.model.build, given.model.build, given.model.arguments) == (build, build, {"hidden": 8})
    assert parse(dump(given)) == given
    shape = job_of(given).shape
    assert isinstance(shape, UserShape)
    assert shape.parameters["0.tokens.weight"] == (300, 8)
    assert len(shape.layer_names) == shape.chain == 8
    assert job_of(parse(text, "tiny.yaml", [f"model={build}", "train.dtype=bfloat16"])).precision.keep == ()
    with pytest.raises(StrettoError, match=r"model.layers .*no other field changes it"):
        parse(text, "tiny.yaml", [f"model={build}", "model.layers=3"])
    with pytest.raises(StrettoError, match=r"model.build is 'mine.py', must be a text such as mine.py:build"):
        parse(text, "tiny.yaml", ["model=mine.py"])
    with pytest.raises(StrettoError, match="they are for a model from a file"):
        parse(text, "tiny.yaml", ["model.arguments={hidden: 8}"])


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (
            "{tied: true}",
            [changes(pp=2, dp=2, mode="zero3", recompute="full"), changes(pp=4, schedule="zb-h1")],
        ),
        pytest.param(
            "{}",
            [
                changes(pp=2, dp=2, schedule="pipedream-2bw"),
                changes(pp=2, dp=2, mode="zero1", schedule="interleaved", options={"chunks": 2}),
                changes(dp=4, mode="server"),
                changes(dp=4, mode="zero2"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tied", "untied"],
)
def test_layouts_equal_one_process(tmp_path: Path, arguments: str, cases: list[Changes]) -> None:
    config = user_job(tmp_path, EIGHT, "schedule.name=1f1b", f"model.arguments={arguments}")
    verdicts = verify(config, [varied(config, case) for case in cases], steps=1)
    assert [verdict.diagnosis for verdict in verdicts] == [None] * len(cases)
    assert all(verdict.equal for verdict in verdicts)


def test_a_run_resumes_to_the_bit_and_a_changed_file_is_reported(tmp_path: Path) -> None:
    """Under another layout too, to rounding; with the loss of the held-out text of one process."""
    shape = ("layout.pp=2", "layout.dp=2", "dp.mode=zero2", "schedule.name=zb-h1", EIGHT)
    evaluated = ("eval.every=3", "eval.batches=1", "model.arguments={layers: 2}")
    straight = user_job(tmp_path, *shape, *evaluated, "run.name=straight")
    halves = user_job(tmp_path, *shape, *evaluated, "run.name=halves")
    train(straight)
    assert train(halves, STOP_AT_3)["stopped"]
    shutil.copytree(halves.run.folder, tmp_path / "runs" / "other")
    path = tmp_path / f"model_{tmp_path.name}.py"
    path.write_text(MODEL + "# a comment\n", encoding="utf-8")
    resumed = replace(halves, checkpoint=replace(halves.checkpoint, resume="auto"))
    train(resumed, keep_notes(str(tmp_path / "notes")))
    assert same(tensors(straight, 6), tensors(resumed, 6))
    assert f"model.build={path}:build: the file has changed since" in (tmp_path / "notes").read_text()
    copies = [each.read_text(encoding="utf-8") for each in (halves.run.folder / "user_files").iterdir()]
    assert sorted(copies) == [MODEL, MODEL + "# a comment\n"]
    other = user_job(tmp_path, EIGHT, *evaluated, "run.name=other", "checkpoint.resume=auto")
    train(other)
    torch.testing.assert_close(tensors(straight, 6), tensors(other, 6), rtol=1e-4, atol=1e-6)
    assert losses(other)[6] == pytest.approx(losses(straight)[6], rel=1e-5)
    first, second = ([*read_lines(each.run.folder / "eval.jsonl")][-1] for each in (straight, other))
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert [*read_lines(other.run.folder / "metrics.jsonl")][-1]["mfu"] is None
    wider = replace(other, model=replace(other.model, arguments={"hidden": 8, "layers": 2}))
    with pytest.raises(StrettoError, match=r"is of another model: its 0\.tokens.weight is"):
        train(wider)
    tiny = job(tmp_path, "run.name=other", "checkpoint.resume=auto")
    with pytest.raises(StrettoError, match=r"its family is .*:build, the config's is gpt"):
        train(tiny)


FAULTS = {
    "raises": ("def build(", "def build(depth, ", "missing 1 required positional argument: 'depth'"),
    "kind": ("return [embedding, *(", "return (m for m in [embedding, *(", "returns generator, must return"),
    "layer": ("self.norm(x).cumsum", "self.norms(x)", r"layer 1: .*no attribute 'norms'"),
    "logits": ("return self.out(x)", "return self.out(x).mean(1)", r"returns \[2, 300\] for 2 samples of 16"),
    "values": ("layers=6", "layers=6, seen=[]", "another 0.tokens.weight when it is called again"),
    "frozen": ("self.dropout =", "self.norm.weight.requires_grad_(False); self.dropout =", "requires_grad"),
    "unused": ("self.dropout =", "self.more = nn.Linear(2, 2); self.dropout =", "does not depend on 1.more"),
    "buffers": ("x + self.dropout", "self.count(x) + self.dropout", "changes the buffer 1.sums"),
    "random": ("self.dropout(torch.tanh", "nn.functional.dropout(torch.tanh", "draws random numbers"),
    "samples": ("self.norm(x)", "self.norm(x).mean(0).expand_as(x)", "depend on the others of its"),
    "later": ("self.norm(x)", "self.norm(x).flip(1)", "depend on later tokens"),
    "name": ("return [", "net = nn.Sequential()\n    net.loss = head\n    return net or [", "named 'loss'"),
}
EXTRA = {
    "values": ("    embedding, head", "    seen.append(0); torch.rand(len(seen))\n    embedding, head"),
    "buffers": (
        "    def forward(self, x, first):\n        before",
        '        self.register_buffer("sums", torch.zeros(()))\n\n'
        "    def count(self, x):\n        self.sums += 1\n        return x\n\n"
        "    def forward(self, x, first):\n        before",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_mistakes_in_a_model_are_found_before_ranks_start(tmp_path: Path, name: str) -> None:
    old, new, message = FAULTS[name]
    text = MODEL.replace(old, new)
    text = text.replace("range(layers)), head]", "range(layers)), head])") if name == "kind" else text
    text = text.replace(*EXTRA[name]) if name in EXTRA else text
    (tmp_path / f"model_{tmp_path.name}.py").write_text(text, encoding="utf-8")
    with pytest.raises(StrettoError, match=message):
        check(user_job(tmp_path))


def test_what_needs_more_than_layers_is_refused(tmp_path: Path) -> None:
    refused = [
        *("layout.tp=2", "layout.cp=2", "precision.fp8=row", "train.attention=sdpa", "train.compile=blocks"),
        *("train.graphs=microbatch", "train.loss_chunk=8", "recompute.mode=selective", "dp.offload=nvme"),
        *("optim.name=muon", "schedule.name=auto"),
    ]
    found = find_problems(user_job(tmp_path, *refused, "layout.pp=2"))
    fields = {problem.field for problem in found if "the model is from a file" in str(problem)}
    assert fields == {each.partition("=")[0] for each in refused}
    others = ("data.packing=documents", "lora.rank=2", "elastic.layouts=auto", "metrics.peak_tflops=1.0")
    found = find_problems(user_job(tmp_path, *others))
    assert {problem.field for problem in found} == {each.partition("=")[0] for each in others}
    tied = user_job(tmp_path, "model.arguments={tied: true}", "schedule.name=pipedream", "layout.pp=2")
    assert "some layers share parameters" in str(find_problems(tied)[0])
    small = user_job(tmp_path, "model.arguments={vocab: 200}")
    assert [problem.field for problem in find_problems(small)] == ["model.vocab"]


@pytest.mark.parametrize("command", ["predict --cluster here:1", "dryrun", "memory", "plan --cluster here:1"])
def test_commands_that_need_sizes_end_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(job_text(tmp_path, model(tmp_path)), encoding="utf-8")
    name, *options = command.split()
    printed = CommandLine(capsys).error(name, path, *options)
    assert printed.startswith("error: ")
    assert "the model is from a file" in printed


def test_the_example_is_a_model() -> None:
    example = Path(__file__).parents[3] / "examples" / "my_model.py"
    shape = try_user_model(f"{example}:build", {"vocab": 64, "positions": 32}, 32)
    assert shape.vocab == 64
    assert len(shape.layer_names) > 2
