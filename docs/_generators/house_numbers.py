"""The sizes of a checkout and what its style costs a reader.

    python docs/_generators/house_numbers.py [CHECKOUT ...]     # several: one column each
    python docs/_generators/house_numbers.py --rooms            # the same by room
    python docs/_generators/house_numbers.py --list run.train   # where: fillers, long bodies, ...

Only the standard library, and only the text of the files: an old checkout needs no installation.
`tests/test_house.py` limits these numbers.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from statistics import median, quantiles

MOST_POSITIONAL = 5
MOST_ASSIGNED = 2
# names that say nothing: a value is called by what it is
FILLERS = frozenset(
    re.findall(
        r"\w+",
        "one ones known kept held made here there rest said came whole usual ours theirs mine what why how "
        "where facts words beside apart near least most seen same some such thing things found told given "
        "own asked",
    )
)
# a whole config, not a section of it
CONFIGS = frozenset({"TrainConfig", "RecommenderConfig", "AnyConfig", "JobConfig", "Config"})

Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = Mapping[str, set[str]]


class Checkout:
    """The modules of all packages below `src` as syntax trees."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = root / "src"

    @cached_property
    def lines(self) -> dict[Path, int]:
        return {path: _line_count(path) for path in self.files("src")}

    @cached_property
    def trees(self) -> dict[Path, ast.Module]:
        return {path: ast.parse(path.read_text(encoding="utf-8")) for path in self.files("src")}

    def files(self, folder: str) -> list[Path]:
        return sorted((self.root / folder).rglob("*.py"))

    def module(self, path: Path) -> str:
        return ".".join(path.relative_to(self.source).with_suffix("").parts).removesuffix(".__init__")

    def room(self, path: Path) -> str:
        """`program`, or `run.train` in the folders that are divided; other packages by their own name."""
        package, *inner = path.relative_to(self.source).with_suffix("").parts
        if package != "stretto":
            return package
        return ".".join(inner[:2] if inner[0] in ("run", "engine", "recommender") else inner[:1])

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

    def duplicate_classes(self, paths: Sequence[Path] | None = None) -> dict[str, list[Path]]:
        """Public classes of `paths`, or of all files, whose name another public class has, with the files."""
        homes = dict[str, list[Path]]()
        for path, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(path)
        chosen = self.trees.keys() if paths is None else set(paths)
        return {name: files for name, files in homes.items() if len(files) > 1 and chosen & {*files}}


def _line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _statements(child)


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Parameters, variables, attributes, functions and classes: each name with the line that binds it."""
    for node in nodes(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, Function | ast.ClassDef):
            yield node.name, node.lineno


def is_filler(name: str) -> bool:
    return name.strip("_").lower() in FILLERS


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All of a file's code, piece by piece."""
    return tuple(ast.walk(tree))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in nodes(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines from `def` to the end: declarations count."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def helpers_called_once(tree: ast.AST) -> Iterator[Function]:
    """Private functions and methods that their file mentions once: in the one call of them."""
    calls, mentions = Counter[str](), Counter[str]()
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            calls[_last_name(node.func)] += 1
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            mentions[_last_name(node)] += 1
    for function in functions(tree):
        name = function.name
        if name.startswith("_") and not name.startswith("__") and calls[name] == mentions[name] == 1:
            yield function


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def takes_config(function: Function) -> bool:
    """Whether a parameter is a whole config."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    annotations = [ast.unparse(argument.annotation) for argument in arguments if argument.annotation]
    return any(CONFIGS & {*re.findall(r"\w+", annotation)} for annotation in annotations)


def dataclasses(tree: ast.AST) -> Iterator[ast.ClassDef]:
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef):
            decorators = (ast.unparse(decorator) for decorator in node.decorator_list)
            if any(name.startswith(("dataclass", "dataclasses.dataclass")) for name in decorators):
                yield node


def positional_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in nodes(tree):
        if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL:
            yield node


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

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(components)


def numbers(root: Path) -> dict[str, str]:
    """The rows of the table of whole checkouts."""
    house = Checkout(root)
    trees = list(house.trees.values())
    sizes = list(house.lines.values())
    folders = {folder: [_line_count(p) for p in house.files(folder)] for folder in ("tests", "benchmarks")}
    all_functions = [function for tree in trees for function in functions(tree)]
    lengths = [length(function) for function in all_functions]
    names = [name for tree in trees for name, _ in bound_names(tree)]
    fillers = sum(map(is_filler, names))
    longest = max(house.lines, key=lambda path: house.lines[path])
    helpers = [helper for tree in trees for helper in helpers_called_once(tree)]
    rows = {
        "source files, lines (`src`)": (len(sizes), sum(sizes)),
        **{f"files, lines in `{name}`": (len(counts), sum(counts)) for name, counts in folders.items()},
        "median file, lines": round(median(sizes)),
        "largest file, lines": f"{max(sizes)} (`{longest.relative_to(house.source).with_suffix('')}`)",
        "files under 80 lines": sum(size < 80 for size in sizes),
        "functions": len(lengths),
        "lines of a function: 95th percentile, longest": (round(quantiles(lengths, n=20)[-1]), max(lengths)),
        "private helpers that are called once, their lines": (len(helpers), sum(map(length, helpers))),
        "dataclasses": sum(1 for tree in trees for _ in dataclasses(tree)),
        "filler names, share of bound names": f"{fillers:,}, {fillers / len(names):.2%}",
        "public class names that several classes have": len(house.duplicate_classes()),
        "functions that take a config": sum(map(takes_config, all_functions)),
        "modules with one importer": sum(n == 1 for n in house.importers.values()),
        "import circles": len(circles(house.imports)),
        "calls with more than five positional arguments": sum(1 for t in trees for _ in positional_calls(t)),
        "assignments of three or more values at once": sum(_packed(n) for t in trees for n in nodes(t)),
    }
    return {title: _cell(value) for title, value in rows.items()}


def _cell(value: str | int | tuple[int, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{number:,}" for number in value)
    return f"{value:,}" if isinstance(value, int) else value


def rooms(root: Path) -> Iterator[str]:
    """A table with a row for each room."""
    house = Checkout(root)
    importers = house.importers
    header = (
        "files lines p95 longest helpers dataclasses fillers share configs duplicates 1-importer positional"
    )
    yield f"{'room':<24}" + "".join(f"{title:>12}" for title in header.split())
    by_room = dict[str, list[Path]]()
    for path in house.trees:
        by_room.setdefault(house.room(path), []).append(path)
    for room, paths in sorted(by_room.items()):
        trees = [house.trees[path] for path in paths]
        lengths = [length(function) for tree in trees for function in functions(tree)] or [0]
        names = [name for tree in trees for name, _ in bound_names(tree)]
        fillers = sum(map(is_filler, names))
        cells = (
            len(paths),
            sum(house.lines[path] for path in paths),
            round(quantiles([*lengths, 0], n=20)[-1]),
            max(lengths),
            sum(1 for tree in trees for _ in helpers_called_once(tree)),
            sum(1 for tree in trees for _ in dataclasses(tree)),
            fillers,
            f"{fillers / max(len(names), 1):.2%}",
            sum(takes_config(function) for tree in trees for function in functions(tree)),
            len(house.duplicate_classes(paths)),
            sum(importers.get(house.module(path)) == 1 for path in paths),
            sum(1 for tree in trees for _ in positional_calls(tree)),
        )
        yield f"{room:<24}" + "".join(f"{cell:>12}" for cell in cells)


def places(root: Path, room: str) -> Iterator[str]:
    """Every filler, helper that is called once, long function, config and duplicate class name of a room."""
    house = Checkout(root)
    paths = [path for path in house.trees if f"{house.room(path)}.".startswith(f"{room}.")]
    for path in paths:
        file, tree = path.relative_to(root), house.trees[path]
        fillers = dict[str, list[str]]()
        for name, line in bound_names(tree):
            if is_filler(name):
                fillers.setdefault(name, []).append(str(line))
        for name, lines in fillers.items():
            yield f"{file}:{','.join(lines)}: filler {name}"
        for helper in helpers_called_once(tree):
            yield f"{file}:{helper.lineno}: {helper.name}, {length(helper)} lines, is called once"
        for function in functions(tree):
            if length(function) > 100:
                yield f"{file}:{function.lineno}: {function.name} has {length(function)} lines"
            if takes_config(function):
                yield f"{file}:{function.lineno}: {function.name} takes a config"
        for call in positional_calls(tree):
            yield f"{file}:{call.lineno}: {len(call.args)} positional arguments"
        if house.importers.get(house.module(path)) == 1:
            yield f"{file}: one module imports it"
    for name, files in house.duplicate_classes(paths).items():
        yield f"class {name}: {', '.join(str(file.relative_to(root)) for file in files)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[2]])
    parser.add_argument("--rooms", action="store_true", help="a row for each room")
    parser.add_argument("--list", metavar="ROOM", help="files and lines of what the table counts in a room")
    arguments = parser.parse_args()
    if arguments.rooms or arguments.list:
        root = arguments.checkouts[0]
        print("\n".join(rooms(root) if arguments.rooms else places(root, arguments.list)))
        return
    columns = [numbers(root) for root in arguments.checkouts]
    print("| | " + " | ".join(str(root) for root in arguments.checkouts) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for row in columns[0]:
        print(f"| {row} | " + " | ".join(column[row] for column in columns) + " |")


if __name__ == "__main__":
    main()
