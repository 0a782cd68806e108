"""The checker of chaos runs: a sound log passes, and each promise that is broken is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.chaos_checker import RECOVERY_S, broken_promises
from tests.e2e.chaos_log import (
    Answered,
    Asked,
    Billed,
    Calm,
    Event,
    Healed,
    Held,
    Known,
    Limited,
    Log,
    Struck,
    read_log,
)
from tests.outcome import End, Outcome

FAULT_ENDS = 20.0
CALM_AT = FAULT_ENDS + 1
TOKENS = [5, 6, 7]


def asked(number: int, at: float, tenant: str = "acme", gateway: str = "gateway-0") -> Asked:
    return Asked(at, number, 0, gateway, tenant, True, timeout_s=20.0, limit_s=60.0)


def finished(number: int, at: float) -> Answered:
    outcome = Outcome(
        End.FINISHED, 200, 0.1, f"r{number}", None, {0: TOKENS}, {0: "length"}, (2, 3)
    )
    return Answered(at, number, outcome)


def billed(number: int, tenant: str = "acme") -> Billed:
    return Billed(f"r{number}", tenant, "completed", 2, 3, 5)


def sound() -> dict[str, Event]:
    """A gateway is killed while it streams (2) and is away (3); a worker is killed after some
    tokens (4); one tenant's budget ends (5); later all is well (6). In the order of names."""
    partial = {0: TOKENS[:2]}
    return {
        "known": Known(0, 2, TOKENS),
        "limited": Limited("globex", 5),
        "asked-1": asked(1, 0.0),
        "answered-1": finished(1, 1.0),
        "asked-2": asked(2, 2.0),
        "killed": Struck(3.0, 1, "gateway-kill", "gateway-0"),
        "answered-2": Answered(3.0, 2, Outcome(End.BROKEN, 200, 0.1, "r2", tokens=partial)),
        "asked-3": asked(3, 4.0),
        "answered-3": Answered(4.0, 3, Outcome(End.UNREACHABLE)),
        "back": Healed(10.0, 1),
        "lost": Struck(10.0, 2, "worker-kill", "worker-0"),
        "asked-4": asked(4, 11.0),
        "answered-4": Answered(
            12.0, 4, Outcome(End.FAILED, 200, 0.1, "r4", "worker_lost", tokens=partial)
        ),
        "asked-5": asked(5, 13.0, "globex"),
        "answered-5": finished(5, 14.0),
        "asked-6": asked(6, 15.0, "globex"),
        "answered-6": Answered(15.0, 6, Outcome(End.FAILED, 429, 0.1, "r6", "insufficient_quota")),
        "ready": Healed(FAULT_ENDS, 2),
        "calm": Calm(CALM_AT),
        "asked-7": asked(7, CALM_AT + 1),
        "answered-7": finished(7, CALM_AT + 2),
        "billed-1": billed(1),
        "billed-4": Billed("r4", "acme", "failed", 2, 2, 4),
        "billed-5": billed(5, "globex"),
        "billed-7": billed(7),
        "held": Held("pages of worker-0", 0),
    }


def without(name: str) -> Callable[[dict[str, Event]], None]:
    def change(log: dict[str, Event]) -> None:
        del log[name]

    return change


def also(event: Event) -> Callable[[dict[str, Event]], None]:
    def change(log: dict[str, Event]) -> None:
        log["also"] = event

    return change


def given(name: str, **fields: Any) -> Callable[[dict[str, Event]], None]:
    """The event with other fields, or its outcome with those that only an outcome has."""

    def change(log: dict[str, Event]) -> None:
        event: Any = log[name]
        if isinstance(event, Answered) and "at" not in fields:
            fields_of_it = {"outcome": msgspec.structs.replace(event.outcome, **fields)}
        else:
            fields_of_it = fields
        log[name] = msgspec.structs.replace(event, **fields_of_it)

    return change


BREACHES: list[tuple[str, Callable[[dict[str, Event]], None]]] = [
    ("not one end", without("answered-1")),
    ("not one end", also(finished(1, 1.5))),
    ("no proper end", given("answered-1", end=End.TRUNCATED)),
    ("no proper end", given("answered-1", end=End.HUNG)),
    ("without a name", given("answered-4", code=None)),
    ("without a name", given("answered-4", code="internal_error")),
    ("budget that acme does not have", given("asked-6", tenant="acme")),
    ("nothing was wrong", given("answered-7", end=End.FAILED, code="no_worker")),
    ("its gateway was there", given("answered-1", end=End.BROKEN)),
    ("its gateway was there", given("answered-1", end=End.UNREACHABLE)),
    ("its gateway was there", given("killed", kind="gateway-term")),
    ("its gateway was there", given("killed", target="gateway-1")),
    ("says something else", given("answered-1", tokens={0: [5, 6, 8]})),
    ("says something else", given("answered-4", tokens={0: [5, 8]})),
    ("says something else", given("answered-1", tokens={0: [*TOKENS, 8]})),
    ("finished too soon", given("answered-1", tokens={0: TOKENS[:2]})),
    ("outlived its limit", given("asked-2", at=-58.0)),
    ("not told in time", given("answered-1", head_s=31.0)),
    ("billed 2 times", also(billed(1))),
    ("is said to have used", given("answered-1", usage=(2, 2))),
    ("is not billed", without("billed-1")),
    ("billed otherwise", given("billed-1", prompt_tokens=1)),
    ("billed otherwise", given("billed-1", completion_tokens=4)),
    ("billed to acme", given("billed-5", tenant="acme")),
    ("billed for less", given("billed-4", completion_tokens=1)),
    ("that 0 can have asked", also(billed(8))),
    ("globex used 6 tokens of 5", given("billed-5", metered_tokens=6)),
    ("pages of worker-0 1", given("held", amount=1)),
    ("never became calm", without("calm")),
    ("until all were served", given("calm", at=FAULT_ENDS + RECOVERY_S + 1)),
    ("until all were served", without("ready")),
    ("finished nothing", without("asked-7")),
]


def test_a_sound_log_passes(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.add(*sound().values())
    assert broken_promises(log.events) == []
    assert read_log(log.path.read_bytes().splitlines()) == log.events


@pytest.mark.parametrize(("words", "change"), BREACHES)
def test_a_breach_is_seen(words: str, change: Callable[[dict[str, Event]], None]) -> None:
    log = sound()
    change(log)
    assert any(words in broken for broken in broken_promises(list(log.values())))


def test_a_nameless_row_may_be_of_who_lost_the_connection() -> None:
    log = sound()
    also(billed(8))(log)
    given("answered-2", request_id="", status=None, tokens={})(log)
    assert broken_promises(list(log.values())) == []


def test_who_is_told_to_end_may_refuse_and_not_break_off() -> None:
    """Before the head of an answer nothing was begun."""
    log = sound()
    given("killed", kind="gateway-term")(log)
    given("answered-2", request_id="", status=None, tokens={})(log)
    assert broken_promises(list(log.values())) == []


def test_a_fault_is_felt_for_a_while_and_no_longer() -> None:
    log = sound()
    del log["calm"]
    late = FAULT_ENDS + RECOVERY_S

    def fails(at: float) -> list[str]:
        log["asked-7"] = asked(7, at)
        log["answered-7"] = Answered(at + 1, 7, Outcome(End.FAILED, 503, 0.1, "r7", "no_worker"))
        return [each for each in broken_promises(list(log.values())) if "nothing was" in each]

    assert fails(late - 0.1) == []
    assert len(fails(late + 0.1)) == 1
