"""The sizes of a checkout, for the table at the end of design.md.

    python docs/house_numbers.py [CHECKOUT ...]     # several: one column each

Only the standard library, and only the text of the files: an old checkout needs no installation.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles

MOST_POSITIONAL = 5
MOST_ASSIGNED = 2

Graph = Mapping[str, set[str]]


class Checkout:
    """The package's modules as syntax trees."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = root / "src" / "stretto"
        self.lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in self.files("src")}
        self.trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in self.lines}

    def files(self, folder: str) -> list[Path]:
        return sorted((self.root / folder).rglob("*.py"))

    def module(self, path: Path) -> str:
        parts = ("stretto", *path.relative_to(self.source).with_suffix("").parts)
        return ".".join(parts).removesuffix(".__init__")

    @cached_property
    def imports(self) -> Graph:
        """The modules of the package that each module imports, anywhere in its file but for types alone."""
        names = {self.module(path) for path in self.trees}
        graph = dict[str, set[str]]()
        for path, tree in self.trees.items():
            imported = set[str]()
            for node in _statements(tree):
                if isinstance(node, ast.Import):
                    imported |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    inner = {f"{node.module}.{alias.name}" for alias in node.names} & names
                    imported |= inner or {node.module}
            graph[self.module(path)] = (imported & names) - {self.module(path)}
        return graph

    @property
    def importers(self) -> dict[str, int]:
        """How many modules import each one; packages left out, as they are imported by way of their names."""
        packages = {self.module(path) for path in self.trees if path.name == "__init__.py"}
        counts = {name: 0 for name in self.imports if name not in packages}
        for targets in self.imports.values():
            for target in targets & counts.keys():
                counts[target] += 1
        return counts

    @property
    def functions(self) -> list[int]:
        """Lines of every function and method, from `def` to its end."""
        return [
            (node.end_lineno or node.lineno) - node.lineno + 1
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]

    def count(self, kind: type[ast.AST]) -> int:
        """Calls with more than five positional arguments, or assignments of three values and more at once."""
        nodes = (node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, kind))
        return sum(_positional(node) or _packed(node) for node in nodes)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _statements(child)


def _positional(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL


def _packed(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple) and len(node.value.elts) > MOST_ASSIGNED


def circles(graph: Graph) -> list[list[str]]:
    """Sets of modules that import each other, directly or by way of others (Tarjan 1972)."""
    index, low = dict[str, int](), dict[str, int]()
    stack, components = list[str](), list[list[str]]()

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            members = list[str]()
            while not members or members[-1] != node:
                members.append(stack.pop())
            if len(members) > 1:
                components.append(sorted(members))

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in index:
            visit(node)
    return sorted(components)


def numbers(root: Path) -> dict[str, str]:
    """The rows of the table that can be counted."""
    house = Checkout(root)
    sizes = list(house.lines.values())
    percentile, longest_function = quantiles(house.functions, n=20)[-1], max(house.functions)
    longest = max(house.lines, key=lambda path: house.lines[path])
    folders = {
        folder: [len(p.read_text(encoding="utf-8").splitlines()) for p in house.files(folder)]
        for folder in ("tests", "benchmarks")
    }
    return {
        "source files (`src`)": f"{len(sizes):,}",
        "source lines (`src`)": f"{sum(sizes):,}",
        **{f"files, lines in `{name}`": f"{len(n):,}, {sum(n):,}" for name, n in folders.items()},
        "median file, lines": f"{median(sizes):.0f}",
        "largest file, lines": f"{max(sizes)} (`{longest.relative_to(house.source).with_suffix('')}`)",
        "files under 80 lines": f"{sum(size < 80 for size in sizes)}",
        "functions: 95th percentile, longest, lines": f"{percentile:.0f}, {longest_function}",
        "modules with one importer": f"{sum(n == 1 for n in house.importers.values())}",
        "import circles": f"{len(circles(house.imports))}",
        "calls with more than five positional arguments": f"{house.count(ast.Call)}",
        "assignments of three or more values at once": f"{house.count(ast.Assign)}",
    }


def main(roots: list[Path]) -> None:
    columns = [numbers(root) for root in roots]
    print("| | " + " | ".join(str(root) for root in roots) + " |")
    print("|---" * (len(roots) + 1) + "|")
    for row in columns[0]:
        print(f"| {row} | " + " | ".join(column[row] for column in columns) + " |")
    for root in roots:
        for circle in circles(Checkout(root).imports):
            print(f"circle in {root}: {' '.join(circle)}", file=sys.stderr)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]] or [Path(__file__).parents[1]])
