"""How a process that serves looks for cycles of garbage."""

from __future__ import annotations

import gc

COLLECT_EVERY = 20_000
"""Objects made and not freed, before cycles are looked for among them."""


def look_for_cycles_less() -> None:
    """What is there when serving begins stays, and requests leave hardly a cycle. By default the
    collector looks through the requests under way every few of them, and now and then through
    everything, which holds all of them up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 20)
