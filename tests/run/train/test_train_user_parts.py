"""Parts of the user's in `stretto train`: from files, tried before ranks start, saved and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from proofs import verify
from stretto.engine.optim.build import build_optimizer
from stretto.engine.optim.states import state_tensors
from stretto.engine.parallel.fragment import unsharded_fragments
from stretto.errors import StrettoError
from stretto.planner.counts.state_bytes import StateConfig
from stretto.run.config.check import check, find_problems
from stretto.run.config.job import job_of
from stretto.run.data.open import open_source
from stretto.run.data.user_source import written_sources
from stretto.run.train.metrics import read_lines
from tiny_job import EIGHT, LLAMA, Changes, changes, job, varied
from train_runs import at_step, keep_notes, same, send_self, tensors, train

pytestmark = pytest.mark.apart

PARTS = Path(__file__).parents[3] / "examples" / "my_parts.py"
STOP_AT_3 = at_step(3, 0, send_self, signal.SIGTERM)
RULE = """
import torch
from stretto import FragmentOptimizer

class Rule(FragmentOptimizer):
    def __init__(self, groups, fragments, *, lr):
        super().__init__(groups, fragments, {"lr": lr})

    def new_state(self, fragment):
        return {"mean": torch.zeros_like(fragment.parameter)}

    @torch.no_grad()
    def step(self, closure=None):
        for batch in self.begin():
            for fragment, gradient, state in batch:
                fragment.parameter.sub_(gradient, alpha=batch.group["lr"])

def rule(groups=(), fragments=(), lr=0.1):
    return torch.optim.SGD(groups, lr=lr)
"""


LOSS = """
import torch.nn.functional as F

def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
"""


def copied(folder: Path) -> Path:
    """The example's file in a folder, with the folder's name, as one that no test has loaded."""
    path = folder / f"{folder.name}.py"
    shutil.copy(PARTS, path)
    return path


def test_an_optimiser_resumes_with_its_states_and_a_changed_file_is_reported(
    tmp_path: Path,
) -> None:
    path = copied(tmp_path)
    belief = (
        f"optim.name={path}:AdaBelief",
        "optim.arguments={betas: [0.8, 0.9]}",
        "layout.dp=2",
        "optim.clip=null",
    )
    straight = job(tmp_path, *belief, "dp.mode=zero2", "run.name=straight", model=LLAMA)
    halves = job(tmp_path, *belief, "dp.mode=zero2", "run.name=halves", model=LLAMA)
    train(straight)
    assert train(halves, STOP_AT_3)["stopped"]
    with path.open("a", encoding="utf-8") as file:
        file.write("# a comment\n")
    shutil.copytree(halves.run.folder, tmp_path / "runs" / "other")
    for name, mode in (("halves", "zero2"), ("other", "ddp")):
        again = job(
            tmp_path,
            *belief,
            f"dp.mode={mode}",
            f"run.name={name}",
            "checkpoint.resume=auto",
            model=LLAMA,
        )
        train(again, keep_notes(str(tmp_path / "notes")))
        assert f"optim.name={path}:AdaBelief: the file has changed" in (tmp_path / "notes").read_text()
        torch.testing.assert_close(tensors(straight, 6), tensors(again, 6), rtol=1e-4, atol=1e-6)
        if mode == "zero2":  # other shards round otherwise
            assert same(tensors(straight, 6), tensors(again, 6))
    states = {name.split(".")[1] for name in tensors(straight, 6) if name.startswith("optim.")}
    assert states == {"exp_avg", "exp_avg_var"}


@pytest.mark.parametrize(
    ("change", "named", "message"),
    [
        ((), "Rules", "optim.name: .* defines no Rules"),
        ((), "rule", "must be a class derived from FragmentOptimizer"),
        (("*, lr)", "*, lr, beta)"), "Rule", "missing 1 required keyword-only argument: 'beta'"),
        (("sub_(gradient", "sub(gradient"), "Rule", "an update of .* leaves layer.weight as it was"),
        (("sub_(gradient", "sub_(gradients"), "Rule", "the first update of .* fails: NameError"),
        (("fragment.parameter)}", "fragment.parameter[0])}"), "Rule", "state mean of .* has shape"),
    ],
    ids=["name", "function", "argument", "idle", "raises", "state"],
)
def test_mistakes_in_an_optimiser_are_found_before_ranks_start(
    tmp_path: Path, change: tuple[str, str] | tuple[()], named: str, message: str
) -> None:
    path = tmp_path / f"rule_{tmp_path.name}.py"
    path.write_text(RULE.replace(*change) if change else RULE, encoding="utf-8")
    with pytest.raises(StrettoError, match=message):
        check(job(tmp_path, f"optim.name={path}:{named}", model=LLAMA))


def test_settings_of_other_optimisers_are_refused_beside_a_class(tmp_path: Path) -> None:
    named = f"optim.name={PARTS}:AdaBelief"
    fields = [
        {problem.field for problem in find_problems(job(tmp_path, *overrides, model=LLAMA))}
        for overrides in ((named, "optim.momentum=0.5", "optim.eps=1e-3"), ("optim.arguments={eps: 1e-3}",))
    ]
    assert fields == [{"optim.momentum", "optim.eps"}, {"optim.arguments"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_planner_counts_the_states_of_the_class(tmp_path: Path, dtype: torch.dtype) -> None:
    """All of the states of a whole parameter, and of a shard of it."""
    config = job(tmp_path, f"optim.name={PARTS}:AdaBelief", model=LLAMA)
    counted = StateConfig.of(job_of(config), job_of(config).program()).state_size
    assert counted is not None
    parameter = torch.nn.Parameter(torch.ones(6, 4, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    fragments = unsharded_fragments([("blocks.0.mlp.down.weight", parameter)])
    optimizer = build_optimizer(fragments, config.optim)
    optimizer.step()
    states = state_tensors(optimizer, fragments[0]).values()
    state_bytes = sum(value.numel() * value.element_size() for value, _ in states)
    assert (
        counted("blocks.0.mlp.down.weight", (6, 4), 24, dtype.itemsize) == state_bytes + 4
    )  # the count of updates
    assert counted("blocks.0.mlp.down.weight", (6, 4), 6, dtype.itemsize) == state_bytes // 4 + 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"sum")', '"mean")'), "train.loss: .* for two samples, and .* it must be a sum over tokens"),
        (('"sum")', '"none")'), "must return a tensor without dimensions"),
        (("targets.flatten()", "targets.flatten().clamp(0)"), "counts tokens whose target is -100"),
        (("(logits, targets)", "(logits)"), r"takes other arguments than \(logits, targets\)"),
        (("F.cross", "F.cros"), "AttributeError.*cros_entropy"),
    ],
    ids=["mean", "none", "padding", "arguments", "raises"],
)
def test_mistakes_in_a_loss_are_found_before_ranks_start(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / f"loss_{tmp_path.name}.py"
    path.write_text(LOSS, encoding="utf-8")
    check(job(tmp_path, f"train.loss={path}:loss", model=LLAMA))
    wrong = tmp_path / f"wrong_{tmp_path.name}.py"
    wrong.write_text(LOSS.replace(*change), encoding="utf-8")
    with pytest.raises(StrettoError, match=message):
        check(job(tmp_path, f"train.loss={wrong}:loss", model=LLAMA))


def test_a_loss_takes_whole_microbatches(tmp_path: Path) -> None:
    config = job(tmp_path, f"train.loss={PARTS}:loss", "train.loss_chunk=8", model=LLAMA)
    assert {problem.field for problem in find_problems(config)} == {"train.loss_chunk"}


TWO_RANKS = [
    changes(tp=2, sequence_parallel=True),
    changes(pp=2, schedule="zb-h1"),
    changes(cp=2),
]
FOUR_RANKS = [changes(tp=2, pp=2, schedule="zb-h1", sequence_parallel=True), changes(tp=2, cp=2)]


@pytest.mark.parametrize(
    "cases",
    [TWO_RANKS, pytest.param(FOUR_RANKS, marks=pytest.mark.slow)],
    ids=["two ranks", "four"],
)
def test_layouts_compute_the_loss_of_one_process(tmp_path: Path, cases: list[Changes]) -> None:
    """The vocabulary, 300, is padded on the second of two tensor-parallel ranks."""
    config = job(tmp_path, f"train.loss={PARTS}:loss", "train.vocab_multiple=128", EIGHT, model=LLAMA)
    verdicts = verify(config, [varied(config, case) for case in cases], steps=1)
    assert [verdict.diagnosis for verdict in verdicts] == [None] * len(cases)


def test_training_reports_the_loss_and_evaluations_the_cross_entropy(tmp_path: Path) -> None:
    """A loss that is ten times the cross-entropy, on two tensor-parallel ranks."""
    path = tmp_path / f"ten_{tmp_path.name}.py"
    path.write_text(LOSS.replace("return", "return 10 *"), encoding="utf-8")
    options = ("layout.tp=2", "train.steps=1", "eval.every=1", "eval.batches=1", "optim.lr=1e-12")
    config = job(tmp_path, f"train.loss={path}:loss", *options, model=LLAMA)
    train(config)
    (step,) = read_lines(config.run.folder / "metrics.jsonl")
    (evaluation,) = read_lines(config.run.folder / "eval.jsonl")
    assert step["loss"] == pytest.approx(57, rel=0.05)  # 10 ln 300
    assert evaluation["loss"] == pytest.approx(5.7, rel=0.05)


def test_a_schedule_in_a_file_resumes_and_a_change_of_it_is_reported(tmp_path: Path) -> None:
    path = tmp_path / f"lifo_{tmp_path.name}.py"
    shutil.copy(PARTS.with_name("my_schedule.py"), path)
    shape = ("layout.pp=2", "batch.global_size=8", "batch.micro_size=2", f"schedule.name={path}:lifo:depth=2")
    straight = job(tmp_path, *shape, "run.name=straight", model=LLAMA)
    halves = job(tmp_path, *shape, "run.name=halves", model=LLAMA)
    train(straight)
    assert train(halves, STOP_AT_3)["stopped"]
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "# a comment\n", encoding="utf-8")
    again = job(tmp_path, *shape, "run.name=halves", "checkpoint.resume=auto", model=LLAMA)
    train(again, keep_notes(str(tmp_path / "notes")))
    assert same(tensors(straight, 6), tensors(again, 6))
    note = (tmp_path / "notes").read_text(encoding="utf-8")
    assert f"schedule.name={path}:lifo:depth=2: the file has changed since the checkpoint was saved" in note
    copies = [each.read_text(encoding="utf-8") for each in (halves.run.folder / "user_files").iterdir()]
    assert sorted(copies) == [text, text + "# a comment\n"]
    assert str(halves.run.folder / "user_files" / path.stem) in note


def files_differ(rank: int) -> None:
    from stretto.run.train import language_job

    if int(os.environ["RANK"]) == rank:
        read = language_job.file_digests
        language_job.file_digests = lambda parts: {name: f"{d}0" for name, d in read(parts).items()}


def test_ranks_with_different_files_do_not_start(tmp_path: Path) -> None:
    name = f"schedule.name={PARTS.with_name('my_schedule.py')}:lifo"
    with pytest.raises(StrettoError, match="the file of rank 1 is another than that of rank 0"):
        train(job(tmp_path, "layout.pp=2", name, model=LLAMA), (files_differ, (1,)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_schedule.py:life", "did you mean 'lifo'"),
        ("my_schedule.py:lifo:depth=0", "my_schedule.py, line "),
        ("my_shedule.py:lifo", "did you mean"),
        ("none.csv", "there is no such file"),
    ],
)
def test_mistakes_in_a_schedule_are_found_before_ranks_start(tmp_path: Path, name: str, message: str) -> None:
    found = find_problems(job(tmp_path, f"schedule.name={PARTS.with_name(name)}", "layout.pp=2", model=LLAMA))
    assert len(found) == 1
    assert message in str(found[0])
    assert found[0].field.startswith("schedule")


TEXTS = """
def documents():
    for number in range(200):
        yield f"text {number} of the document " * 5
"""


def test_documents_train_like_the_same_rows_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / f"texts_{tmp_path.name}.py"
    path.write_text(TEXTS, encoding="utf-8")
    rows = tmp_path / "rows.jsonl"
    texts = [f"text {number} of the document " * 5 for number in range(200)]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    own = job(tmp_path, f"data.source={path}:documents", "layout.dp=2", "run.name=own", model=LLAMA)
    of_file = job(tmp_path, f"data.source={rows}", "layout.dp=2", "run.name=file", model=LLAMA)
    train(own)
    train(of_file)
    assert same(tensors(own, 6), tensors(of_file, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("yield", "yield 1 or"), "document 0 is int, must be a text"),
        (('f"text', '1 // 0 * f"text'), "after 0 documents: ZeroDivisionError"),
        (("def documents", "def texts"), "defines no documents"),
    ],
    ids=["kind", "raises", "name"],
)
def test_mistakes_in_documents_are_found_before_ranks_start(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / f"wrong_{tmp_path.name}.py"
    path.write_text(TEXTS.replace(*change), encoding="utf-8")
    config = job(tmp_path, f"data.source={path}:documents", model=LLAMA)

    def prepare() -> None:
        check(config)
        written_sources(config.data.sources, config.data)

    with pytest.raises(StrettoError, match=message):
        prepare()
    assert not list(tmp_path.glob("cache/documents/*"))


SAMPLES = PARTS.with_name("my_tokens.py")
OWN = ("model.vocab=13", "data.end_of_text=12", "sample.tokens=0")


@pytest.mark.parametrize("packing", ["stream", pytest.param("none", marks=pytest.mark.slow)])
def test_token_ids_of_a_class_are_trained_on_as_they_are_and_resumed(tmp_path: Path, packing: str) -> None:
    overrides = (f"data.source={SAMPLES}:Sums", *OWN, f"data.packing={packing}", "layout.dp=2")
    uninterrupted = job(tmp_path, *overrides, "run.name=whole", model=LLAMA)
    train(uninterrupted)
    source = open_source(uninterrupted.data, 13)
    (stream,) = source.streams.values()
    (cached,) = tmp_path.glob("cache/samples/*.bin")
    assert (stream.name, source.documents, source.vocab) == (str(cached.with_suffix("")), 5000, 13)
    assert "".join("0123456789+=\n"[each] for each in stream.tokens[:19]) == "85+63=148\n47+51=98\n"
    half = job(tmp_path, *overrides, "run.name=half", "checkpoint.resume=auto", model=LLAMA)
    assert train(half, STOP_AT_3)["stopped"]
    train(half)
    assert same(tensors(half, 6), tensors(uninterrupted, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("END])", "13])"), "sample 0 has the id 13 at 9, outside the vocabulary of 13"),
        (("return np.array([*", "return np.array([0.5, *"), "sample 0 is of float64, must be whole numbers"),
        (("END])", "END])[None]"), r"sample 0 has the shape \[1, 10\], must be one row"),
        (("END])", "END])[:0]"), r"sample 0 has the shape \[0\], must be one row"),
        (("default_rng(number)", "default_rng(number // (7 - number))"), "sample 7: .*ZeroDivisionError"),
        (("return 5000", "return 0"), "has no samples"),
        (("__len__", "length"), "has no samples"),
    ],
)
def test_mistakes_in_token_ids_are_found_before_ranks_start(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    text, path = SAMPLES.read_text(encoding="utf-8"), tmp_path / f"ids_{tmp_path.name}.py"
    assert change[0] in text
    path.write_text(text.replace(*change), encoding="utf-8")
    config = job(tmp_path, f"data.source={path}:Sums", *OWN, model=LLAMA)
    assert not find_problems(config)
    with pytest.raises(StrettoError, match=message):
        open_source(config.data, 13)
    assert not list(tmp_path.glob("cache/samples/*"))


def test_the_number_of_token_ids_is_asked_for(tmp_path: Path) -> None:
    config = job(tmp_path, f"data.source={SAMPLES}:Sums", model=LLAMA)
    with pytest.raises(StrettoError, match=r"Sums does not say what vocabulary its ids are of") as caught:
        open_source(config.data)
    assert "model.vocab=N" in str(caught.value.hint)
