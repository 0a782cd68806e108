"""Logging of a process to standard error, as text lines or JSON objects."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json", "short"]
"""`text` logs lines with all fields, `json` logs one object per line, and `short` logs lines with a
few fields for a terminal."""
LogLevel = Literal["debug", "info", "warning", "error"]

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
PLAIN = {*logging.makeLogRecord({}).__dict__, "message", "asctime"}
"""Attributes that every log record has. All other attributes were given as `extra`."""


SHORT = "%(asctime)s %(message)s"
SHOWN = ("model", "in_tok", "out_tok", "ttft_ms", "dur_ms", "error", "reason", "address", "number")
"""Extra fields that the format `short` shows."""


def set_up_logging(format: LogFormat, level: LogLevel = "info") -> None:
    """Sets up logging of records of the level and above to standard error. With the format `json`,
    Python's warnings and uncaught exceptions are logged too."""
    # Logging skips the caller, thread and process of a record, because no format shows them and a
    # gateway logs a line for each request.
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
    """Formatter of lines for a terminal: time, message and a few of the fields."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno < logging.WARNING else f" [{record.levelname.lower()}]"
        shown = [
            f" {name}={value}"
            for name, value in _given(record)
            if name in SHOWN and value not in (None, "")
        ]
        return super().formatMessage(record) + _encodable("".join(shown)) + level


class TextFormatter(logging.Formatter):
    """Formatter that appends the record's extra fields to its message as name=value."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        given = [f" {name}={value}" for name, value in _given(record)]
        return super().formatMessage(record) + _encodable("".join(given))


class JsonFormatter(logging.Formatter):
    """Formatter that writes each log record as one line of JSON. The object has the time (UTC, RFC
    3339), level, logger and message, the exception with its traceback if there is one, and the
    record's extra fields, such as request_id."""

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
    """Returns the fields of the record that were given as `extra`."""
    return [(name, value) for name, value in record.__dict__.items() if name not in PLAIN]


def _encodable(text: str) -> str:
    """Escapes characters that UTF-8 cannot encode, as in file names with invalid bytes."""
    return text.encode(errors="backslashreplace").decode()


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, Exception):
        logging.critical("ended", exc_info=(kind, error, traceback))
    else:
        sys.__excepthook__(kind, error, traceback)
