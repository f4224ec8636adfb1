"""The error type and the catalogue of error codes.

Every error response of Tailrace is a `TailraceError` with a code from `ERROR_CATALOGUE`, which fixes the HTTP
status. The HTTP layer turns it into a response, `cli` into an exit code, WebSocket endpoints into a close
code. No other code chooses a status for an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import orjson


class ErrorKind(NamedTuple):
    """What a code means to the client that gets it."""

    status: int
    meaning: str
    remedy: str
    retry_after_s: int | None = None  # a temporary error: when the client should retry


# By subject, in the order of docs/errors.md. The codes are part of the API: they never change.
ERROR_CATALOGUE: Final[dict[str, dict[str, ErrorKind]]] = {
    "Requests": {
        "invalid_request": ErrorKind(
            400,
            "The request is not valid HTTP, or a parameter or a member of the body is not allowed.",
            "Correct what the message names.",
        ),
        "invalid_header": ErrorKind(
            400,
            "A header has a value that is not allowed, or is repeated; `header` names it.",
            "Correct the header.",
        ),
        "invalid_name": ErrorKind(
            400,
            "The name of the stream is empty, too long, or has control characters or `.` and `..` segments.",
            "Use another name.",
        ),
        "reserved_name": ErrorKind(
            400, "The name belongs to the server.", "Use a name without the reserved segment."
        ),
        "invalid_offset": ErrorKind(
            400,
            "The offset is not `-1`, `now` or an offset that this server returned.",
            "Continue from `Stream-Next-Offset` of a response.",
        ),
        "offset_beyond_tail": ErrorKind(
            400,
            "The offset is past the end of the stream.",
            "Continue from `Stream-Next-Offset` of this stream.",
        ),
        "invalid_timeout": ErrorKind(
            400,
            "The time to wait is not a duration.",
            "Write whole seconds, or a number with `ms`, `s`, `m` or `h`.",
        ),
        "missing_offset": ErrorKind(
            400, "A live read has no offset.", "Add `offset=now`, `offset=-1` or an offset."
        ),
        "missing_content_type": ErrorKind(
            400, "The request has a body and no `Content-Type`.", "Send the content type of the stream."
        ),
        "empty_body": ErrorKind(
            400,
            "The append has no body.",
            "Send at least one byte, or `Stream-Closed: true` to close the stream.",
        ),
        "empty_array": ErrorKind(
            400, "The append to a JSON stream is an empty array.", "Send at least one entry."
        ),
        "invalid_json": ErrorKind(
            400,
            "The body is not JSON, or is nested too deep.",
            "Correct the JSON at the position that the message names.",
        ),
        "conflicting_expiry": ErrorKind(
            400, "The request has both `Stream-TTL` and `Stream-Expires-At`.", "Send one of them."
        ),
        "invalid_fork": ErrorKind(
            400,
            "The source of the fork has no such position, or is on another server.",
            "Fork at an offset that the source returned.",
        ),
        "unsupported_format": ErrorKind(
            400,
            "The stream or the live mode does not support this `format`.",
            "Leave `format` out, or read in the way that the message names.",
        ),
        "invalid_filter": ErrorKind(
            400,
            "The filter cannot be parsed, or uses a field or a mode that does not support it.",
            "Correct the clause that the message names.",
        ),
        "key_not_allowed": ErrorKind(
            400,
            "The request has `Stream-Key`, and the schema of the stream already defines the routing key.",
            "Leave `Stream-Key` out.",
        ),
        "object_missing": ErrorKind(
            400,
            "The pipeline published an object that does not exist, or has another size.",
            "Upload the object, then publish again.",
        ),
        "unauthorized": ErrorKind(
            401,
            "The token is missing, expired, revoked, or of another issuer; `WWW-Authenticate` has details.",
            "Get a new token.",
        ),
        "forbidden": ErrorKind(
            403,
            "The token does not allow this action.",
            "Use a token with the scope and the prefix that the message names.",
        ),
        "not_found": ErrorKind(
            404, "The stream or the path does not exist.", "Check the name; create the stream first."
        ),
        "method_not_allowed": ErrorKind(
            405,
            "The path does not support this method; `Allow` lists those that it does.",
            "Use a method of `Allow`.",
        ),
        "request_timeout": ErrorKind(
            408,
            "The request did not arrive, or its result was not ready, in time.",
            "Repeat a read; check the result of a write first.",
        ),
        "payload_too_large": ErrorKind(
            413,
            "The body is larger than `append_body_bytes` or `request_body_bytes`, or has too many entries.",
            "Split the request.",
        ),
        "unsupported_media_type": ErrorKind(
            415, "The path does not accept this `Content-Type`.", "Use the type that the message names."
        ),
        "unsupported_encoding": ErrorKind(
            415,
            "The body is compressed in a way that the path does not accept.",
            "Send it uncompressed; traces may be gzip.",
        ),
        "upgrade_required": ErrorKind(
            426, "The path is a WebSocket endpoint.", "Connect with a WebSocket client."
        ),
        "overloaded": ErrorKind(
            429,
            "A queue or a limit is full, or a write waited longer than `append_wait_ms`.",
            "Retry after `Retry-After`; nothing was changed.",
            1,
        ),
        "internal": ErrorKind(500, "The server failed.", "Report it with the request id."),
        "unavailable": ErrorKind(
            503,
            "The disk, the object store or the owner of the stream failed, or the server is stopping.",
            "Retry after `Retry-After`.",
            5,
        ),
        "insufficient_storage": ErrorKind(
            507,
            "Free disk space is below `disk_reserve_bytes`, or a table of bounded size is full.",
            "Free space; retry after `Retry-After`.",
            5,
        ),
    },
    "Streams": {
        "stale_epoch": ErrorKind(403, "A producer with a newer epoch has written.", "Stop this producer."),
        "read_only_stream": ErrorKind(405, "Only the server writes this stream.", "Write to another stream."),
        "append_timeout": ErrorKind(
            408,
            "The commit took too long, and its outcome is unknown.",
            "Read `Stream-Next-Offset` before a retry, or use a producer.",
        ),
        "stream_exists": ErrorKind(
            409,
            "The stream exists with another configuration.",
            "Create it with the same configuration, or under another name.",
        ),
        "name_retained": ErrorKind(
            409,
            "A deleted stream that still has forks holds the name.",
            "Delete its forks, or use another name.",
        ),
        "source_deleted": ErrorKind(409, "The source of the fork is deleted.", "Fork another stream."),
        "content_type_mismatch": ErrorKind(
            409,
            "The content type is not that of the stream.",
            "Send the content type that the message names.",
        ),
        "stream_closed": ErrorKind(
            409, "The stream is closed and accepts no more entries.", "Write to another stream."
        ),
        "seq_conflict": ErrorKind(
            409,
            "The header `Stream-Seq` is not greater than the last accepted value.",
            "Read the stream: another writer was first.",
        ),
        "producer_gap": ErrorKind(
            409,
            "A request of this producer is missing; the headers have the expected and the received sequence.",
            "Send the missing requests first.",
        ),
        "conflict": ErrorKind(
            409,
            "The state of the resource does not allow the change, or it changed at the same time.",
            "Read the resource again, then retry.",
        ),
        "plan_superseded": ErrorKind(
            409, "The pipeline built for an index plan that is no longer current.", "Request a new plan."
        ),
        "inputs_changed": ErrorKind(
            409,
            "Segments or index files that the pipeline used are no longer listed.",
            "Request a new plan.",
        ),
        "range_conflict": ErrorKind(
            409, "The published range does not match the entries that it replaces.", "Request a new plan."
        ),
        "stream_gone": ErrorKind(
            410, "The stream is deleted.", "Read one of its forks, or create a stream under another name."
        ),
        "offset_gone": ErrorKind(
            410,
            "Retention removed the entries at this offset; `Stream-Earliest-Offset` names the first.",
            "Continue from `Stream-Earliest-Offset`.",
        ),
    },
    "Documents and live queries": {
        "invalid_path": ErrorKind(
            400, "The path is not a valid name of a database, collection or document.", "Correct the path."
        ),
        "invalid_query": ErrorKind(
            400, "The query or its cursor cannot be parsed.", "Correct what the message names."
        ),
        "unsupported_query": ErrorKind(
            400, "This endpoint does not support a member of the query.", "Leave the member out."
        ),
        "query_too_complex": ErrorKind(
            400, "The query is above the limits of size or evaluation steps.", "Simplify the expression."
        ),
        "reserved_field": ErrorKind(400, "The field belongs to the server.", "Rename the field."),
        "batch_not_atomic": ErrorKind(
            400,
            "An atomic batch, or one with an `Idempotency-Key`, has several collections.",
            "Send one batch for each collection.",
        ),
        "before_image_required": ErrorKind(
            400,
            "The collection has no full view, so its changes lack the previous document.",
            "Set `view` to `full`.",
        ),
        "invalid_checkpoint": ErrorKind(
            400,
            "The checkpoint is not one of this collection.",
            "Start the replication without a checkpoint.",
        ),
        "read_only_collection": ErrorKind(
            405, "The collection follows a source and is written there.", "Write to the source."
        ),
        "collection_exists": ErrorKind(
            409,
            "The collection exists with other partitions or another source.",
            "Use the existing configuration, or another name.",
        ),
        "batch_failed": ErrorKind(
            409,
            "A write of the batch failed, so none was made.",
            "Correct the write that the message names.",
        ),
        "checkpoint_expired": ErrorKind(
            410,
            "The changes after the checkpoint are no longer stored.",
            "Clear the local collection and replicate it again.",
        ),
        "version_mismatch": ErrorKind(
            412,
            "The document has another version (`current_version`), or the hub does not support the client's.",
            "Read the document again; update the client.",
        ),
        "not_installed": ErrorKind(
            501, "The server lacks an optional package.", "Install the extra that the message names."
        ),
    },
    "Subscriptions": {
        "INVALID_REQUEST": ErrorKind(
            400,
            "The request or its configuration has a value that is not allowed.",
            "Correct what the message names.",
        ),
        "WEBHOOK_URL_REJECTED": ErrorKind(
            400,
            "The URL is not allowed: it is not HTTPS, or it resolves to a private address.",
            "Use a public HTTPS URL, or allow the address in the settings.",
        ),
        "TOKEN_INVALID": ErrorKind(
            401, "The wake token is not valid for this subscription.", "Use the token of the last wake."
        ),
        "TOKEN_EXPIRED": ErrorKind(401, "The wake token has expired.", "Use the token of the next wake."),
        "SUBSCRIPTION_NOT_FOUND": ErrorKind(404, "The subscription does not exist.", "Create it first."),
        "SUBSCRIPTION_ALREADY_EXISTS": ErrorKind(
            409, "The subscription exists with another configuration.", "Delete it first, or use another id."
        ),
        "FENCED": ErrorKind(
            409,
            "The wake has ended: its lease expired, it was answered, or a newer one was issued.",
            "Stop; the next wake has the work.",
        ),
        "ALREADY_CLAIMED": ErrorKind(
            409, "Another worker holds the subscription.", "Wait for the next wake."
        ),
        "NO_PENDING_WORK": ErrorKind(
            409, "The subscription has no pending entries.", "Wait for the next wake."
        ),
        "INVALID_OFFSET": ErrorKind(
            409,
            "The acknowledged offset is not one of the wake.",
            "Acknowledge offsets that the wake named or later ones that exist.",
        ),
    },
    "Hub": {
        "invalid_message": ErrorKind(
            400, "The frame is not one JSON envelope.", "Correct the member that `field` names."
        ),
        "unknown_type": ErrorKind(
            400,
            "The hub does not know this message type.",
            "Use a type of the protocol, or address an actor.",
        ),
        "replay_detected": ErrorKind(
            400,
            "The message is older than the replay window, or its nonce was used before.",
            "Send it with a new id and timestamp.",
        ),
        "clock_skew": ErrorKind(
            400, "The timestamp is in the future; `serverTime` is the time of the hub.", "Set the clock."
        ),
        "invalid_token": ErrorKind(
            401, "The token cannot be renewed or exchanged.", "Get a new token, or register again."
        ),
        "invalid_signature": ErrorKind(
            401, "The signature is missing or does not match.", "Sign with the current key."
        ),
        "producer_fenced": ErrorKind(
            403, "A producer with a newer epoch has written.", "Stop this producer."
        ),
        "unknown_actor": ErrorKind(
            404, "No actor is registered under this address.", "Discover actors, or wait until it registers."
        ),
        "unknown_correlation": ErrorKind(
            404, "No open request with this id was delivered to this session.", "Reply once, in time."
        ),
        "timeout": ErrorKind(
            408,
            "No acknowledgement or reply came in time; the outcome is unknown.",
            "Send again with the same id.",
        ),
        "message_expired": ErrorKind(
            410, "The time to live of the message is over.", "Send it with a longer `ttl`."
        ),
        "message_too_large": ErrorKind(
            413, "The message is larger than `maxSize`.", "Send a smaller message."
        ),
        "rate_limited": ErrorKind(
            429, "The session sends more than its limits allow.", "Wait `retryAfter`, then send again.", 1
        ),
        "mailbox_full": ErrorKind(
            429, "The mailbox of the recipient is full.", "Retry after `Retry-After`.", 5
        ),
        "consumer_slow": ErrorKind(
            429, "The recipient does not read fast enough.", "Retry after `Retry-After`.", 1
        ),
        "internal_error": ErrorKind(500, "The hub failed to process the message.", "Report it with its id."),
    },
}

_KINDS: Final = {code: kind for kinds in ERROR_CATALOGUE.values() for code, kind in kinds.items()}
ERROR_STATUS: Final = {code: kind.status for code, kind in _KINDS.items()}
RETRY_AFTER_S: Final = {code: kind.retry_after_s for code, kind in _KINDS.items() if kind.retry_after_s}


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
