"""`python -m tools.source_tree [CHECKOUT]`: prints sizes and imports of the product's source as a
Markdown table, with one column for CHECKOUT, if it is given, and one for this tree.

`test_architecture.py` checks import cycles and forbidden imports, and `test_ratchets.py` the lines
of the packages and the imports of the engine. The engine's reading path consists of the modules
that `Engine` and `ModelRunner` import, directly or indirectly, without model families, layers and
kernels.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import quantiles

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("ops", "memory", "telemetry", "adapters", "sandbox", "workers"),
    *("store", "web", "admin", "gateway", "loraplex", "migrations"),
)
LARGE = ("gateway", "admin", "workers", "adapters", "loraplex")
NOT_READ = ("ops", "workers.models", "workers.layers")


class SourceTree:
    """Python modules of one checkout, by dotted name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = {
            self._module_name(path): path
            for package in PACKAGES
            for path in sorted(root.glob(f"{package}/**/*.py"))
        }
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.sources.items()}
        self.imports = {name: self._imports(name) for name in self.sources}
        """Modules of the product that each module imports, including imports in functions and under
        TYPE_CHECKING."""

    def _module_name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _imports(self, module: str) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module and not node.level, f"relative import in {module}"
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    found.add(name if name in self.sources else node.module)
        return {name for name in found if name.split(".")[0] in PACKAGES and name != module}

    def num_lines(self, modules: Iterable[str]) -> int:
        return sum(self.sources[name].read_text().count("\n") for name in modules)

    def reach(self, *starts: str, without: tuple[str, ...] = ()) -> set[str]:
        """Returns the modules `starts` and all modules that they import, directly or indirectly.
        Does not enter modules in `without`."""
        found: set[str] = set()
        todo = list(starts)
        while todo:
            name = todo.pop()
            if name in self.sources and name not in found and not is_within(name, *without):
                found.add(name)
                todo += self.imports[name]
        return found

    def circles(self) -> list[list[str]]:
        """Returns the import cycles: groups of modules in which each module imports all others,
        directly or indirectly."""
        reached = {name: self.reach(*self.imports[name]) for name in self.sources}
        groups = {
            tuple(sorted(other for other in reached[name] if name in reached[other]))
            for name in self.sources
            if name in reached[name]
        }
        return sorted(map(list, groups), key=len, reverse=True)

    def nodes(self, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
        for tree in self.trees.values():
            yield from (node for node in ast.walk(tree) if isinstance(node, kind))

    def home_of(self, class_name: str) -> str:
        """Returns the name of the module that defines the class."""
        for module, tree in self.trees.items():
            if any(isinstance(n, ast.ClassDef) and n.name == class_name for n in tree.body):
                return module
        raise LookupError(class_name)

    def with_one_importer(self, package: str) -> list[str]:
        importers = Counter(name for names in self.imports.values() for name in names)
        return [name for name in self.sources if is_within(name, package) and importers[name] == 1]


def is_within(name: str, *places: str) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def spread(values: Iterable[int]) -> str:
    """Returns the median, the 90th percentile and the maximum, as text."""
    sizes = sorted(values)
    tenths = quantiles(sizes, n=10, method="inclusive")
    return f"{tenths[4]:.0f} / {tenths[8]:.0f} / {sizes[-1]}"


def num_lines_of(nodes: Iterable[ast.AST]) -> list[int]:
    return [node.end_lineno - node.lineno + 1 for node in nodes]  # pyright: ignore


def reading_path(tree: SourceTree) -> str:
    starts = [tree.home_of(name) for name in ("Engine", "ModelRunner")]
    found = tree.reach(*starts, without=NOT_READ)
    files = [name for name in found if tree.num_lines([name])]
    return f"{tree.num_lines(files):,} lines in {len(files)} files"


def files_of_folders(tree: SourceTree, package: str) -> str:
    """Returns the numbers of files and folders of a package, and the number of files of its largest
    folder. Empty files do not count."""
    folders = Counter(
        path.parent
        for path in tree.sources.values()
        if path.stat().st_size and path.is_relative_to(tree.root / package)
    )
    return f"{sum(folders.values())} in {len(folders)}, {max(folders.values())}"


def hand_written_openapi(tree: SourceTree) -> str:
    return str(tree.num_lines(name for name in tree.sources if name.endswith(".openapi")))


def circle_sizes(tree: SourceTree) -> str:
    return ", ".join(str(len(circle)) for circle in tree.circles()) or "none"


def rows() -> dict[str, Callable[[SourceTree], str]]:
    found: dict[str, Callable[[SourceTree], str]] = {"engine's reading path": reading_path}
    for package in LARGE:
        found[f"{package}: files, folders, files of the largest folder"] = (
            lambda tree, package=package: files_of_folders(tree, package)
        )
    for package in LARGE:
        found[f"{package}: files with one importer"] = lambda tree, package=package: str(
            len(tree.with_one_importer(package))
        )
    found["function lines: p50 / p90 / max"] = lambda tree: spread(
        num_lines_of(tree.nodes((ast.FunctionDef, ast.AsyncFunctionDef)))
    )
    found["class lines: p50 / p90 / max"] = lambda tree: spread(
        num_lines_of(tree.nodes(ast.ClassDef))
    )
    found["files of each import circle"] = circle_sizes
    found["lines of modules named openapi"] = hand_written_openapi
    found["lines in all"] = lambda tree: f"{tree.num_lines(tree.sources):,}"
    return found


@cache
def source_tree() -> SourceTree:
    return SourceTree(ROOT)


def main() -> None:
    trees = [*(SourceTree(Path(path).absolute()) for path in sys.argv[1:]), source_tree()]
    heads = ["before", "today"][-len(trees) :]
    print(f"| | {' | '.join(heads)} |")
    print(f"| --- |{' --- |' * len(trees)}")
    for title, measure in rows().items():
        print(f"| {title} | {' | '.join(measure(tree) for tree in trees)} |")


if __name__ == "__main__":
    main()
