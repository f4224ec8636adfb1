"""The error type and the table of error codes.

Every error response of Tailrace is a `TailraceError` with a code from `ERROR_STATUS`, which fixes the HTTP
status. The HTTP layer turns it into a response, `cli` into an exit code, WebSocket endpoints into a close
code. No other code chooses a status for an error.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

ERROR_STATUS: dict[str, int] = {
    # 400: the request cannot be understood or breaks a rule of the protocol.
    "invalid_request": 400,
    "invalid_header": 400,
    "invalid_name": 400,
    "reserved_name": 400,
    "invalid_offset": 400,
    "offset_beyond_tail": 400,
    "invalid_timeout": 400,
    "missing_offset": 400,
    "missing_content_type": 400,
    "empty_body": 400,
    "empty_array": 400,
    "invalid_json": 400,
    "conflicting_expiry": 400,
    "invalid_fork": 400,
    "unsupported_format": 400,
    "invalid_filter": 400,
    "key_not_allowed": 400,
    "object_missing": 400,
    # Identity.
    "unauthorized": 401,
    "forbidden": 403,
    "stale_epoch": 403,
    # The resource does not exist, or does not support this method.
    "not_found": 404,
    "method_not_allowed": 405,
    "read_only_stream": 405,
    "request_timeout": 408,
    "append_timeout": 408,
    # 409: the request is fine, the state is not.
    "stream_exists": 409,
    "name_retained": 409,
    "source_deleted": 409,
    "content_type_mismatch": 409,
    "stream_closed": 409,
    "seq_conflict": 409,
    "producer_gap": 409,
    "conflict": 409,
    # The pipeline's result is out of date: it discards the result and requests a new plan.
    "plan_superseded": 409,
    "inputs_changed": 409,
    "range_conflict": 409,
    "stream_gone": 410,
    "offset_gone": 410,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "unsupported_encoding": 415,
    "upgrade_required": 426,
    "overloaded": 429,
    "internal": 500,
    "unavailable": 503,
    "insufficient_storage": 507,
    # Documents and live queries.
    "invalid_path": 400,
    "invalid_query": 400,
    "unsupported_query": 400,
    "query_too_complex": 400,
    "reserved_field": 400,
    "batch_not_atomic": 400,
    "read_only_collection": 405,
    "before_image_required": 400,
    "collection_exists": 409,
    "batch_failed": 409,
    "invalid_checkpoint": 400,
    "checkpoint_expired": 410,
    "version_mismatch": 412,
    "not_installed": 501,
    # Subscriptions: the public protocol reads these in upper case.
    "INVALID_REQUEST": 400,
    "WEBHOOK_URL_REJECTED": 400,
    "TOKEN_INVALID": 401,
    "TOKEN_EXPIRED": 401,
    "SUBSCRIPTION_NOT_FOUND": 404,
    "SUBSCRIPTION_ALREADY_EXISTS": 409,
    "FENCED": 409,
    "ALREADY_CLAIMED": 409,
    "NO_PENDING_WORK": 409,
    "INVALID_OFFSET": 409,
    # The hub: sessions between actors, and single messages over HTTP.
    "invalid_message": 400,
    "unknown_type": 400,
    "replay_detected": 400,
    "clock_skew": 400,
    "invalid_token": 401,
    "invalid_signature": 401,
    "producer_fenced": 403,
    "unknown_actor": 404,
    "unknown_correlation": 404,
    "timeout": 408,
    "message_expired": 410,
    "message_too_large": 413,
    "rate_limited": 429,
    "mailbox_full": 429,
    "consumer_slow": 429,
    "internal_error": 500,
}

# Temporary errors: seconds after which the client should retry.
RETRY_AFTER_S: dict[str, int] = {
    "overloaded": 1,
    "unavailable": 5,
    "insufficient_storage": 5,
    "rate_limited": 1,
    "mailbox_full": 5,
    "consumer_slow": 1,
}


class TailraceError(Exception):
    """An error response: a code from the table, a message for people, headers and fields for programs."""

    # Registers a callback for when the change that the error depends on has been committed or has failed;
    # until then a client must not see the error. None if it depends on durable state only.
    pending_commit: Callable[[Callable[[TailraceError | None], None]], None] | None = None

    def __init__(
        self,
        code: str,
        message: str,
        *,
        headers: tuple[tuple[str, str], ...] = (),
        retry_after_s: int | None = None,
        **extra: object,
    ) -> None:
        assert code in ERROR_STATUS, f"unknown error code {code!r}"
        super().__init__(message)
        self.code = code
        self.message = message
        self.headers = headers
        self.retry_after_s = RETRY_AFTER_S.get(code) if retry_after_s is None else retry_after_s
        self.extra: dict[str, object] = extra

    @property
    def status(self) -> int:
        return ERROR_STATUS[self.code]

    def body(self) -> bytes:
        """The JSON body that errors of all routes have."""
        return orjson.dumps({"error": {"code": self.code, "message": self.message, **self.extra}})

    def __repr__(self) -> str:
        return f"TailraceError({self.code!r}, {self.message!r})"
