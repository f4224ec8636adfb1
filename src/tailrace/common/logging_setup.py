"""Logging: one event with fields per line, as JSON or as columns, with secrets redacted."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

import orjson

_SECRET_WORDS: Final = ("authorization", "cookie", "password", "secret", "token")
_EVENT_WIDTH: Final = 30
_COLOURS: Final = {"critical": "31;1", "error": "31", "warning": "33", "info": "32", "debug": "34"}

_common_fields: dict[str, object] = {}  # on every line of this process


def configure_logging(level: str, form: str) -> None:
    """Send log lines of Tailrace, and warnings of libraries, to standard error in one format.

    Libraries are limited to warnings because below that they may log passwords, for example in URLs.
    """
    severity = logging.getLevelNamesMapping()[level.upper()]
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    root = logging.getLogger()
    root.handlers[:] = [_LineHandler(as_json=as_json)]
    root.setLevel(max(severity, logging.WARNING))
    logging.getLogger("tailrace").setLevel(severity)


def log_fields(**fields: object) -> dict[str, object]:
    """The fields of one line: `logger.warning("journal file is damaged", extra=log_fields(path=path))`."""
    return {"fields": fields}


def add_common_fields(**fields: object) -> None:
    """Fields that every line of this process has from now on."""
    _common_fields.update(fields)


def redact_secrets(event: dict[str, object]) -> None:
    """Replace the value of every field whose name suggests a secret."""
    for name in event:
        if any(word in name.lower() for word in _SECRET_WORDS):
            event[name] = "(hidden)"


class _LineHandler(logging.Handler):
    """Writes log records to standard error; `extra={"fields": ...}` become fields of the line."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json
        self._colours = not as_json and sys.stderr.isatty()
        self._traceback = logging.Formatter().formatException

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self._line(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - logging must not fail its caller
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        event: dict[str, object] = {"logger": record.name, **_common_fields, **fields}
        redact_secrets(event)
        moment = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        level, message = record.levelname.lower(), record.getMessage()
        # A plain traceback: one with local variables would print client data.
        trace = self._traceback(record.exc_info) if record.exc_info else ""
        if self._as_json:
            event |= {"event": message, "level": level, "timestamp": moment}
            return orjson.dumps(event | ({"exception": trace} if trace else {}), default=str).decode()
        shown = " ".join(f"{name}={value}" for name, value in event.items())
        line = f"{moment} [{self._coloured(level)}] {message:<{_EVENT_WIDTH}} {shown}"
        return f"{line}\n{trace}" if trace else line

    def _coloured(self, level: str) -> str:
        padded = f"{level:<8}"
        return f"\x1b[{_COLOURS.get(level, '0')}m{padded}\x1b[0m" if self._colours else padded
