"""A recommender exported for serving, and `Scorer`, against `stretto score` and the model's own forward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from recommender_job import config_of
from stretto.cli.main import run
from stretto.errors import StrettoError
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.raw import Columns
from stretto.recommender.clicks.tabular import read_rows
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.serve.export import removed_on_failure
from stretto.recommender.serve.scorer import Scorer
from stretto.recommender.tables.jagged import Jagged
from stretto.recommender.train.clicks import prepare_clicks
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.job import RECOMMENDER
from stretto.recommender.train.placement import place
from stretto.recommender.train.task import load_weights
from stretto.run.train.launch import run_job

TABLES = (
    "model.tables=[{rows: 40, hot: 2, pooling: mean}, {rows: 60, ids: quotient-remainder, hot: 3}, "
    "{rows: 30, ids: hash, hot: 2, pooling: mean, admit: 3}]"
)
PLACED = "tables.placement={C1: {split: column, ranks: all}, C2: {split: data}, C3: {split: row, ranks: all}}"
LOG = "clicked,age,item,shop\n" + "".join(
    f"{i % 3 == 0:d},{'' if i % 7 == 0 else i % 11},{'abcdefgh'[i % 8]},{'' if i % 5 == 0 else i % 4}\n"
    for i in range(120)
)


@pytest.fixture(scope="module")
def bags(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecommenderConfig, Path, Path]:
    """A config, its run with bags of three kinds of ids, and the exported folder."""
    folder = tmp_path_factory.mktemp("bags")
    config = config_of(folder, TABLES, PLACED, "optim.tables.name=split_sgd", "train.dtype=float32")
    run_job(RECOMMENDER, config, quiet=True)
    assert run(["checkpoint", "export", str(folder / "runs/tiny"), "--out", str(folder / "out")]) == 0
    return config, folder / "runs/tiny", folder / "out"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on a CSV log, and the exported folder."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "log.csv").write_text(LOG)
    columns = "data.columns={label: clicked, numbers: [age], features: [item, shop]}"
    sources = (
        f"data.source={folder / 'log.csv'}",
        f"data.cache={folder / 'cache'}",
        "data.missing_flags=true",
    )
    config = config_of(folder, *sources, columns, "model.tables=null", "model.dense=2")
    run_job(RECOMMENDER, config, quiet=True)
    assert run(["checkpoint", "export", str(folder / "runs/tiny"), "--out", str(folder / "out")]) == 0
    return folder / "runs/tiny", folder / "out"


def batch_of(samples: int, weighted: bool, seed: int = 0) -> ClickBatch:
    """Bags of no to three ids, some of which the hash table does not have."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3, samples), generator=generator)
    ids = torch.randint(0, 5000, (int(lengths.sum()),), generator=generator)
    ids[::2] %= 50
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return ClickBatch(
        torch.randn(samples, 13, generator=generator), Jagged(ids, lengths, weights), torch.zeros(samples)
    )


class Keyed:
    """What a KeyedJaggedTensor has, with its keys in another order and one more."""

    def __init__(self, ids: Jagged, by: str) -> None:
        order, counts = [2, 0, 1], ids.counts()
        empty = torch.zeros(1, ids.samples, dtype=torch.int64)
        self._lengths = torch.cat([ids.lengths[order], empty + 1]).flatten()
        values, weights = (
            None
            if each is None
            else torch.cat([each.split(counts)[i] for i in order] + [each[: ids.samples]])
            for each in (ids.ids, ids.weights)
        )
        self.keys: Callable[[], list[str]] = lambda: ["C3", "C1", "C2", "other"]
        self.values: Callable[[], Tensor | None] = lambda: values
        self.weights_or_none: Callable[[], Tensor | None] = lambda: weights
        offsets = torch.nn.functional.pad(torch.cumsum(self._lengths, 0), (1, 0))
        setattr(self, by, lambda: self._lengths if by == "lengths" else offsets)


@pytest.mark.parametrize("weighted", [False, True])
def test_probabilities_are_the_models_bit_by_bit(
    bags: tuple[RecommenderConfig, Path, Path], weighted: bool
) -> None:
    """In whatever form ids come, from the export and from the checkpoint of two ranks."""
    config, trained, exported = bags
    batch, data = batch_of(64, weighted), prepare_clicks(config, quiet=True)
    alone = config_of(
        trained.parent.parent,
        TABLES,
        "layout.ranks=1",
        "tables.placement=table",
        "train.dtype=float32",
        "optim.tables.name=split_sgd",
    )
    model = Recommender(alone, data.tables, place(alone, data), fresh=False)
    load_weights(model, trained / "checkpoints/step-00000006", 6)
    wanted = model.predict(batch).sigmoid()
    assert wanted.std() > 1e-3
    ids = batch.ids
    offsets = torch.nn.functional.pad(torch.cumsum(ids.lengths.flatten(), 0), (1, 0))
    forms: list[tuple[Any, ...]] = [(ids,), (Keyed(ids, "lengths"),), (Keyed(ids, "offsets"),)]
    if not weighted:
        forms += [(ids.ids, offsets), (ids.ids.tolist(), offsets.int().numpy())]
    for scorer in (Scorer.load(exported), Scorer.load(trained), Scorer.load(trained, step=6)):
        for form in forms:
            assert torch.equal(scorer(batch.dense, *form), wanted)
    single = Jagged.fixed(list(torch.arange(15).view(5, 3).T.unsqueeze(2)))
    single_ids = ClickBatch(batch.dense[:5], single, batch.labels[:5])
    scorer = Scorer.load(exported)
    assert torch.equal(
        scorer(single_ids.dense, torch.arange(15).view(5, 3)), model.predict(single_ids).sigmoid()
    )
    model.close()


def test_rows_of_the_log_are_scored_as_the_command_does(
    rows: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained, exported = rows
    values = [line.split(",")[1:] for line in LOG.splitlines()[1:]] + [["3", "new", "17"]]
    log, out = tmp_path / "new.csv", tmp_path / "out.npy"
    log.write_text("age,item,shop\n" + "".join(",".join(row) + "\n" for row in values))
    arguments = [
        str(log),
        "--out",
        str(out),
        "layout.ranks=1",
        "tables.placement=table",
        "batch.global_size=500",
    ]
    assert run(["score", str(trained), *arguments]) == 0
    capfd.readouterr()
    samples = [
        {"age": float(age) if age else None, "item": item, "shop": int(shop) if shop else None, "x": 1}
        for age, item, shop in values
    ]
    scorer = Scorer.load(exported)
    assert (scorer.numbers, scorer.features) == (["age", "age.missing"], ["item", "shop"])
    for each in (scorer, Scorer.load(trained)):
        assert np.array_equal(each.score(samples).numpy(), np.load(out))


def test_the_folder_is_plain_and_its_program_is_the_network(
    bags: tuple[RecommenderConfig, Path, Path], rows: tuple[Path, Path]
) -> None:
    exported = bags[2]
    config = json.loads((exported / "config.json").read_text())
    assert (config["format"], config["version"], config["dtype"]) == ("stretto-recommender", 1, "float32")
    assert config["tables"]["C1"] == {"shape": [40, 8], "dtype": "bfloat16"}
    names = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    tables = {f"tables/{name}.safetensors" for name in config["tables"]}
    own = {"README.md", "config.json", "dense.pt2", "dense.safetensors"}
    assert {name for name in names if not name.startswith(".")} == own | tables
    assert (rows[1] / "transform.json").read_bytes() == (rows[0] / "transform.json").read_bytes()
    with safe_open(exported / "dense.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    program: Any = torch.export.load(exported / "dense.pt2").module()
    assert {name: weight.shape for name, weight in program.state_dict().items()} == {
        name: weight.shape for name, weight in weights.items()
    }
    assert all(torch.equal(weights[name], weight) for name, weight in program.state_dict().items())
    scorer, batch = Scorer.load(exported), batch_of(9, False)
    pooled = torch.stack([torch.zeros(9, 8)] * 3, 1)
    empty = Jagged(batch.ids.ids[:0], torch.zeros_like(batch.ids.lengths))
    torch.testing.assert_close(program(batch.dense, pooled).sigmoid(), scorer(batch.dense, empty))


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), None, r"ids of shape \[2, 2\] without offsets"),
        (torch.zeros(2, 3), None, "ids of type torch.float32"),
        (torch.full((2, 3), -1), None, "ids with -1"),
        (torch.zeros(3, 3, dtype=torch.int64), None, "ids of 3 samples and numbers of 2"),
        (torch.arange(6), torch.arange(6), "6 offsets"),
        (torch.arange(6), torch.tensor([0, 2, 1, 3, 4, 5, 6]), "lengths with -1"),
        (torch.arange(7), torch.arange(7), "7 ids of 3 features with lengths that add up to 6"),
        (torch.arange(7), torch.arange(1, 8), "offsets begin with 1"),
        (Jagged(torch.arange(4), torch.ones(2, 2).long()), None, "4 ids of 2 features"),
        (SimpleNamespace(keys=lambda: ["C1", "c2", "C3"], values=lambda: None), None, "0 keys named C2"),
    ],
)
def test_ids_of_another_form_are_refused(
    bags: tuple[RecommenderConfig, Path, Path], ids: Any, offsets: Any, message: str
) -> None:
    with pytest.raises(StrettoError, match=message):
        Scorer.load(bags[2])(torch.zeros(2, 13), ids, offsets)


def test_what_cannot_be_loaded_says_why(
    bags: tuple[RecommenderConfig, Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, trained, exported = bags
    with pytest.raises(StrettoError, match=r"numbers of shape \[2, 12\]"):
        Scorer.load(exported)(torch.zeros(2, 12), torch.zeros(2, 3).long())
    with pytest.raises(StrettoError, match="synthetic clicks"):
        Scorer.load(exported).score([])
    command = ["checkpoint", "export", str(trained), "--out", str(tmp_path / "out")]
    assert run([*command, "--dense-only", "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["notes"][0] == "no tables (--dense-only): they stay in the checkpoint"
    with pytest.raises(StrettoError, match="exported with --dense-only: its tables are in"):
        Scorer.load(tmp_path / "out")
    assert run(command) == 2
    assert "already holds tables" in capfd.readouterr().err
    for option, value in (("--dtype", "float16"), ("--shard-gb", "1"), ("--expert-parallel", "2")):
        assert run([*command, option, value]) == 2
        assert f"{option}, and" in capfd.readouterr().err
    config = json.loads((exported / "config.json").read_text())
    for change, message in (
        ({"version": 2}, "of version 2, and this release reads 1"),
        ({"format": "other"}, "not of a recommender"),
        ({"model": config["model"] | {"top": [16, 16, 1]}}, "not of the model's sizes"),
        ({"model": config["model"] | {"top": None}}, "missing or wrong"),
    ):
        (tmp_path / "out" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(StrettoError, match=message):
            Scorer.load(tmp_path / "out")


def test_an_export_that_fails_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "dense.safetensors").touch()
    (tmp_path / "mine.txt").touch()
    names = ["tables", "dense.safetensors", "config.json"]
    full = pytest.raises(StrettoError, match="cannot be written: No space left")
    with full, removed_on_failure(tmp_path / "step-00000001", tmp_path, names):
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"n": 1, "f": ["a"]}, "row 0 has no h: None if it is missing"),
        ({"n": "1", "f": [], "h": None}, "n is '1': a number, or None"),
        ({"n": 1, "f": "ab", "h": None}, "f is 'ab': a list of values, or None"),
        ({"n": 1, "f": [""], "h": None}, "a text that is not empty, or None"),
        ({"n": 1, "f": [], "h": "68fd1e6"}, "h is '68fd1e6': eight hexadecimal digits, or None"),
        ({"n": float("inf"), "f": [], "h": 1}, "a number is infinite"),
    ],
)
def test_values_of_another_type_are_refused(row: dict[str, Any], message: str) -> None:
    columns = Columns(("n",), ("f", "h"), ("text", "hex"), (True, False))
    with pytest.raises(StrettoError) as caught:
        read_rows(columns, [row])
    assert message in str(caught.value).replace("\n", ": ").replace(": : ", ": ").replace("hint: ", "")
    chunk = read_rows(
        columns, [{"n": 2, "f": ["a", None], "h": "000000ff"}, {"n": None, "f": None, "h": 255}]
    )
    assert chunk.lengths is not None
    assert (chunk.keys[[2, 3]].tolist(), chunk.missing.tolist()) == ([255, 255], [False, True, False, False])
    assert chunk.lengths.tolist() == [[2, 1], [0, 1]]
