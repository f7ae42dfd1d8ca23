"""Faults that tests and proofs must see, one YAML file for each room of the sources.

    - name: gradients are not summed over replicas      # what is wrong
      module: engine.parallel.data.reduction            # where it is planted
      old: yield start_sum(x, groups.levels[3])         # text that stands there once
      new: yield start_sum(x.clone(), groups.levels[3])
      verify: {dp: 2}                                   # a line of `stretto verify JOB --layouts FILE`, or
      test: engine/optim/test_norm.py::test_norm        # the test that must fail, all its cases as one

`job` names what is verified (see `jobs.py`), `overrides` its changed fields.
"""

from __future__ import annotations

import builtins
import re
import symtable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "planted"
_SAFE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, if it was built: every worker reads all faults


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One wrong piece of code.

    Attributes:
        room: the file that lists it.
        name: what is wrong with it.
        module: where it is planted, without `stretto.`.
        old, new: the text that it replaces, which stands there once, and its replacement.
        test: the test that must fail, from `tests` on; None: `verify` must say no.
        verify: a line of a file of layouts or placements.
        job: what is verified.
        overrides: fields of the job's config.
        missed: why nothing sees it; None: it is seen.
    """

    room: str
    name: str
    module: str
    old: str
    new: str
    test: str | None = None
    verify: dict[str, Any] | None = None
    job: str = "gpt"
    overrides: tuple[str, ...] = ()
    missed: str | None = None

    @cached_property
    def source(self) -> Path:
        """The file of the module, from `src` on."""
        parts = self.module.split(".")
        path = Path(*parts) if parts[0] == "stretto_interop" else Path("stretto", *parts)
        return path / "__init__.py" if (ROOT / "src" / path).is_dir() else path.with_suffix(".py")

    @property
    def seen_by(self) -> str:
        """The test's name, or what is verified."""
        if self.verify is None:
            return str(self.test).rpartition("/")[2]
        line = ", ".join(f"{key}: {value}" for key, value in self.verify.items())
        return " ".join(["verify", self.job, f"{{{line}}}", *self.overrides])

    def planted(self, text: str) -> str:
        """The module's text with the fault."""
        return text.replace(self.old, self.new)


def read_faults() -> list[Fault]:
    """All faults, in the order of their files' names."""
    return [
        Fault(room=path.stem, **{**entry, "overrides": tuple(entry.get("overrides", ()))})
        for path in sorted(FOLDER.glob("*.yaml"))
        for entry in yaml.load(path.read_text(encoding="utf-8"), Loader=_SAFE)
    ]


FAULTS = read_faults()


def misquotations(fault: Fault) -> list[str]:
    """What is wrong with the quoted text and the test's name, read from the files alone."""
    path = ROOT / "src" / fault.source
    if not path.exists():
        return [f"{fault.name}: there is no module {fault.module}"]
    reasons = _without_test(fault.test)
    if (count := path.read_text(encoding="utf-8").count(fault.old)) != 1:
        reasons.append(f"{fault.name}: {fault.module} has {count} times, not once: {fault.old}")
    return reasons


def problems(fault: Fault) -> list[str]:
    """Why the fault cannot be planted or its test cannot be run, such as a module that no longer exists."""
    reasons, path = misquotations(fault), ROOT / "src" / fault.source
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(fault.old) == 1:
        try:
            planted = _compiled(fault.planted(text))
        except SyntaxError as error:
            reasons.append(f"{fault.module} is no Python with: {fault.new} ({error})")
        else:
            if planted == _compiled(text):
                reasons.append(f"{fault.module} is the same with: {fault.new}")
            if missing := _undefined(fault.planted(text)):
                reasons.append(f"{fault.module} has no {', '.join(sorted(missing))} for: {fault.new}")
    if (fault.test is None) == (fault.verify is None):
        reasons.append(f"{fault.name}: a test or a line to verify, one of them")
    return reasons


@cache
def _compiled(text: str) -> CodeType:
    """The module's code without its lines' numbers; compiling takes a fifth of what `ast.dump` does."""
    return _without_lines(compile(text, "<planted>", "exec"))


def _without_lines(code: CodeType) -> CodeType:
    constants = tuple(_without_lines(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=constants, co_firstlineno=1, co_linetable=b"")


def _without_test(test: str | None) -> list[str]:
    if test is None:
        return []
    file, _, name = test.partition("::")
    path = ROOT / "tests" / file
    if not path.exists():
        return [f"there is no tests/{file}"]
    name = name.partition("[")[0]
    if not re.search(rf"^def {re.escape(name)}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
        return [f"tests/{file} has no test {name}"]
    return []


def _undefined(text: str) -> set[str]:
    """Names that functions of a module read and that nothing defines: any test would see such a fault."""
    module = symtable.symtable(text, "module", "exec")
    defined = {*module.get_identifiers(), *dir(builtins), "__file__", "__class__"}

    def reads(table: symtable.SymbolTable) -> set[str]:
        names = {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
        return names.union(*map(reads, table.get_children()))

    return reads(module) - defined
