"""The commands of every page, typed where only that is installed which the page installs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from environments import PROJECT, Environment, distributions, installed, installs, linked, required
from pages import _IN_TURN, ROOT, Command, commands, scripts, sections, shortened, text_of
from stretto.cli.main import COMMANDS
from stretto.errors import PackageMissing

pytestmark = pytest.mark.apart

README = sections("README.md")
BASE = installs(README["Install"])
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))

# ---------------------------------------------------------------- without a registry, in seconds


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cloned(tmp_path_factory.mktemp("clone"))


def cloned(folder: Path) -> Path:
    """What of a clone the commands read, a text, and the files that README has the reader write."""
    for shipped in ("configs", "examples", "benchmarks"):
        shutil.copytree(ROOT / shipped, folder / shipped)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "text").mkdir()
    for name in ("argparse.py", "typing.py"):
        shutil.copy(Path(os.__file__).with_name(name), folder / "text" / name)
    for name, code in scripts().items():
        (folder / name).write_text(code, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with what README's first section installs."""
    return linked(tmp_path_factory.mktemp("bare") / "venv", BASE)


def test_what_readme_installs() -> None:
    assert BASE == [".[train]"]
    names = set(distributions(BASE))
    assert {"torch", "tokenizers", "typer"} <= names
    assert installs("`pip install 'stretto[bill]'`, `pip\ninstall -e '.[a,b]'`\npip install c d>=2\n") == [
        *(".[bill]", ".[a,b]"),
        *("c", "d>=2"),
    ]
    assert not names & {"tensorboard", "pyarrow", "transformers", "pytest", "hypothesis", "numba"}


def test_extras() -> None:
    """`all` installs every part for users, but the clients of trackers that need a service or much else, and
    `train` what an error about a missing package names.
    """
    extras = {*PROJECT["optional-dependencies"]} - {"all", "test", "lint", "bill", "release", "docs"}
    extras -= {"wandb", "mlflow", "trackio", "opentelemetry"}
    assert {str(requirement) for requirement in required(extras)} == {
        str(requirement) for requirement in required(["all"])
    }
    core = {requirement.name for requirement in required([])}
    assert {requirement.name for requirement in required(["train"])} - core == set(PackageMissing.PACKAGES)


def test_what_is_not_installed_is_not_there(bare: Environment, clone: Path) -> None:
    code = "from importlib.util import find_spec as f; print(*(bool(f(n)) for n in ('torch', 'numba')))"
    assert bare.type(["python", "-c", code], clone) == "True False\n"


def test_the_first_training_command_of_readme_works(bare: Environment, clone: Path) -> None:
    assert "stretto train configs/quickstart.yaml" in README["Run it"]
    argv = shortened(["stretto", "train", "configs/quickstart.yaml"])
    assert "saved runs/quickstart/checkpoints" in bare.type(argv, clone)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with what the package without extras installs."""
    return linked(tmp_path_factory.mktemp("light") / "venv", ["."])


NO_TORCH = ("config", "layout", "schedule", "plan", "predict", "partition", "catalogue", "launch")


def test_commands_that_only_compute_work_without_torch(light: Environment, clone: Path) -> None:
    """Those of the first pages that take no ranks, every shipped config checked, and the help of every
    command: in one process.
    """
    pages = ("README.md", "docs/do/training.md", "docs/do/cluster.md", "docs/do/schedules.md")
    lines = [command.argv for page in pages for command in commands(text_of(page)) if not refused(command)]
    lines = [argv for argv in lines if argv[:1] == ["stretto"] and argv[1] in NO_TORCH]
    lines = [argv[: argv.index(">")] if ">" in argv else argv for argv in lines]
    lines = [argv for argv in lines if "auto" not in argv]  # searches for seconds
    assert len(lines) > 10
    (clone / "tokenizer.json").touch()  # which configs of published models take from the reader
    lines += [
        ["stretto", "config", f"configs/{path.name}", "data.source=text/"]
        for path in sorted((clone / "configs").glob("*.yaml"))
    ]
    lines += [["stretto", name, "--help"] for name in COMMANDS]
    light.type(["python", "-c", _IN_TURN, json.dumps(lines)], clone)


NEEDS_TRAIN = (
    *("train quickstart", "train dlrm", "verify quickstart", "verify dlrm", "dryrun quickstart"),
    *("prove my_proof.py:check", "compare quickstart layout.dp=1,2", "evaluate runs/mine", "calibrate"),
    *("score runs/clicks log", "generate runs/mine --prompt a", "checkpoint import text --out imported"),
    *("data build text --out tokens", "data info text", "data synth-clicks --out log"),
    *("data clicks log --out clicks", "config quickstart data.source=foo://x"),
    "split examples/split_layers.py:alexnet --cluster a100:2",
    "partition examples/uneven_layers.py:model --ranks 2 --microbatches 4",
)
ENDS = """
import json, sys
import stretto
from stretto.cli.main import run
sys.stderr = sys.stdout
for words in json.loads(sys.argv[1]):
    print("ended with", run(words), *words)
for name in stretto.__all__:
    try:
        getattr(stretto, name)
    except stretto.StrettoError as error:
        print(error)
        print("name", name, isinstance(error, ImportError))
"""


def test_what_needs_torch_ends_with_what_to_install(light: Environment, clone: Path) -> None:
    argvs = [line.split() for line in NEEDS_TRAIN]
    before = sorted(clone.iterdir())
    printed = light.type(["python", "-c", ENDS, json.dumps(argvs)], clone)
    assert sorted(clone.iterdir()) == before
    hint = r"error: .* needs \w+, which is not installed\nhint: pip install 'stretto\[train\]', or .*\n"
    for line in NEEDS_TRAIN:
        assert re.search(f"{hint}ended with 2 {re.escape(line)}\n", printed), printed
    names = re.findall(r"^name (\w+) True$", printed, re.MULTILINE)
    assert {"Pipeline", "Recommender", "parallelize", "prove"} <= set(names)
    assert not set(names) & {"Layout", "Program", "schedule", "simulate", "partition", "load_config"}


def refused(command: Command) -> bool:
    """Whether the page shows that it is an error."""
    return any(line.startswith("error: ") for line in command.shown)


def exit_code(command: Command) -> int:
    """The exit code that follows from what the page shows."""
    negative = ("DIFFERS from one process", "who waits for whom")
    return 2 if refused(command) else int(any(line.endswith(negative) for line in command.shown))


# ---------------------------------------------------------------- installed by pip, command by command

Reason = str
# beginnings of commands that are not typed, by page
NOT_TYPED: dict[str, dict[str, Reason]] = {
    "README.md": {"make train": "typed by itself below, in a copy of the repository"},
    "docs/do/cluster.md": {"torchrun --nnodes 2": "takes two machines"},
    "docs/index.md": dict.fromkeys(("make train", ".venv/bin/stretto"), "README has both"),
    "CONTRIBUTING.md": {
        "make": "installs into an environment of its own",
        ".ci/run": "is `make lint` and `make test` of a clean clone",
    },
    "docs/do/extending.md": dict.fromkeys(
        ("stretto", "python -c"), "reads changes of the package: tests/test_contributing.py makes them"
    ),
    "benchmarks/README.md": {"python benchmarks/gpu/campaign.py --": "takes a GPU, or the results of one"},
    "docs/evidence/accelerators.md": {
        "stretto train my.yaml": "takes a GPU",
        "stretto": "compiles for minutes: tests/engine/test_compiler.py",
    },
    "docs/evidence/gpu-campaign.md": {"python": "takes a GPU"},
    "docs/evidence/gpu.md": {
        "stretto dryrun": "takes torch's CUDA build: tests/cuda/test_simulated_driver.py"
    },
    "docs/do/click-logs.md": {
        "stretto data clicks day_0.gz": "takes Criteo's files",
        "stretto data clicks logs/": "takes files of the reader's",
        "stretto data clicks train.txt": "takes files of the reader's",
        "stretto data info clicks": "reads what these make",
    },
    "docs/do/exercises.md": {
        "stretto learn ddp learn/ddp.py": "grades what the reader writes: tests/learn/test_exercises.py"
    },
    "docs/do/torchrec.md": {
        "stretto checkpoint export": "takes a trained run: tests/interop/test_torchrec_export.py has one"
    },
    "docs/do/megatron.md": dict.fromkeys(
        (
            *("stretto migrate", "stretto config gpt.yaml", "stretto data", "stretto verify"),
            *("stretto train", "stretto predict gpt.yaml", "stretto checkpoint"),
        ),
        "tests/test_migrating.py makes the files that these take over",
    ),
    "docs/do/torchtitan.md": {
        "stretto checkpoint": "takes a checkpoint of torchtitan's: tests/interop/dcp writes some",
        "stretto train runs/llama": "the same",
        "torchrun": "takes torchtitan and 8 GPUs",
    },
    "docs/do/deepspeed.md": {
        "stretto predict --from": "takes a file of the reader's",
        "stretto checkpoint import": "takes a model of the reader's",
        "stretto train runs/mine": "the same",
    },
    "docs/reference/other-frameworks.md": {
        "stretto predict --from": "takes a file of the reader's",
        "stretto checkpoint": "takes a checkpoint of another framework's",
        "torchrun": "takes torchtitan and 8 GPUs",
    },
    "docs/do/models.md": {
        "stretto plan --model Llama-3.1-8B/config.json": "takes a model's config of the reader's"
    },
    "docs/do/hanging.md": {"stretto diagnose": "takes dumps of a hung job: tests/run/diagnose make some"},
    "docs/do/long-runs.md": {"torchrun --standalone --nproc-per-node 4": "takes a config of the reader's"},
    "docs/do/planning.md": {"stretto predict --table": "takes a table of the reader's"},
    "docs/evidence/planning-evidence.md": {
        "stretto split mine.py": "takes a file of the reader's",
    },
    "docs/reference/program-format.md": {
        "stretto verify configs/quickstart.yaml layout.pp=4": "on four ranks: tests/test_readme.py has two"
    },
    "docs/evidence/reliability.md": {
        "stretto diagnose": "takes dumps of a hung job: tests/run/diagnose make some",
        "torchrun --standalone --nproc-per-node 4": "takes a config of the reader's",
        "pytest": "is in what `.[test]` installs",
    },
    "docs/evidence/proof.md": {
        "stretto verify configs/quickstart.yaml --layouts all --ranks 4": "README has it with two ranks"
    },
}


def not_typed(page: str, command: Command) -> Reason | None:
    reasons = NOT_TYPED.get(page, {})
    return next((why for begins, why in reasons.items() if command.line.startswith(begins)), None)


def test_what_is_not_typed_is_on_its_page() -> None:
    assert set(NOT_TYPED) <= set(PAGES)
    for page, reasons in NOT_TYPED.items():
        lines = [command.line for command in commands(text_of(page))]
        unused = [begins for begins in reasons if not any(line.startswith(begins) for line in lines)]
        assert not unused, f"{page} has no command that begins so"


def typed(page: str) -> list[tuple[str, list[Command]]]:
    """The sections of a page that install or type something, each with the commands that are typed."""
    parts = [(text, list(commands(text))) for text in sections(page).values()]
    parts = [
        (text, [command for command in found if not_typed(page, command) is None]) for text, found in parts
    ]
    return [(text, found) for text, found in parts if found or installs(text)]


TYPED = [page for page in PAGES if any(found for _, found in typed(page))]


@pytest.fixture(scope="session")
def by_pip(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Environment]:
    """Environments by what is installed into them, each made once."""
    environments = dict[tuple[str, ...], Environment]()

    def environment(requirements: list[str]) -> Environment:
        key = tuple(dict.fromkeys(requirements))
        if key not in environments:
            environments[key] = installed(tmp_path_factory.mktemp("pip") / "venv", key, ROOT)
        return environments[key]

    return environment


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", TYPED)
def test_the_commands_of_a_page_work_where_only_that_is_installed_which_it_installs(
    page: str, tmp_path: Path, by_pip: Callable[[list[str]], Environment]
) -> None:
    needed, clone = list(BASE), cloned(tmp_path)
    for text, found in typed(page):
        needed += installs(text)
        environment = by_pip(needed)
        for command in found:
            argv = command.argv if refused(command) else shortened(command.argv)
            if "pip" in argv:
                continue
            argv = ["sh", "-c", command.line] if ">" in argv else argv
            environment.type(argv, clone, code=exit_code(command), timeout=1200)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_command_of_readme_works_in_a_clone(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0")[:-1]:
        path = ROOT / name  # configs is a link to a folder
        if name.partition("/")[0] not in ("tests", "docs", "benchmarks") and (
            path.is_file() or path.is_symlink()
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / name, follow_symlinks=False)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))
    }
    done = subprocess.run(
        ["make", "train", "ARGS=train.steps=2"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    assert "saved runs/quickstart/checkpoints/step-00000002" in done.stdout


def test_every_extra_that_a_message_or_page_names_is_there() -> None:
    named = set[str]()
    for path in [*(ROOT / page for page in PAGES), *(ROOT / "src").rglob("*.py")]:
        for line in installs_named(path.read_text(encoding="utf-8")):
            named |= set(line.split(","))
    assert (
        {"tensorboard", "parquet", "png", "train", "recommender"}
        <= named
        <= set(PROJECT["optional-dependencies"])
    )


def installs_named(text: str) -> list[str]:
    """The extras of `stretto[...]` and `.[...]` in a text."""
    return re.findall(r"(?:pip\s+install\s+(?:-e\s+)?|or )'(?:stretto|\.)\[([a-z0-9,]+)\]'", text)
