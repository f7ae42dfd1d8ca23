"""The public interface: what `stretto` exports, what importing it costs, and what works without PyTorch."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import stretto
from stretto.errors import PackageMissing, StrettoError

ROOT = Path(__file__).parents[1]
PAGES = (
    "docs/do/extending.md",
    "docs/do/watching.md",
    "docs/do/models.md",
    "docs/do/prove.md",
    "docs/do/library.md",
    "docs/do/schedules.md",
)

# PyTorch as it is where it was never installed
WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


def output(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_exported_name_is_there() -> None:
    assert stretto.Layout(dp=2).world == 2
    assert stretto.simulate(stretto.schedule("1f1b", 2, 2)).makespan == 9
    assert all(getattr(stretto, name) is not None for name in stretto.__all__)
    assert list(stretto.__all__) == sorted(set(stretto.__all__))
    with pytest.raises(AttributeError, match="nothing"):
        _ = stretto.nothing  # type: ignore[attr-defined]


def test_a_module_of_the_package_comes_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.prove import prove

    monkeypatch.delitem(vars(stretto), "prove")  # as before the first access
    assert stretto.prove.prove is prove


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import stretto; a = stretto.prove; from stretto.prove import prove; print(a.prove is prove)",
        "from stretto.prove import prove; import stretto; print(stretto.prove.prove is prove)",
    ],
)
def test_a_module_of_the_package_comes_first_by_either_way(code: str) -> None:
    assert output(code) == "True\n"


def test_dir_lists_the_exported_names_and_no_others() -> None:
    assert output("import stretto; print(*dir(stretto))").split() == sorted(stretto.__all__)


def test_objects_print_as_one_short_line() -> None:
    layout = stretto.Layout(tp=2, order="pp-dp-cp-tp-ep")
    assert repr(layout) == "Layout(tp=2, order='pp-dp-cp-tp-ep')"
    assert eval(repr(layout), {"Layout": stretto.Layout}) == layout
    program = stretto.schedule("interleaved", 4, 8, chunks=2)
    assert repr(program) == "Program('interleaved': 4 ranks, 8 stages, 8 microbatches, 128 actions)"
    lowered = stretto.lower(stretto.schedule("1f1b", 2, 2))
    assert repr(lowered).startswith("Program('1f1b': 2 ranks, 2 microbatches, ")
    assert repr(lowered).endswith(" actions, lowered)")
    timeline = stretto.simulate(stretto.schedule("1f1b", 2, 2))
    assert repr(timeline) == "Timeline('1f1b': makespan 9, bubble 33.3%)"
    mesh = stretto.Mesh(stretto.Layout())
    assert repr(mesh) == "Mesh(single: rank 0 of 1, cpu)"
    layers = [nn.Linear(2, 2)]
    pipeline = stretto.Pipeline(layers, stretto.schedule("1f1b", 1, 2), mesh, lambda y, _: y.sum())
    assert repr(pipeline) == "Pipeline('1f1b': rank 0 of 1, stages 0)"


def test_type_checkers_see_the_names_that_are_imported_on_first_use() -> None:
    tree = ast.parse(Path(stretto.__file__).read_text(encoding="utf-8"))
    (checked,) = (
        node for node in tree.body if isinstance(node, ast.If) and isinstance(node.body[0], ast.ImportFrom)
    )
    typed = {
        alias.asname or alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == stretto._MODULE_OF
    assert {*typed, "__version__"} == set(stretto.__all__)


def test_import_is_light_and_programs_need_no_torch() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'pydantic', 'rich') if name in sys.modules]"
    assert output(f"import sys, stretto; print({heavy})") == "[]\n"
    code = (
        "import stretto; program = stretto.schedule('1f1b', 2, 2); stretto.check(stretto.lower(program));"
        f"import sys; print(stretto.simulate(program).makespan, stretto.Layout(pp=2).world, {heavy})"
    )
    assert output(WITHOUT_TORCH + code) == "9.0 2 []\n"


def test_a_name_that_needs_torch_is_a_clear_error_without_it() -> None:
    code = """
import stretto
try:
    from stretto import Pipeline
except ImportError as error:
    print(isinstance(error, stretto.StrettoError), error, sep="; ")
"""
    message = "True; stretto.Pipeline needs torch, which is not installed\nhint: pip install 'stretto[train]'"
    assert output(WITHOUT_TORCH + code).startswith(message)


def test_a_command_that_needs_torch_is_a_clear_error_without_it() -> None:
    code = "from stretto.cli.main import run; sys.stderr = sys.stdout; print(run(['train', 'job.yaml']))"
    at = f"import os; os.chdir({str(ROOT / 'configs')!r})\n"
    printed = output(WITHOUT_TORCH + at + code.replace("job.yaml", "quickstart.yaml"))
    assert printed.splitlines() == [
        "error: stretto train needs torch, which is not installed",
        "hint: pip install 'stretto[train]', or 'stretto[recommender]' for recommenders",
        "2",
    ]


def test_the_error_travels_between_processes() -> None:
    original = PackageMissing("stretto train", "numpy")
    error = pickle.loads(pickle.dumps(original))
    assert isinstance(error, PackageMissing)
    assert isinstance(error, StrettoError)
    assert (error.message, error.hint) == (original.message, original.hint)


def imports(text: str) -> Iterator[tuple[str, str]]:
    """Module and name of every import from this package."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "stretto":
            yield from ((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("stretto."))


def public_code() -> dict[str, str]:
    """Examples, and the Python of pages, but for files of the package shown there."""
    code = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for at, block in enumerate(blocks):
            if not block.startswith("# src/"):
                code[f"{page}, block {at}"] = block
    return code


@pytest.mark.parametrize("name", public_code())
def test_public_code_imports_public_names_only(name: str) -> None:
    public = {"stretto": stretto.__all__, "stretto.prove": stretto.prove.__all__}
    private = [
        (module, exported)
        for module, exported in imports(public_code()[name])
        if exported not in public.get(module, ())
    ]
    assert not private


def test_exported_names_leave_a_users_own_words_alone() -> None:
    """After `from stretto import *` a program still has its own batches, rows, runs and kinds."""
    common = {
        "Batch",
        "Column",
        "Group",
        "Kind",
        "Model",
        "Part",
        "Row",
        "Run",
        "Step",
        "Style",
        "Table",
        "Vocabulary",
    }
    assert not common & set(stretto.__all__)
