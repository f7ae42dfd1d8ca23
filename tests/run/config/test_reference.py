from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import NamedTuple

from stretto.cli.jobs import reference
from stretto.cli.main import run
from stretto.run.config.load import load
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import fields_of

ROOT = Path(__file__).parents[3]


def test_the_reference_in_docs_is_up_to_date() -> None:
    fix = "run: stretto config --reference > docs/reference/config.md"
    assert (ROOT / "docs" / "reference" / "config.md").read_text() == reference(), fix


def test_every_field_is_described() -> None:
    text = reference()
    for path, field in fields_of(TrainConfig):
        assert field.field is not None
        assert field.field.doc.endswith("."), path
        assert f"| `{path[-1]}` |" in text


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def command(*arguments: str) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["config", *arguments])
    return Ended(code, out.getvalue(), err.getvalue())


def test_the_command_prints_the_resolved_config(tmp_path: Path) -> None:
    path = tmp_path / "quickstart.yaml"
    done = command("configs/quickstart.yaml", "optim.lr=2e-4")
    assert (done.code, done.err) == (0, "")
    path.write_text(done.out)
    assert load(path) == load(ROOT / "configs" / "quickstart.yaml", ["optim.lr=2e-4"])


def test_the_command_speaks_json() -> None:
    done = command("configs/quickstart.yaml", "--json")
    assert json.loads(done.out)["layout"]["pp"] == 2


def test_the_command_prints_the_reference() -> None:
    assert command("--reference").out == reference()


def test_the_command_refuses_an_illegal_job() -> None:
    done = command("configs/quickstart.yaml", "layout.dp=3")
    assert done.code == 2
    assert done.out == ""
    assert "error: batch.global_size is 32: it must be a multiple of" in done.err
    assert "hint: nearest: batch.global_size=36 or 24" in done.err
    assert command().code == 2
    assert command("configs/quickstart.yaml", "layout.dp=3", "--no-check").code == 0
