"""Errors of the client, and argument checks.

Checks of arguments before anything is sent. A message names the argument, its bounds and its value.

The one error the client raises.

It carries what the server said, and it says whether the request may have taken effect: a caller that gets
`outcome_unknown` must look before it tries again, any other error means that nothing was changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from tailrace.common.errors import TailraceError

INTEGER_MAX = 2**53 - 1  # of the protocol: what every client can represent


def check_integer(name: str, value: object, least: int = 0, most: int = INTEGER_MAX) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}: {value!r}")


def check_seconds(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """A time span; infinity is one, NaN is not."""
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


# Codes of the client's own, for what happens before or instead of an answer. They never come from a server.
CONNECT_FAILED = "connect_failed"
CONNECTION_LOST = "connection_lost"
OUTCOME_UNKNOWN = "outcome_unknown"
INVALID_ANSWER = "invalid_answer"
INVALID_NAME = "invalid_name"  # the server has it, too
PRODUCER_CONFLICT = "producer_conflict"
NOT_ENCODABLE = "not_encodable"

NO_ANSWER = 0

# What a status without a body says about a server that takes nothing just now.
_CODE_BY_UNAVAILABLE_STATUS = {
    429: ("overloaded", "the server has too much to do; try again"),
    503: ("unavailable", "the server cannot be asked just now; try again"),
    507: ("insufficient_storage", "the disk of the server is full"),
}


class ClientError(TailraceError):
    """A request that failed: the server's code, status, message and further fields, or the client's own."""

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
        # Not the initialiser of TailraceError: a newer server, or a proxy before it, may send codes that the
        # table of this version does not have.
        Exception.__init__(self, message)
        self.code = code
        self.message = message
        self.answer_headers: dict[str, str] = dict(headers or {})
        self.headers = tuple(self.answer_headers.items())
        self.extra: dict[str, object] = dict(extra or {})
        self.outcome_unknown = outcome_unknown
        self.stream: str | None = None  # the one that the request was about, if it was about one
        self._status = status

    @property
    def status(self) -> int:
        """The HTTP status, or 0 if no answer arrived."""
        return self._status

    def __str__(self) -> str:
        where = f"{self.code}, HTTP {self._status}" if self._status else self.code
        if self.stream is not None and self.stream not in self.message:
            where = f"stream {self.stream!r}, {where}"
        return f"{self.message} ({where})"

    def __repr__(self) -> str:
        return f"ClientError({self.code!r}, {self.message!r}, status={self._status})"


class NotEncodableError(ClientError, TypeError):
    """One of several values is nothing that a stream can take. Nothing of its request was sent."""

    def __init__(self, reason: str) -> None:
        super().__init__(NOT_ENCODABLE, reason)


class _ErrorBody(msgspec.Struct):
    error: dict[str, object]


_error_decoder = msgspec.json.Decoder(_ErrorBody)


def error_from(status: int, headers: Mapping[str, str], body: bytes, *, unknown: bool = False) -> ClientError:
    """The error an answer stands for; a body that is not ours (a proxy's page) still gives a usable one."""
    try:
        fields = _error_decoder.decode(body).error
    except msgspec.MsgspecError:
        fields = {}
    code = fields.pop("code", None)
    message = fields.pop("message", None)
    return ClientError(
        code if isinstance(code, str) else f"http_{status}",
        message if isinstance(message, str) else f"the server answered {status}",
        status=status,
        headers=headers,
        extra=fields,
        outcome_unknown=unknown,
    )


def error_from_status(stream: str, status: int, headers: Mapping[str, str]) -> ClientError | None:
    """What a status without a body says about a stream, in the server's own codes and words."""
    challenge = headers.get("www-authenticate", "")
    scope = re.search(r'scope="([^"]*)"', challenge)
    described = re.search(r'error_description="([^"]*)"', challenge)
    if status == 404:
        code, message = "not_found", f"there is no stream {stream!r}"
    elif status == 410:
        code, message = "stream_gone", "the stream was deleted; its forks live on"
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
