"""`python -m tools.mutants SEED [COUNT [FOLDER ...]]`: shows which of COUNT mutants the tests kill.

Cosmic Ray makes the mutants, the same number in each folder (default: each of `PARTS`): a random
line is chosen, then a random mutation of that line. Each mutant is tested in a copy of the last
commit with the tests of its folder, first the quick tier, then the rest. The output has one line
for each mutant. `python -m tools.mutants --again FILE` tries the mutants of such an output again.
Cosmic Ray is not a dependency of this project:

    pip install --target DIR cosmic-ray
    PYTHONPATH=$PWD:DIR python -m tools.mutants 1
"""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast_from_path  # pyright: ignore[reportMissingImports]
from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
from cosmic_ray.plugins import get_operator, operator_names  # pyright: ignore[reportMissingImports]

from tools.source_tree import ROOT

PARTS = {
    "workers/scheduling": "tests/workers/scheduling",
    "workers/policies": "tests/workers/scheduling",
    "adapters/pool": "tests/adapters/pool",
    "gateway/limits": "tests/gateway/limits",
    "gateway/metering": "tests/gateway/metering",
    "gateway/dialects": "tests/gateway/dialects",
    "gateway/dispatch": "tests/gateway/dispatch",
    "gateway/http": "tests/gateway/http",
    "web": "tests/web",
    "admin/uploads": "tests/admin/uploads",
    "admin/adapters": "tests/admin/adapters",
    "admin/keys": "tests/admin/keys",
    "admin/quotas": "tests/admin/quotas",
    "workers/process": "tests/workers/process",
    "workers/wire": "tests/workers/wire",
}
"""Folder of the tests, by folder of the product."""
WITHOUT_EFFECT = "ReplaceBinaryOperator_BitOr_"
"""Prefix of mutations of `|`. They are skipped, because `|` occurs mostly in annotations, which are
not evaluated."""


FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Mutant(NamedTuple):
    file: Path
    line: int
    operator: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator} {self.occurrence}"

    @classmethod
    def parse(cls, line: str) -> Mutant:
        """Reads a line of the output."""
        place, operator, occurrence, *_ = line.split()
        file, _, number = place.partition(":")
        return cls(Path(file), int(number), operator, int(occurrence))


def drawn(rng: random.Random, part: str, count: int) -> list[Mutant]:
    """Returns `count` random mutants of a folder, each of a different line."""
    lines: dict[tuple[Path, int], list[Mutant]] = defaultdict(list)
    for path in sorted((ROOT / part).glob("*.py")):
        nodes = list(ast_nodes(get_ast_from_path(path)))
        file = path.relative_to(ROOT)
        for name in operator_names():
            if WITHOUT_EFFECT in name or get_operator(name).arguments():
                continue
            found = [at for node in nodes for at in get_operator(name)().mutation_positions(node)]
            for occurrence, ((line, _), _) in enumerate(found):
                lines[file, line].append(Mutant(file, line, name, occurrence))
    return [rng.choice(lines[place]) for place in rng.sample(sorted(lines), count)]


def first_failure(copy: Path, tier: str, folder: str) -> str | None:
    """Returns the test that fails first, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tier", tier, folder]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return next(iter(FAILED.findall(done.stdout)), done.stdout[-200:])


def judge(copy: Path, folder: str) -> str:
    """Returns the tier and the first test that fails in the mutated copy, or SURVIVED if all tests
    pass."""
    for tier in ("quick", "rest"):
        if (failure := first_failure(copy, tier, folder)) is not None:
            return f"{tier} {failure}"
    return "SURVIVED"


def tests_of(mutant: Mutant) -> str:
    return next(tests for part, tests in PARTS.items() if mutant.file.is_relative_to(part))


def chosen(seed: str, count: str = "28", *parts: str) -> list[Mutant]:
    """Returns the mutants that the arguments of the command name."""
    if seed == "--again":
        return [Mutant.parse(line) for line in Path(count).read_text().splitlines()]
    rng = random.Random(int(seed))
    names = parts or tuple(PARTS)
    return [mutant for part in names for mutant in drawn(rng, part, int(count) // len(names))]


def main() -> None:
    mutants = chosen(*sys.argv[1:])
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory(prefix="loraplex-mutants-") as folder:
        copy = Path(folder)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(copy, filter="data")
        for mutant in mutants:
            path = copy / mutant.file
            code = path.read_text()
            path.write_text(mutate_code(code, get_operator(mutant.operator)(), mutant.occurrence))
            print(mutant, judge(copy, tests_of(mutant)), flush=True)
            path.write_text(code)


if __name__ == "__main__":
    main()
