"""Ends a test process whose test does not return to Python after its time limit.

pytest-timeout's signal reaches a test only between two instructions of Python. A test that is stuck
in native code would keep its process silent, and the whole run with it, for ever.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_timeout import Settings

GRACE_S = 30.0
"""Seconds that a test which has reached its time limit has for its teardown."""
STDERR = pytest.StashKey[int]()
"""Descriptor of the process's own error output, which pytest replaces while tests run."""


def pytest_configure(config: pytest.Config) -> None:
    assert sys.__stderr__ is not None
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


@pytest.hookimpl(optionalhook=True)  # A machine for GPUs may lack pytest-timeout.
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> None:
    """Arms a timer of the interpreter that needs no instruction of Python to end the process. It
    prints the stacks of all threads first."""
    file = item.config.stash[STDERR]
    faulthandler.dump_traceback_later(settings.timeout + GRACE_S, file=file, exit=True)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    faulthandler.cancel_dump_traceback_later()
