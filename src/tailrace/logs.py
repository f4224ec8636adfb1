"""Log lines: one event with fields per line, JSON for machines or columns for people, secrets left out."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_SECRET: Final = ("authorization", "cookie", "password", "secret", "token")


def configure(level: str, form: str) -> None:
    """Send everything that is logged, by us or by a library, to standard error in one form."""
    severity = logging.getLevelNamesMapping()[level.upper()]
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        hide_secrets,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        ending: list[Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_json),
        ]
    else:
        # Plain tracebacks: the pretty ones print local variables, and with them whatever clients sent.
        render = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        ending = [render]
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers[:] = [_Forward()]
    root.setLevel(max(severity, logging.INFO))
    logging.getLogger("tailrace").setLevel(severity)


def hide_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace the value of every field whose name says that it is secret."""
    for name in event:
        if any(word in name.lower() for word in _SECRET):
            event[name] = "(hidden)"
    return event


def _json(event: object, **_options: Any) -> str:
    return orjson.dumps(event, default=str).decode()


class _Forward(logging.Handler):
    """Takes what is logged the standard way and logs it our way; `extra={"fields": ...}` are fields."""

    def emit(self, record: logging.LogRecord) -> None:
        extra: dict[str, Any] = {"logger": record.name, **getattr(record, "fields", {})}
        if record.exc_info:
            extra["exc_info"] = record.exc_info
        structlog.get_logger().log(record.levelno, record.getMessage(), **extra)
