"""How a process of ours logs, to standard error: lines for people, or objects for machines."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json", "short"]
"""text: lines with all that is known. json: objects. short: lines for a terminal."""
LogLevel = Literal["debug", "info", "warning", "error"]

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
PLAIN = {*logging.makeLogRecord({}).__dict__, "message", "asctime"}
"""What every record has; the rest was given as `extra`."""


SHORT = "%(asctime)s %(message)s"
SHOWN = ("model", "in_tok", "out_tok", "ttft_ms", "dur_ms", "error", "reason", "address", "number")
"""What a short line says of a request or a refusal."""


def set_up_logging(format: LogFormat, level: LogLevel = "info") -> None:
    """Logs records of a level and above. As JSON also warnings of Python, and what ends the
    process."""
    # What no format of ours shows; a gateway logs a line for each request.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # pyright: ignore[reportAttributeAccessIssue]
    logging.basicConfig(level=level.upper())
    for handler in logging.root.handlers:
        handler.setFormatter(_formatter(format))
    if format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught


def _formatter(format: LogFormat) -> logging.Formatter:
    match format:
        case "json":
            return JsonFormatter()
        case "short":
            return ShortFormatter(SHORT, "%H:%M:%S")
        case "text":
            return TextFormatter(TEXT)


class ShortFormatter(logging.Formatter):
    """Lines of a time, a message and a few of the fields, for people who watch a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno < logging.WARNING else f" [{record.levelname.lower()}]"
        shown = [
            f" {name}={value}"
            for name, value in _given(record)
            if name in SHOWN and value not in (None, "")
        ]
        return super().formatMessage(record) + _encodable("".join(shown)) + level


class TextFormatter(logging.Formatter):
    """What the record was given beside its message follows it, as name=value."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        given = [f" {name}={value}" for name, value in _given(record)]
        return super().formatMessage(record) + _encodable("".join(given))


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC, RFC 3339), level, logger and message; where there is one the
    exception with its traceback; and what the record was given beside, such as request_id."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": _encodable(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = _encodable(self.formatException(record.exc_info))
        for name, value in _given(record):
            fields.setdefault(name, value)
        return msgspec.json.encode(fields, enc_hook=str).decode()


def _given(record: logging.LogRecord) -> list[tuple[str, Any]]:
    """As `extra`."""
    return [(name, value) for name, value in record.__dict__.items() if name not in PLAIN]


def _encodable(text: str) -> str:
    """Names of files may hold what is no text."""
    return text.encode(errors="backslashreplace").decode()


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, Exception):
        logging.critical("ended", exc_info=(kind, error, traceback))
    else:
        sys.__excepthook__(kind, error, traceback)
