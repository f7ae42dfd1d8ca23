from __future__ import annotations

from pathlib import Path

import pytest

from stretto import versions
from stretto.errors import StrettoError
from stretto.job.flops import layer_costs
from stretto.job.initial import Initial
from stretto.job.program import ScheduleSearchKey, stage_times
from stretto.program import names, options, schedule
from stretto.program.replay import Costs, simulate
from stretto.run.config import run_checks as room
from stretto.run.config.check import check, find_problems
from stretto.run.config.job import job_of
from stretto.run.config.load import dump, parse
from stretto.run.config.schema import ScheduleConfig

MODEL = "model: {family: gpt, layers: 4, hidden: 64, heads: 4}\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fails(*overrides: str, world: int | None = None, devices: int | None = None) -> StrettoError:
    with pytest.raises(StrettoError) as caught:
        check(parse(MODEL, overrides=overrides), world=world, devices=devices)
    return caught.value


def test_a_legal_job_passes() -> None:
    check(parse(MODEL))
    check(parse(MODEL, overrides=["layout.dp=2", "layout.pp=2"]), world=4, devices=4)


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        ("layout.tp=8", "layout.tp is 8: it must divide model.heads, which is 4", "layout.tp=4"),
        ("layout.ep=2 layout.dp=2", "layout.ep is 2: the model has no experts", "model.moe.experts=2"),
        (
            "layout.ep=3 layout.dp=4 model.moe.experts=3",
            "ep=3 with expert_tp=1 does not divide the 4 ranks",
            "nearest ep is 2",
        ),
        ("layout.context=ulysses layout.cp=8", "layout.tp=1 x layout.cp=8 must divide", "layout.cp=4"),
        (
            "recompute.blocks=1",
            "recompute.blocks is 1: recompute.mode=none does not select",
            "recompute.mode=full",
        ),
        ("layout.order=tp-xp", "order 'tp-xp' names unknown axis 'xp'", None),
        ("layout.dp=3", "batch.global_size is 32: it must be a multiple of", "36 or 24"),
        (
            'model={"preset":"olmo2-7b"}',
            "model.preset is olmo2-7b: the model has one norm of queries and keys over all heads",
            "model.preset=llama3-8b",
        ),
        ("layout.stages=[1]", "layout.stages is [1]: they add up to 1, the model has", "layout.stages=["),
        ("layout.pp=2 layout.stages=[3,0]", "[3, 0]: each stage needs at least one layer", "cut evenly"),
        ("layout.pp=2 layout.stages=[2,2,2]", "there are 3 counts and the schedule has 2 stages", "null"),
        ("schedule.file=nowhere.csv", "schedule.file is nowhere.csv: it cannot be read: No such file", None),
        ("model.hidden=65", "model.hidden is 65: it must be a multiple of heads, which is 4", "64"),
        (
            "model.family=llama model.dropout=0.1",
            "model.dropout is 0.1: models with rotary positions have no dropout",
            None,
        ),
        ("model.positions=64", "data.sequence is 128: the model has 64 positions", "data.sequence=64"),
        ("model.vocab=300", "model.vocab is 300: the tokenizer may have data.vocab=4096", "model.vocab=4096"),
        ("schedule.name=2f2b", "not one of", None),
        ("schedule.waves=2", "waves is 2, but schedule '1f1b' takes no waves", "that takes it: hanayo"),
        ("schedule.name=hanayo schedule.chunks=2", "chunks is 2, but schedule 'hanayo'", "leave chunks out"),
        ("schedule.name=forward-only", "it has no backwards, so it cannot train", "use 1f1b"),
        ("schedule.name=pipedream", "optim.clip is 1.0: schedule pipedream updates each stage", "clip=null"),
        ("schedule.name=auto schedule.memory=0.5", "memory is 0.5", "memory=1"),
        ("optim.momentum=0.9", "optim.momentum is 0.9: adamw has none", "optim.name=sgd"),
        ("optim.betas=[0.9,1.0]", "optim.betas is [0.9, 1.0]: each must be in [0, 1)", None),
        ("optim.name=lamb optim.momentum=0.5", "optim.momentum is 0.5: lamb has none", "momentum=0"),
        ("optim.states=bfloat16 optim.name=muon", "states is bfloat16: muon has float32 only", "name=adamw"),
        ("optim.states=bfloat16 optim.betas=[0.9,0.999]", "0.999]: bfloat16 states have 8", "[0.9, 0.99]"),
        ('optim.no_decay=["head.nrom.weight"]', "it matches no parameter", "did you mean head.norm.weight?"),
        ("data.split=0,1,1", "data.split is 0,1,1: the first number", None),
        ("data.split=1,0,0 eval.every=5", "data.split is 1,0,0: the second number", "eval.every=null"),
        ("data.source=[]", "data.source is []", "python-stdlib"),
        ("data.source=txt", "data.source is txt: there is no such file or folder", "did you mean text?"),
        ("data.source=no/txt", "there is no such file or folder", "there is no folder no"),
        ('data.source=[text,"*.txt"]', "data.source is *.txt: the pattern matches no file", None),
        ("data.tokenizer=text", "data.tokenizer is text: the folder holds no tokenizer", None),
        (
            "data.tokenizer=gpt2",
            "data.tokenizer is gpt2: there is no such",
            "names of models are not downloaded",
        ),
        ("checkpoint.resume=atuo", "checkpoint.resume is atuo: there is no such folder", "mean auto?"),
        ("checkpoint.resume=./txt", "checkpoint.resume is ./txt: there is no such folder", "mean text?"),
        ("run.dir=file", "run.dir is file: ", "name another folder"),
        (f"run.dir=a/{'x' * 300}", f"run.dir is 'a/{'x' * 38}': names have at most 255 bytes", "another"),
        ('schedule.file="a\\0.csv"', "names have at most 255 bytes, and no NUL", "another"),
        (f"data.source={'x' * 300}", "data.source is 'xxx", "another"),
        (f"data.tokenizer={'x' * 300}", "data.tokenizer is 'xxx", "another"),
    ],
)
def test_one_thing_wrong(overrides: str, message: str, hint: str | None) -> None:
    Path("text").mkdir()
    Path("file").touch()
    error = fails(*overrides.split(" "))
    assert message in error.message
    assert hint is None or (error.hint is not None and hint in error.hint)
    assert not error.others


def test_a_missing_tokenizer_is_not_taken_for_a_hidden_folder_or_a_text() -> None:
    Path(".git").mkdir()
    Path("gpt2.txt").touch()
    assert "did you mean" not in str(fails("data.tokenizer=gpt2").hint)
    Path("gpt2.json").touch()
    assert str(fails("data.tokenizer=gpt2").hint).startswith("did you mean gpt2.json?")


def test_data_of_other_kinds() -> None:
    """A click folder is no text, and half of a Megatron dataset is none."""
    Path("clicks").mkdir()
    for name in ("index.json", "labels.bin"):
        Path("clicks", name).touch()
    assert "it is a click folder, which is the data of a recommender" in fails("data.source=clicks").message
    Path("a.bin").touch()
    for name in ("a", "a.bin"):
        error = fails(f"data.source={name}")
        assert "half of a Megatron dataset: a.idx is missing beside a.bin" in error.message
        assert error.hint == "copy a.idx there"


def test_the_first_problem_with_all_others_after_it() -> None:
    error = fails("layout.tp=8", "optim.momentum=0.5", "data.source=nowhere")
    assert error.message.startswith("layout.tp is 8")
    assert error.hint == "nearest: layout.tp=4"
    momentum, source = error.others
    assert momentum.message.startswith("optim.momentum is 0.5")
    assert source.message.startswith("data.source is nowhere")
    assert source.hint


def test_a_file_that_is_not_there_is_not_said_to_be_one_that_is_hardly_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("opt").touch()
    Path("corpus.txt").touch()
    assert fails("data.source=nope").hint == (
        "nothing in . has such a name; python-stdlib is on every machine"
    )
    assert fails("data.source=corpus.tx").hint == "did you mean corpus.txt?"


@pytest.mark.parametrize(("word", "meant"), [("latest", "auto"), ("Newest", "auto"), ("none", "never")])
def test_other_words_for_where_to_resume(word: str, meant: str) -> None:
    assert fails(f"checkpoint.resume={word}").hint == f"did you mean {meant}?"


def test_processes_and_devices() -> None:
    assert "but 3 processes were started" in fails("layout.dp=2", world=3).message
    assert "there are 1 devices" in fails("layout.dp=2", devices=1).message


def test_existing_files_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "tokenizer.json").write_text("{}")
    for source in (folder, folder / "a.txt", folder / "*.txt"):
        check(parse(MODEL, overrides=[f"data.source={source}"]))
    for tokenizer in (folder, folder / "tokenizer.json"):
        check(parse(MODEL, overrides=[f"data.tokenizer={tokenizer}"]))
    check(parse(MODEL, overrides=[f"checkpoint.resume={folder}", f"run.dir={tmp_path / 'new' / 'runs'}"]))


def test_a_run_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.os, "access", lambda path, mode: False)
    assert "cannot be written to" in fails("run.dir=runs").message


@pytest.mark.parametrize(
    ("override", "field", "name", "without"),
    [
        ("metrics.to=[wandb]", "metrics.to is wandb", "wandb", "metrics.to without wandb"),
        ("metrics.tensorboard_dir=b", "metrics.tensorboard_dir is b", "tensorboard", "tensorboard_dir=null"),
    ],
)
def test_a_tracker_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, override: str, field: str, name: str, without: str
) -> None:
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    error = fails(override)
    assert error.message == f"{field}: {name} is not installed"
    assert f"pip install 'stretto[{name}]'" in str(error.hint)
    assert without in str(error.hint)
    check(parse(MODEL))


def test_a_tracker_that_does_not_exist() -> None:
    error = fails("metrics.to=[tensorboard, wandbb]")
    assert "did you mean wandb?" in str(error.hint)


def test_trackers_and_tensorboards_folder() -> None:
    with pytest.warns(versions.DeprecatedName, match=r"write metrics\.to=\[tensorboard\]"):
        old = parse(MODEL, overrides=["metrics.tensorboard=true"]).metrics
    new = parse(MODEL, overrides=["metrics.to=[tensorboard]"]).metrics
    elsewhere = parse(MODEL, overrides=["metrics.to=[wandb]", "metrics.tensorboard_dir=boards/a"]).metrics
    assert old == new
    assert parse(MODEL).metrics.trackers == []
    assert (new.trackers, new.board(Path("runs/one"))) == (["tensorboard"], Path("runs/one/tensorboard"))
    assert elsewhere.trackers == ["wandb", "tensorboard"]
    assert elsewhere.board(Path("runs/one")) == Path("boards/a")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("optim.rate.warmup=300", None),
        (
            "optim.rate.warmup=301",
            "cut to 300 steps: optim.rate.warmup=301 does not fit",
        ),
        ("optim.rate.warmup=20 train.steps=6", "cut to 6 steps"),
        ("optim.rate.warmup=20 optim.rate.decay_steps=9", "fit into optim.rate.decay_steps=9"),
        ("optim.rate.schedule=wsd optim.rate.warmup=271", "cut to 270 steps"),
        ("optim.rate.warmup=0.5", None),
    ],
)
def test_a_warmup_that_is_cut_is_said(overrides: str, says: str | None) -> None:
    config = parse(MODEL, overrides=overrides.split())
    check(config)
    notes = room.rate_notes(config.optim.rate, config.train.steps)
    assert bool(notes) == (says is not None)
    assert says is None or says in notes[0]


def test_how_weights_begin_is_of_the_job() -> None:
    config = parse(MODEL, overrides=["model.init_std=0.006", "model.scaled_init=false"])
    assert job_of(config).initial == Initial(init_std=0.006, scaled_init=False)
    assert config.shape() == parse(MODEL).shape()


def test_every_option_of_a_schedule_is_a_field() -> None:
    """But for the model's costs, and for the steps of a window: training decides itself when to drain."""
    taken = {option for name in names() for option in options(name)} - {"costs", "steps"}
    assert set(ScheduleConfig.option_names()) == taken


@pytest.mark.parametrize(
    "overrides",
    [
        "schedule.name=interleaved schedule.chunks=2 schedule.group=3 layout.pp=2",
        "schedule.name=hanayo schedule.waves=1 layout.pp=3",
        "schedule.name=pipedream schedule.vertical_sync=true optim.clip=null layout.pp=2 model.tied=false",
        "schedule.name=auto schedule.memory=[2,1.5] schedule.effort=0 layout.pp=2",
        "schedule.name=auto schedule.memory=2 schedule.split=false schedule.placement=linear layout.pp=2",
    ],
)
def test_options_reach_the_schedule(overrides: str) -> None:
    config = parse(MODEL, overrides=overrides.split(" "))
    check(config)
    assert parse(dump(config)) == config
    program = job_of(config).program()
    assert program.name == config.schedule.name
    for name in ("chunks", "group", "waves", "vertical_sync"):
        if name in config.schedule.options:
            assert program.parameters[name] == config.schedule.options[name]


@pytest.mark.parametrize(
    ("overrides", "steps_between_drains"),
    [
        ("train.steps=300", 300),
        ("train.steps=300 eval.every=50", 50),
        ("train.steps=310 eval.every=50", 310 / 7),
        ("train.steps=300 eval.every=50 checkpoint.every=100", 50),
        ("train.steps=300 eval.every=40 checkpoint.every=100", 300 / 9),  # 200 is a multiple of both
        ("train.steps=30 eval.every=40", 30),
    ],
)
def test_asynchronous_schedules_drain_for_evaluations_checkpoints_and_the_end(
    overrides: str, steps_between_drains: float
) -> None:
    config = parse(MODEL, overrides=overrides.split(" "))
    steps, every = config.train.steps, (config.eval.every, config.checkpoint.every)
    drains = {steps, *(step for n in every if n for step in range(n, steps + 1, n))}
    assert job_of(config).steps_between_drains == steps / len(drains) == steps_between_drains


def test_a_searched_schedule_uses_the_costs_of_the_stages() -> None:
    """Four equal blocks and a head that costs two of them: its stage gets fewer blocks."""
    config = parse(MODEL, overrides=["schedule.name=auto", "schedule.effort=0", "layout.pp=2"])
    shape = config.shape()
    of = ScheduleSearchKey(shape=shape, sequence=config.data.sequence)
    times = stage_times(of, 2)
    per_layer = layer_costs(shape, config.data.sequence)
    assert sum(f for f, _, _ in times) == pytest.approx(sum(per_layer) / per_layer[1])
    for f, i, w in times:
        assert i + w == pytest.approx(2 * f)
    searched = schedule("auto", 2, config.microbatches, costs=Costs(per_stage=times), effort=0)
    program, costs = job_of(config).program(), Costs(per_stage=stage_times(of, 2))
    if program.depth == 2:
        assert program.orders == searched.orders
    else:
        costs = Costs(per_stage=stage_times(of, program.depth))
    assert simulate(program, costs).makespan <= simulate(searched, Costs(per_stage=times)).makespan


def test_all_problems_are_listed() -> None:
    config = parse(MODEL, overrides=["model.hidden=65", "optim.momentum=0.5"])
    assert [p.field for p in find_problems(config)] == ["model.hidden", "optim.momentum"]


def test_a_budget_that_nothing_fits_is_known_before_a_process_is_started() -> None:
    for gib, fits in ((0.0001, False), (4.0, True)):
        budget = ["recompute.mode=auto", f"recompute.memory_gib={gib}"]
        problems = find_problems(parse(MODEL, overrides=[*budget, "layout.pp=2"]))
        assert [p.field for p in problems] == ([] if fits else ["recompute.memory_gib"])
        if not fits:
            assert "pipeline rank 0 needs" in str(problems[0])
            assert "recompute.memory_gib=0." in str(problems[0].fix)
