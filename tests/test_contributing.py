"""Every example of the page on extending the package, followed in a copy and judged by its own commands."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from pages import ROOT, blocks, commands, run, run_in_turn, sections, shortened
from stretto import __version__
from tiny_job import write_text

SECTIONS = sections("docs/do/extending.md")
ADD_SCHEDULE, ADD_MODEL = "Add a schedule", "Add a model"
ADD_OPTIMISER, ADD_STYLE = "Add an optimiser", "Add a layer style"

pytestmark = [pytest.mark.apart, pytest.mark.timeout(600)]


def apply(diff: str, root: Path) -> None:
    """Make the change of a diff block: a `--- path` line, then hunks between `@@` lines, whose old lines must
    be in the file once.
    """
    first, _, rest = diff.partition("\n")
    path = root / first.removeprefix("--- ")
    text = path.read_text(encoding="utf-8")
    for hunk in re.split(r"^@@\n", rest, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        if not old:
            raise AssertionError(f"{path.name}: a hunk without a line to find its place by:\n{hunk}")
        assert text.count(old) == 1, f"{path.name} has {text.count(old)} times, not once:\n{old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def change(heading: str, root: Path) -> None:
    """Make a section's files and changes in a copy of the package."""
    # compiled files stay valid in a copy; other workers may just be writing some
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copytree(ROOT / "configs", root / "configs")
    (root / "text").mkdir()
    write_text(root / "text" / "words.txt")
    for code in blocks(SECTIONS[heading], "python"):
        path = re.match(r"# (\S+\.py)\n", code)
        assert path is not None, f"{heading}: a Python block without its file"
        (root / path[1]).write_text(code[path.end() :], encoding="utf-8")
    for diff in blocks(SECTIONS[heading], "diff"):
        apply(diff, root)


def follow(heading: str, root: Path) -> list[str]:
    """Make a section's files and changes, run its commands, return their outputs."""
    change(heading, root)
    source = root / "src"
    where = run(["python", "-c", "import stretto; print(stretto.__file__)"], root, source=source)
    assert where.startswith(str(source)), "the copy is not what runs"
    lines = [shortened(command.argv) for command in commands(SECTIONS[heading])]
    return run_in_turn(lines, root, source)


def losses(root: Path, name: str) -> list[float]:
    lines = (root / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_new_schedule_is_drawn_and_checked(tmp_path: Path) -> None:
    change(ADD_SCHEDULE, tmp_path)
    drawn, checked, *_ = (command.argv for command in commands(SECTIONS[ADD_SCHEDULE]))
    printed = run(drawn, tmp_path, source=tmp_path / "src")
    assert "lifo: 4 ranks, 8 microbatches" in printed
    assert "bubble 27.3%" in printed  # of gpipe: the order of backwards costs nothing
    run(checked, tmp_path, source=tmp_path / "src")


@pytest.mark.slow
def test_the_new_schedule_trains_and_equals_one_process(tmp_path: Path) -> None:
    lines_typed = [command.argv for command in commands(SECTIONS[ADD_SCHEDULE])]
    change(ADD_SCHEDULE, tmp_path)
    lines = [shortened(line) for line in lines_typed if line[0] == "stretto"]
    _, _, verified = run_in_turn(lines, tmp_path, tmp_path / "src")
    assert "lifo" in verified
    assert "equal to one process" in verified
    assert len(losses(tmp_path, "lifo")) >= 1


@pytest.mark.parametrize("heading", [ADD_MODEL, ADD_OPTIMISER])
def test_every_change_has_its_place(heading: str, tmp_path: Path) -> None:
    change(heading, tmp_path)


@pytest.mark.slow
def test_the_new_model_trains_and_equals_one_process_under_tensor_parallelism(tmp_path: Path) -> None:
    _, verified = follow(ADD_MODEL, tmp_path)
    assert "tp2" in verified
    assert "equal to one process" in verified
    assert len(losses(tmp_path, "parallel")) >= 1


@pytest.mark.slow
def test_the_new_optimiser_trains_and_equals_one_process(tmp_path: Path) -> None:
    sharded, split, _ = follow(ADD_OPTIMISER, tmp_path)
    assert "zero2" in sharded or "dp2" in sharded
    assert "tp2" in split
    assert all("equal to one process" in printed for printed in (sharded, split))
    assert len(losses(tmp_path, "adabelief")) >= 1


@pytest.mark.slow
def test_an_optimiser_that_is_wrong_on_shards_is_detected(tmp_path: Path) -> None:
    """The commands of the page can fail: a rule that reads the size of its shard depends on the layout."""
    section = SECTIONS[ADD_OPTIMISER]
    wrong = section.replace("mean.lerp_(gradient, 1 - beta1)", "mean.lerp_(gradient, 1 / gradient.numel())")
    assert wrong != section
    SECTIONS["wrong"] = wrong
    with pytest.raises(AssertionError, match="ended with 1"):
        follow("wrong", tmp_path)


def style(folder: Path, code: str, ends_with: int = 0) -> str:
    (folder / "style.py").write_text(code, encoding="utf-8")
    return run([sys.executable, "style.py"], folder, code=ends_with)


def test_the_new_layer_style_equals_one_process(tmp_path: Path) -> None:
    (code,) = blocks(SECTIONS[ADD_STYLE], "python")
    printed = style(tmp_path, code)
    assert re.findall(r"rank (\d) holds slopes \[(\d+)\]", printed) == [("0", "16"), ("1", "16")]
    assert all(float(difference) < 1e-12 for difference in re.findall(r"differ by (\S+)", printed))


@pytest.mark.slow
def test_a_layer_style_that_gives_every_rank_the_same_share_is_refused(tmp_path: Path) -> None:
    (code,) = blocks(SECTIONS[ADD_STYLE], "python")
    wrong = code.replace("start=index * features // tp", "start=0")
    assert wrong != code
    assert "sharding plan: two ranks own 1.weight" in style(tmp_path, wrong, ends_with=1)


def test_the_ten_files_to_read_first_are_ten_and_there() -> None:
    text = sections("CONTRIBUTING.md")["Read these ten files first"]
    listed = re.findall(r"^\d+\. \[\S+\]\((\S+)\)", text, re.MULTILINE)
    assert len(set(listed)) == 10
    assert all((ROOT / path).is_file() for path in listed)


def test_all_places_name_one_version() -> None:
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CITATION.cff")}
    assert f'\nversion = "{__version__}"\n' in pages["pyproject.toml"]
    assert f"\nversion: {__version__}\n" in pages["CITATION.cff"]
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_matrix_covers_the_versions_that_the_package_supports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    pythons, torches = (
        sorted({int(row[name].partition(".")[2]) for row in rows}) for name in ("python", "torch")
    )
    assert project["requires-python"] == f">=3.{pythons[0]}"
    (torch,) = (need for need in project["optional-dependencies"]["train"] if need.startswith("torch"))
    assert torch == f"torch>=2.{torches[0]},<2.{torches[-1] + 1}"
    assert [pythons, torches] == [[*range(each[0], each[-1] + 1)] for each in (pythons, torches)]


def test_the_hooks_are_the_linters_of_make() -> None:
    """Hooks are local: installing them downloads nothing, and `make lint` runs the same versions."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks} == {"system"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"$(BIN)/{tool}" in makefile for tool in ("ruff check", "ruff format", "basedpyright"))
    assert {"ruff-check", "ruff-format", "basedpyright"} <= {hook["id"] for hook in hooks}


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_issue_forms_have_fields_with_labels(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / name).read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    assert all(field["attributes"]["label"] for field in form["body"])
    assert len({field["id"] for field in form["body"]}) == len(form["body"])


def test_the_folders_of_tests_are_those_of_the_source() -> None:
    others = {"accelerator", "benchmarks", "cuda", "docs", "examples", "faults", "torture", "interop"}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").glob("*/**/test_*.py")}
    mirrored = [folder for folder in folders if folder.parts[0] not in others]
    assert len(mirrored) > 30
    assert not [str(folder) for folder in mirrored if not (ROOT / "src" / "stretto" / folder).is_dir()]
