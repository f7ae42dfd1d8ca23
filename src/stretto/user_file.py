"""Functions in users' Python files, named FILE.py:NAME: found without running the file, loaded once."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from stretto.errors import PackageMissing, StrettoError, nearest, nearest_file, read_text


@dataclass(frozen=True)
class UserFunction:
    """A function, or anything else that can be called, in a Python file of the user's.

    It is a path and a name, so a process that gets one (a rank, say) loads the file itself.

    Attributes:
        path: of the file, absolute.
    """

    path: Path
    name: str

    def is_class(self) -> bool:
        """True if the file defines a class of the name, or gets the name from elsewhere."""
        tree = ast.parse(read_text(self.path), str(self.path))
        return not any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == self.name
            for node in tree.body
        )

    def has_method(self, method: str) -> bool:
        """True if the file defines a class of the name with this method."""
        tree = ast.parse(read_text(self.path), str(self.path))
        return any(
            isinstance(node, ast.ClassDef)
            and node.name == self.name
            and any(isinstance(each, ast.FunctionDef) and each.name == method for each in node.body)
            for node in tree.body
        )

    def load(self) -> Callable[..., Any]:
        """Run the file, unless this process has loaded it, and return the function.

        Raises:
            StrettoError: the file raises, or nothing of that name can be called; with the user's line.
        """
        try:
            defined = vars(load_module(self.path))
        except (Exception, SystemExit) as error:
            raise self.failure(error) from error
        if self.name not in defined:
            raise _undefined(self.path, self.name, defined)
        function = defined[self.name]
        if not callable(function):
            raise StrettoError(
                f"{self} is {type(function).__name__}, not a function", hint="name one that can be called"
            )
        return function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function.

        Raises:
            StrettoError: it raises, with the user's line; or as `load`.
        """
        function = self.load()
        try:
            return function(*arguments, **options)
        except (Exception, SystemExit) as error:
            raise self.failure(error) from error

    def __str__(self) -> str:
        return f"{self.path.name}:{self.name}"

    def failure(self, error: BaseException) -> StrettoError:
        """Return an exception of the user's code with the last line of the file that it passed through."""
        frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename == str(self.path)]
        place = f"{self.path.name}, line {frames[-1].lineno}" if frames else str(self)
        hint = f"the line is: {frames[-1].line}" if frames else f"does python {self.path} run?"
        if isinstance(error, StrettoError):
            return StrettoError(f"{place}: {error.message}", hint=error.hint or hint)
        missing = PackageMissing.of(error, place)
        return missing or StrettoError(f"{place}: {type(error).__name__}: {error}", hint=hint)


def is_function_name(text: str) -> bool:
    """True if the text names a function in a file, as FILE.py:NAME."""
    return ".py:" in text


def path_of(name: str) -> Path:
    """Return the path in FILE.py:NAME, or the name of any other file as a path."""
    file, python, _ = name.partition(".py:")
    return Path(f"{file}.py" if python else name).expanduser()


def find_function(target: str, example: str, arguments: Sequence[str] | None = ()) -> UserFunction:
    """Find a function by FILE.py:NAME, without running the file.

    Args:
        target: FILE is relative to the working directory.
        example: a correct use, for the hint.
        arguments: names of the positional arguments that the function is called with; None: unknown.

    Raises:
        StrettoError: there is no such file, it is not Python, or nothing of that name can be called in it
            with these arguments.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        raise StrettoError(
            f"{target!r} does not name a function in a file", hint=f"write FILE.py:FUNCTION, as in {example}"
        )
    path = Path(file).expanduser()
    if not path.exists() and path.parent.is_dir():
        similar = nearest_file(path.name, (each.name for each in path.parent.glob("*.py")))
        raise StrettoError(
            f"there is no file {path}",
            hint=f"did you mean {path.with_name(similar)}?" if similar else "check the file's name",
        )
    try:
        tree = ast.parse(read_text(path), str(path))
    except SyntaxError as error:
        raise StrettoError(f"{path}, line {error.lineno}: {error.msg}", hint="a Python file") from None
    statements = {defined: node for node in tree.body for defined in _defined(node)}
    if name not in statements and "*" not in statements:  # of `from module import *`
        raise _undefined(path, name, statements)
    if arguments is not None and isinstance(node := statements.get(name), ast.FunctionDef):
        accepted = node.args
        maximum = len(accepted.posonlyargs) + len(accepted.args)
        minimum = maximum - len(accepted.defaults)
        fits = minimum <= len(arguments) and (len(arguments) <= maximum or accepted.vararg)
        if not fits or None in accepted.kw_defaults:
            raise StrettoError(
                f"{path}:{name} takes other arguments than ({', '.join(arguments) or 'none'})",
                hint="give the others defaults, or write a function that calls it",
            )
    return UserFunction(path.resolve(), name)


def _undefined(path: Path, name: str, defined: Iterable[str]) -> StrettoError:
    similar = nearest(name, defined)
    return StrettoError(
        f"{path} defines no {name}",
        hint=f"did you mean {similar!r}?" if similar else "it must be defined at the top level of the file",
    )


def _defined(node: ast.stmt) -> list[str]:
    """Names that a statement at the top level of a file defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    inner = (
        name
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.stmt)
        for name in _defined(child)
    )
    return [*(name.id for name in stored), *inner]


def load_module(path: Path) -> ModuleType:
    """Import a Python file with its folder on the path, as for a script; once per process."""
    path = path.resolve()
    name = path.stem
    for name in (path.stem, str(path)):  # the second if the first is another module's
        loaded = sys.modules.get(name)
        if getattr(loaded, "__file__", None) == str(path):
            assert loaded is not None
            return loaded
        if loaded is None and name not in sys.stdlib_module_names:
            break
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
