"""Before any test module is imported."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Beside others each process computes with one thread: a team that waits for cores waits long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Libraries import Triton too, and whether its own functions are interpreted is decided then.
import tests.ops.interpreter  # noqa: F401
