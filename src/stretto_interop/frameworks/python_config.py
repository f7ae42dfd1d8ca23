"""What a Python function that builds a config returns, read from its syntax tree without running anything."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import StrettoError


@dataclass(kw_only=True)
class ConfigCall:
    """A call that is not carried out: of what, and with which values.

    Attributes:
        name: as written, "TrainingConfig" or "FullAC.Config".
        module: that the name was imported from; "" where it was not.
        constants: values of the names in capitals that the module defines.
    """

    name: str
    module: str = ""
    arguments: list[Any] = field(default_factory=list[Any])
    keywords: dict[str, Any] = field(default_factory=dict[str, Any])
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class FillIn:
    """A value that is still to be filled in."""


def read_config(text: str, source: str, *, returns: str) -> ConfigCall:
    """The call that the module's config function returns: its only one, or the last that no other of them
    uses.

    Args:
        returns: what a config function returns, as its annotation or its last line has it.

    Raises:
        StrettoError: not Python, no such function or several, or code that would have to run; tells the line.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise StrettoError(f"{source} line {error.lineno}: {error.msg}", hint="is it Python?") from None
    return _Reader(tree, source, returns).config()


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_NUMBERS = (int, float)


class _Reader:
    def __init__(self, tree: ast.Module, source: str, returns: str) -> None:
        self._source, self._returns = source, returns
        self._functions = {
            statement.name: statement for statement in tree.body if isinstance(statement, ast.FunctionDef)
        }
        self._modules: dict[str, str] = {}
        self._constants: dict[str, Any] = {}
        self._depth = 0
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom):
                path = statement.module or source.replace("\\", "/").rpartition("/")[0].replace("/", ".")
                self._modules |= {name.asname or name.name: path for name in statement.names}
        for statement in tree.body:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(statement, ast.Assign) and isinstance(target, ast.Name):
                try:
                    self._constants[target.id] = ast.literal_eval(statement.value)
                except ValueError:
                    continue  # nothing that a config can use

    def config(self) -> ConfigCall:
        configs = [statement for statement in self._functions.values() if self._is_config(statement)]
        used = {
            node.id for statement in configs for node in ast.walk(statement) if isinstance(node, ast.Name)
        }
        ends = [statement for statement in configs if statement.name not in used]
        if not ends:
            raise StrettoError(
                f"{self._source} has no function that returns {self._returns}",
                hint="is it a config of torchtitan?",
            )
        if len(ends) > 1:
            names = ", ".join(statement.name for statement in ends)
            raise StrettoError(
                f"{self._source} has {len(ends)} configs: {names}",
                hint="keep one of them in a file of its own",
            )
        value = self._run(ends[0])
        if not isinstance(value, ConfigCall) or not value.name.endswith(self._returns):
            raise self._cannot(ends[0], f"{ends[0].name} returns no {self._returns}")
        return value

    def _is_config(self, statement: ast.FunctionDef) -> bool:
        if statement.returns is not None:
            return ast.unparse(statement.returns).strip("'\"") == self._returns
        last = statement.body[-1]
        return isinstance(last, ast.Return) and self._returns in ast.unparse(last)

    def _cannot(self, node: ast.AST, problem: str) -> StrettoError:
        line = getattr(node, "lineno", 0)
        return StrettoError(
            f"{self._source} line {line}: {problem}, which cannot be read without running it",
            hint="write literal values and calls of config classes",
        )

    def _run(self, function: ast.FunctionDef) -> Any:
        """What a function without arguments returns."""
        self._depth += 1
        if self._depth > 20:
            raise self._cannot(function, f"{function.name} calls itself")
        names: dict[str, Any] = {}
        for statement in function.body:
            if isinstance(statement, ast.Return):
                self._depth -= 1
                return None if statement.value is None else self._value(statement.value, names)
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], self._value(statement.value, names), names)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign(statement.target, self._value(statement.value, names), names)
            elif not isinstance(statement, ast.Expr | ast.Assert | ast.ImportFrom | ast.Import | ast.Pass):
                raise self._cannot(statement, f"{function.name} has a {type(statement).__name__.lower()}")
            elif isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
                raise self._cannot(statement, f"{function.name} does something")
        raise self._cannot(function, f"{function.name} returns nothing")

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
            return
        if isinstance(target, ast.Attribute):
            inside = self._value(target.value, names)
            if isinstance(inside, ConfigCall):
                inside.keywords[target.attr] = value
                return
        raise self._cannot(target, f"an assignment to {ast.unparse(target)}")

    def _value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in names:
                return names[node.id]
            if node.id in self._constants:
                return self._constants[node.id]
            return ConfigCall(
                name=node.id, module=self._modules.get(node.id, "")
            )  # a function or class, handed on
        if isinstance(node, ast.List | ast.Tuple):
            items = [self._value(statement, names) for statement in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        if isinstance(node, ast.Dict):
            if None in node.keys:
                raise self._cannot(node, "a dict with ** in it")
            return {
                self._value(key, names): self._value(value, names)
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None  # for types
            }
        if isinstance(node, ast.Attribute):
            inside = self._value(node.value, names)
            if isinstance(inside, ConfigCall) and node.attr in inside.keywords:
                return inside.keywords[node.attr]
            return ConfigCall(name=ast.unparse(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, names)
            if isinstance(value, _NUMBERS):
                return -value
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            left, right = self._value(node.left, names), self._value(node.right, names)
            if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
                return _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.Call):
            return self._call(node, names)
        return ConfigCall(name=ast.unparse(node))  # unknown, and refused where it matters

    def _call(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        name = ast.unparse(node.func)
        if name == "fill_in":
            return FillIn()
        if name == "schedule_file" and "SCHEDULE" in self._constants:
            return self._constants["SCHEDULE"]
        if any(statement.arg is None for statement in node.keywords):
            raise self._cannot(node, f"{name} with ** in it")
        arguments = [self._value(statement, names) for statement in node.args]
        keywords = {
            statement.arg: self._value(statement.value, names)
            for statement in node.keywords
            if statement.arg is not None
        }
        if name == "float" and arguments == ["inf"]:
            return float("inf")
        function = self._functions.get(name)
        if function is not None and self._is_config(function) and not arguments and not keywords:
            return self._run(function)
        module = self._modules.get(name.partition(".")[0], "")
        return ConfigCall(
            name=name, module=module, arguments=arguments, keywords=keywords, constants=self._constants
        )
