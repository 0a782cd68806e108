"""Sandboxes that compile untrusted grammars before a gateway or worker compiles them."""

from __future__ import annotations

import msgspec

from sandbox.sandboxes import Sandboxes
from sandbox.task import Bounds, Died

BOUNDS = Bounds(
    memory_bytes=48 << 20,
    cpu_s=0.3,
    wall_s=30.0,
    # The sandbox's stack is smaller than the stack of any worker thread (at least 2 MiB), so that a
    # grammar that compiles in the sandbox does not overflow a worker's stack.
    stack_bytes=1536 << 10,
)
REASONS = {
    "timeout": f"compiling it takes more than {BOUNDS.cpu_s:g} s of CPU time",
    "memory": f"compiling it takes more than {BOUNDS.memory_bytes >> 20} MiB of memory",
    "crashed": "it ends the compiler, as too many rules or references inside each other do",
}


class GrammarChecks:
    """Pool of sandboxes that compile grammars. Each grammar that is being compiled has a sandbox of
    its own. Thread-safe."""

    def __init__(self, *arguments: str) -> None:
        """arguments: command-line arguments of `workers.wire.grammar_sandbox`."""
        self._sandboxes = Sandboxes("workers.wire.grammar_sandbox", *arguments)

    def refusal(self, grammar: str) -> str | None:
        """Returns the reason why the grammar cannot be compiled within the limits, or None if it
        can. Blocks until the compilation ends. Raises SandboxFailed if the sandboxes cannot do the
        work."""
        outcome = self._sandboxes.task(msgspec.json.encode(grammar), BOUNDS).run()
        if isinstance(outcome, Died):
            return REASONS[outcome.why]
        return msgspec.json.decode(outcome, type=str | None)

    def close(self) -> None:
        self._sandboxes.close()
