"""All that is known of a run under faults, one JSON line an event; times are of one clock, in
seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.outcome import Outcome


class Known(msgspec.Struct, tag="known", frozen=True):
    """What a request says when nobody disturbs it."""

    request: int
    prompt_tokens: int
    tokens: list[int]


class Asked(msgspec.Struct, tag="asked", frozen=True):
    at: float
    number: int
    """Of this time of asking; a request is asked many times."""
    request: int
    gateway: str
    tenant: str
    is_streamed: bool
    timeout_s: float
    """Until the first token."""
    limit_s: float
    """Until the end."""


class Answered(msgspec.Struct, tag="answered", frozen=True):
    at: float
    number: int
    outcome: Outcome


class Struck(msgspec.Struct, tag="struck", frozen=True):
    at: float
    number: int
    kind: str
    """`worker-kill`, `gateway-term` and so on: see `tests.e2e.chaos_faults`."""
    target: str


class Healed(msgspec.Struct, tag="healed", frozen=True):
    """The target is ready again."""

    at: float
    number: int


class Calm(msgspec.Struct, tag="calm", frozen=True):
    """All gateways were seen to serve all tenants. From here on nothing has an excuse."""

    at: float


class Limited(msgspec.Struct, tag="limited", frozen=True):
    tenant: str
    tokens: int
    """It may use so many in the whole run."""


class Billed(msgspec.Struct, tag="billed", frozen=True):
    """A row of the ledger."""

    request_id: str
    tenant: str
    status: str
    prompt_tokens: int
    completion_tokens: int
    metered_tokens: int


class Held(msgspec.Struct, tag="held", frozen=True):
    """What is in use when nothing runs any more."""

    what: str
    amount: float


Event = Known | Asked | Answered | Struck | Healed | Calm | Limited | Billed | Held
_decoder = msgspec.json.Decoder[Event](Event)


class Log:
    """Keeps the events of a run, in a file too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []

    def add(self, *events: Event) -> None:
        self.events += events
        with self.path.open("ab") as file:
            file.writelines(msgspec.json.encode(event) + b"\n" for event in events)

    def tail(self, num_lines: int = 20) -> str:
        """Without the ledger, which comes last."""
        told = [event for event in self.events if not isinstance(event, Billed)]
        return "\n".join(msgspec.json.encode(event).decode() for event in told[-num_lines:])


def read_log(lines: Iterable[bytes | str]) -> list[Event]:
    return [_decoder.decode(line) for line in lines]


def now() -> float:
    return time.monotonic()
