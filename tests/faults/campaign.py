"""Plants faults in a copy of the sources, one at a time, and runs the test that must see each.

python tests/faults/campaign.py [WORD ...]     only faults with one of the words in their name, module or test
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import shutil
import subprocess
import symtable
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from planted import FAULTS, Fault

ROOT = Path(__file__).parents[2]
SECONDS = 240  # a fault that makes its test hang is seen too


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Whether the test of a fault failed, after how long, and the end of its output."""

    caught: bool
    seconds: float
    output: str


def source(fault: Fault) -> Path:
    """The file of the fault's module, from `src` on."""
    path = Path(*fault.module.split("."))
    return path / "__init__.py" if (ROOT / "src" / path).is_dir() else path.with_suffix(".py")


def problems(fault: Fault) -> list[str]:
    """Why the fault cannot be planted or its test cannot be run, such as a module that no longer exists."""
    reasons, path = list[str](), ROOT / "src" / source(fault)
    if not path.exists():
        return [f"there is no module {fault.module}"]
    text = path.read_text(encoding="utf-8")
    if (count := text.count(fault.old)) != 1:
        reasons.append(f"{fault.module} has {count} times, not once: {fault.old}")
    else:
        try:
            planted = ast.parse(text.replace(fault.old, fault.new))
        except SyntaxError as error:
            reasons.append(f"{fault.module} is no Python with: {fault.new} ({error})")
        else:
            if ast.dump(planted) == ast.dump(ast.parse(text)):
                reasons.append(f"{fault.module} is the same with: {fault.new}")
            if missing := undefined(text.replace(fault.old, fault.new)):
                reasons.append(f"{fault.module} has no {', '.join(sorted(missing))} for: {fault.new}")
    file, _, test = fault.test.partition("::")
    if not (ROOT / file).exists():
        return [*reasons, f"there is no {file}"]
    name = test.partition("[")[0]
    if not re.search(rf"^def {re.escape(name)}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE):
        reasons.append(f"{file} has no test {name}")
    return reasons


def undefined(text: str) -> set[str]:
    """Names that functions of a module read and that nothing defines: any test would see such a fault."""
    module = symtable.symtable(text, "module", "exec")
    known = {*module.get_identifiers(), *dir(builtins), "__file__", "__class__"}

    def reads(table: symtable.SymbolTable) -> set[str]:
        names = {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
        return names.union(*map(reads, table.get_children()))

    return reads(module) - known


def run(fault: Fault) -> Seen:
    """Plant the fault in a copy of the sources and run its test on them.

    Raises:
        RuntimeError: the test could not be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "src"
        shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        file = sources / source(fault)
        file.write_text(file.read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")
        # ranks and commands that a test starts inherit the path, so the fault is on all of them
        started, pythonpath = time.perf_counter(), os.pathsep.join([str(sources), str(ROOT / "tests")])
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider", fault.test],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": pythonpath, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Seen(caught=True, seconds=SECONDS, output=f"did not end in {SECONDS} s")
        if done.returncode not in (0, 1):  # 1: tests failed; others: pytest itself did
            raise RuntimeError(f"{fault.name}: {fault.test} could not be run:\n{done.stdout}{done.stderr}")
        seconds = time.perf_counter() - started
        return Seen(caught=done.returncode == 1, seconds=seconds, output=done.stdout[-3000:])


def main(words: list[str]) -> int:
    """Run the campaign and print a table; 1 where a fault was missed that is not known to be."""
    chosen = [
        fault
        for fault in FAULTS
        if not words or any(word in f"{fault.name} {fault.module} {fault.test}" for word in words)
    ]
    missed = 0
    print("| fault | module | test | seen | s |\n|---|---|---|---|---|")
    for fault in chosen:
        seen = run(fault)
        said = "caught" if seen.caught else ("missed, as is known" if fault.missed else "MISSED")
        missed += not seen.caught and fault.missed is None
        row = (fault.name, fault.module, fault.test, said, f"{seen.seconds:.0f}")
        print(f"| {' | '.join(row)} |", flush=True)
    known = sum(fault.missed is not None for fault in chosen)
    print(f"\n{len(chosen)} faults, {known} of them known to be missed, {missed} others missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
