"""The contracts of `ops/` hold on every backend and in every variant of the C++ kernels, with
thousands of sizes. Triton's interpreter takes a second for what a GPU does in a microsecond. So the
first tier runs one example of each contract on the interpreter and on each variant, and all of them
only if the kernels have changed since they last passed. A checkout that has never run them is taken
as it was merged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.ops.interpreter import IS_INTERPRETED
from tests.tiers import is_quick

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "ops"
FIXTURES = ("ops", "quick_ops", "cpu", "triton_ops")
KEY = "loraplex/kernels"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(KernelSweep(config), "kernel_sweep")


class KernelSweep:
    def __init__(self, config: pytest.Config) -> None:
        self._digest = digest()
        self._cache = getattr(config, "cache", None)
        known = self._cache.get(KEY, None) if self._cache else None
        self.is_due = known not in (None, self._digest)
        self._is_quick = is_quick(config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self._is_quick or self.is_due or not IS_INTERPRETED:
            return
        seen: set[tuple[Path, str, str]] = set()
        for item, backend in on_backends(items):
            contract = item.path, getattr(item, "originalname", item.name), backend
            if contract in seen:
                item.add_marker(pytest.mark.full)
            seen.add(contract)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        config = session.config
        if hasattr(config, "workeroutput") or config.option.collectonly or not self._cache:
            return
        is_whole = config.args in (["tests"], ["tests/ops"]) and not config.option.keyword
        ran_all = is_whole and exitstatus == 0 and (self.is_due or not self._is_quick)
        if ran_all or self._cache.get(KEY, None) is None:
            self._cache.set(KEY, self._digest)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._is_quick and IS_INTERPRETED:
            part = "every case, they have" if self.is_due else "one case each, they have not"
            terminalreporter.write_line(f"kernels: {part} changed")


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
