"""Errors of the client, and argument checks.

`ClientError` has what the server returned, and says whether the request may have taken effect: after
`outcome_unknown` a caller must check before it retries, any other error means that nothing was changed.
Argument checks name the argument, its bounds and its value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from tailrace.common.errors import TailraceError

INTEGER_MAX = 2**53 - 1  # limit of the protocol: what every client can represent


def check_integer(name: str, value: object, least: int = 0, most: int = INTEGER_MAX) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}: {value!r}")


def check_seconds(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """Check a time span; infinity is allowed, NaN is not."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value > 0 or (may_be_zero and value == 0):
            return
    least = "of 0 or more" if may_be_zero else "greater than 0"
    raise ValueError(f"{name} must be a number of seconds {least}: {value!r}")


def check_text(name: str, value: object, bytes_max: int) -> None:
    if not isinstance(value, str) or not 1 <= len(value.encode()) <= bytes_max:
        raise ValueError(f"{name} must be a text of 1 to {bytes_max} bytes: {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}: {value!r}")


# Codes of the client, for failures before or without a response. Servers never send them.
CONNECT_FAILED = "connect_failed"
CONNECTION_LOST = "connection_lost"
OUTCOME_UNKNOWN = "outcome_unknown"
INVALID_ANSWER = "invalid_answer"
INVALID_NAME = "invalid_name"  # the server has it, too
PRODUCER_CONFLICT = "producer_conflict"
NOT_ENCODABLE = "not_encodable"

NO_ANSWER = 0

# Error of a status without a body, for temporary failures.
_CODE_BY_UNAVAILABLE_STATUS = {
    429: ("overloaded", "the server is overloaded, retry later"),
    503: ("unavailable", "the server is unavailable, retry later"),
    507: ("insufficient_storage", "the server's disk is full"),
}


class ClientError(TailraceError):
    """A failed request: code, status, message and further fields of the server, or of the client."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int = NO_ANSWER,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
        outcome_unknown: bool = False,
    ) -> None:
        # Not the initialiser of TailraceError: a newer server, or a proxy, may send codes that are not in
        # this version's table.
        Exception.__init__(self, message)
        self.code = code
        self.message = message
        self.answer_headers: dict[str, str] = dict(headers or {})
        self.headers = tuple(self.answer_headers.items())
        self.extra: dict[str, object] = dict(extra or {})
        self.outcome_unknown = outcome_unknown
        self.stream: str | None = None  # the stream of the request, if any
        self._status = status

    @property
    def status(self) -> int:
        """The HTTP status, or 0 if there was no response."""
        return self._status

    def __str__(self) -> str:
        where = f"{self.code}, HTTP {self._status}" if self._status else self.code
        if self.stream is not None and self.stream not in self.message:
            where = f"stream {self.stream!r}, {where}"
        return f"{self.message} ({where})"

    def __repr__(self) -> str:
        return f"ClientError({self.code!r}, {self.message!r}, status={self._status})"


class NotEncodableError(ClientError, TypeError):
    """One of several values cannot be encoded. Its request was not sent."""

    def __init__(self, reason: str) -> None:
        super().__init__(NOT_ENCODABLE, reason)


class _ErrorBody(msgspec.Struct):
    error: dict[str, object]


_error_decoder = msgspec.json.Decoder(_ErrorBody)


def error_from(status: int, headers: Mapping[str, str], body: bytes, *, unknown: bool = False) -> ClientError:
    """The error of a response; a foreign body (such as a proxy's page) also results in a usable error."""
    try:
        fields = _error_decoder.decode(body).error
    except msgspec.MsgspecError:
        fields = {}
    code = fields.pop("code", None)
    message = fields.pop("message", None)
    return ClientError(
        code if isinstance(code, str) else f"http_{status}",
        message if isinstance(message, str) else f"unexpected status {status}",
        status=status,
        headers=headers,
        extra=fields,
        outcome_unknown=unknown,
    )


def error_from_status(stream: str, status: int, headers: Mapping[str, str]) -> ClientError | None:
    """The error of a status without a body for a stream, with the server's codes and words."""
    challenge = headers.get("www-authenticate", "")
    scope = re.search(r'scope="([^"]*)"', challenge)
    described = re.search(r'error_description="([^"]*)"', challenge)
    if status == 404:
        code, message = "not_found", f"stream {stream!r} not found"
    elif status == 410:
        code, message = "stream_gone", "the stream was deleted; its forks still exist"
    elif status == 401:
        code, message = "unauthorized", described[1] if described else "missing bearer token"
    elif status == 403:
        needed = f"requires scope {scope[1]}" if scope else "the token does not cover this stream"
        code, message = "forbidden", needed
    elif status in _CODE_BY_UNAVAILABLE_STATUS:
        code, message = _CODE_BY_UNAVAILABLE_STATUS[status]
    else:
        return None
    return ClientError(code, message, status=status, headers=headers)
