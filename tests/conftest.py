"""What happens before any test module is imported."""

import gc
import os
import sys
import tempfile
from collections.abc import Generator

import hypothesis
import pytest

# A busy machine is no defect of an example.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# The suite starts hundreds of processes: without bytecode each would compile all that it imports,
# which for torch, transformers and peft takes longer than to import them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    # Beside others each process computes with one thread: a team that waits for cores waits long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Readline, which pytest imports, gives its processes the size of a terminal that is none.
for size in ("COLUMNS", "LINES"):
    os.environ.pop(size, None)

# Libraries import Triton too, and whether its own functions are interpreted is decided then.
import tests.ops.interpreter  # noqa: E402, F401

# Servers of tests are not found by commands of the account that runs them, nor its own by tests.
RUNTIME = tempfile.TemporaryDirectory(prefix="loraplex-tests-")
os.environ["XDG_RUNTIME_DIR"] = RUNTIME.name

# Each HTTP client reads the certificates of the world, for 50 ms, and none of ours meets one.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = RUNTIME.name

HAS_FAILED = pytest.StashKey[bool]()

pytest_plugins = ["tests.tiers", "tests.kernel_sweep", "tests.stuck_process", "tests.fixtures"]


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """What is there when a file's tests begin is left alone by the collector of cycles: it is
    all of torch, transformers and peft, and to look through it takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[HAS_FAILED] = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After a test that failed the next one gets fixtures of all scopes anew."""
    if item.stash.get(HAS_FAILED, False):
        del item.stash[HAS_FAILED]
        item.session._setupstate.teardown_exact(None)
