"""The contracts of `ops/` hold on every backend and in every variant of the C++ kernels, with
thousands of sizes. Triton's interpreter takes a second for what a GPU does in a microsecond. So the
first tier runs one case of each contract on the interpreter and on each variant, and all of them
only if the kernels have changed since a run of this checkout. The rest runs all of them unless they
have passed in this form in this checkout, so that a new checkout runs them once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.ops.interpreter import IS_INTERPRETED
from tests.tiers import num_examples

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "ops"
FIXTURES = ("ops", "quick_ops", "cpu", "triton_ops")
SEEN, PASSED = "loraplex/seen_kernels", "loraplex/passed_kernels"
"""Digests in pytest's cache: of the kernels that last ran, and of those that passed every case."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(KernelSweep(config), "kernel_sweep")


class KernelSweep:
    def __init__(self, config: pytest.Config) -> None:
        self._digest = digest()
        self._cache = getattr(config, "cache", None)
        self._tier = config.getoption("tier")
        seen, passed = (self._cache and self._cache.get(key, None) for key in (SEEN, PASSED))
        self._is_new = seen is None
        self.is_due = {
            "quick": seen not in (None, self._digest),
            "rest": passed != self._digest,
            "all": True,
        }[self._tier]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Marks all cases of a contract but the first, so that the first tier leaves them out, or
        so that the rest runs them, and there properties, too."""
        if not IS_INTERPRETED or self.is_due is not (self._tier == "rest"):
            return
        seen: set[tuple[Path, str, str]] = set()
        for item, backend in on_backends(items):
            contract = item.path, getattr(item, "originalname", item.name), backend
            # The first tier runs few examples of a property (`tests/ops/conftest.py`).
            if contract in seen or (self._tier == "rest" and num_examples(item)):
                item.add_marker(pytest.mark.full)
            seen.add(contract)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        config = session.config
        if hasattr(config, "workeroutput") or config.option.collectonly or not self._cache:
            return
        if self._cache.get(SEEN, None) is None:
            self._cache.set(SEEN, self._digest)
        is_whole = config.args in (["tests"], ["tests/ops"]) and not config.option.keyword
        if is_whole and exitstatus == 0 and self.is_due:
            self._cache.set(SEEN, self._digest)
            self._cache.set(PASSED, self._digest)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if IS_INTERPRETED and self._tier != "all":
            terminalreporter.write_line(f"kernels: {self._told}")

    @property
    def _told(self) -> str:
        if self._tier == "rest":
            return "every other case" if self.is_due else "no other case, all have passed"
        if self.is_due:
            return "every case, they have changed"
        return f"one case each, {'in a new checkout' if self._is_new else 'they have not changed'}"


def on_backends(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, str]]:
    """Yields the tests of `tests/ops` that run on a backend other than the reference, with its
    name."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        found = [params[name] for name in FIXTURES if name in params]
        if item.path.is_relative_to(FOLDER) and found and found != ["reference"]:
            yield item, found[0]


def digest() -> str:
    """Returns the digest of the kernels, of their tests and of Triton's version."""
    found = hashlib.sha256(version("triton").encode())
    for folder in (ROOT / "ops", FOLDER):
        for path in sorted(folder.rglob("*.*")):
            if path.suffix in (".py", ".cpp", ".h"):
                found.update(path.read_bytes())
    return found.hexdigest()
