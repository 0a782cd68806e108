"""Provides the list of modules of a stored adapter, even if it was stored before lists were
introduced."""

from __future__ import annotations

from contextlib import closing

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.module_list import ListedModule, read_module_list
from adapters.format.module_lister import Listed, Refused, Work
from adapters.format.validator import AdapterFiles
from adapters.manifest import BaseModelShape
from sandbox.sandboxes import Sandboxes, SandboxFailed
from sandbox.task import Bounds, Died

BOUNDS = Bounds(memory_bytes=64 << 20, cpu_s=10.0, wall_s=60.0)
"""Limits of the process that matches the patterns of one adapter."""

_decoder = msgspec.json.Decoder(Listed | Refused)


def stored_modules(files: AdapterFiles, base: BaseModelShape) -> list[ListedModule]:
    """Returns the stored list of modules. If the adapter has none, matches its patterns in a
    sandbox.

    Raises AdapterRejected if the adapter does not fit the base, or if matching exceeds its limits.
    """
    stored = read_module_list(files.config.parent)
    if stored is not None:
        return stored
    work = msgspec.json.encode(Work(str(files.config.parent), base))
    with closing(Sandboxes("adapters.format.module_lister")) as sandboxes:
        try:
            outcome = sandboxes.task(work, BOUNDS).run()
        except SandboxFailed as error:
            raise AdapterRejected("adapter.validation.crashed", "adapter", str(error)) from error
    if isinstance(outcome, Died):
        raise AdapterRejected(f"adapter.validation.{outcome.why}", "adapter")
    listed = _decoder.decode(outcome)
    if isinstance(listed, Refused):
        raise AdapterRejected(**msgspec.structs.asdict(listed))
    return listed.modules
