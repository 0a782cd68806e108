"""What a process writes when its log is JSON: one object a line, whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

PROGRAM = """
import logging, warnings
from telemetry.logs import set_up_logging

set_up_logging(FORMAT)
log = logging.getLogger("gateway.http.routes")
log.debug("not told")
log.info("answered %d\\nof two", 1, extra={"request_id": "req_1", "finish_reasons": [None, "stop"]})
log.info("cannot open \\udcff", extra={"message_id": object, "time_s": 0.5, "level": 9})
try:
    {}["key"]
except KeyError:
    log.exception("failed")
warnings.warn("old")
raise RuntimeError("the end")
"""


def written(log_format: str) -> list[str]:
    program = PROGRAM.replace("FORMAT", repr(log_format))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def test_one_object_a_line() -> None:
    answered, unreadable, failed, warned, ended = map(json.loads, written("json"))
    age = datetime.now(UTC) - datetime.fromisoformat(answered.pop("time"))
    assert timedelta() <= age < timedelta(minutes=10)
    assert answered == {
        "level": "INFO",
        "logger": "gateway.http.routes",
        "message": "answered 1\nof two",
        "request_id": "req_1",
        "finish_reasons": [None, "stop"],
    }
    assert unreadable["message"] == r"cannot open \udcff"
    assert (unreadable["level"], unreadable["time_s"]) == ("INFO", 0.5), "ours are not replaced"
    assert unreadable["time"].endswith("Z")
    assert (failed["level"], failed["message"]) == ("ERROR", "failed")
    assert failed["exception"].startswith("Traceback") and "'key'" in failed["exception"]
    assert (warned["logger"], "old" in warned["message"]) == ("py.warnings", True)
    assert (ended["level"], ended["message"]) == ("CRITICAL", "ended")
    assert ended["exception"].endswith("RuntimeError: the end")


def test_lines_for_people_say_what_a_record_was_given() -> None:
    first, second, unreadable, failed, *_ = written("text")
    assert first.endswith(" INFO gateway.http.routes answered 1")
    assert second == "of two request_id=req_1 finish_reasons=[None, 'stop']"
    assert unreadable.endswith("message_id=<class 'object'> time_s=0.5 level=9")
    assert failed.endswith(" ERROR gateway.http.routes failed")


def test_lines_for_a_terminal_say_little() -> None:
    program = """
import logging
from telemetry.logs import set_up_logging

set_up_logging("short", "warning")
log = logging.getLogger("gateway")
log.info("answered")
log.warning("refused", extra={"reason": "overloaded", "request_id": "req_1", "model": None})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert line[8:] == " refused reason=overloaded [warning]"
