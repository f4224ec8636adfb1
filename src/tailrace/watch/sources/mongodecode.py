"""Events of a change stream of MongoDB as changes of documents, and the tokens between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from bson import json_util
from bson.datetime_ms import DatetimeMS
from bson.timestamp import Timestamp

from tailrace.watch.sources.model import ImageKind, SourceChange, SourceError
from tailrace.watch.sources.mongotypes import decode_bson, document_data, document_key, format_instant_ms

# What a token begins with: the mark of a timestamp, its seconds and its counter.
_TOKEN: Final = re.compile(r"82([0-9A-Fa-f]{16})")
# Then its version and its kind: of an event, or of a time at which nothing has to have happened.
_EVENT_TOKEN: Final = re.compile(r"82[0-9A-Fa-f]{16}2[Bb]0[0-9A-Fa-f]2[Cc]")
TOKEN_BYTES_MAX: Final = 16 * 1024


class MongoDecoder:
    """Reads the change stream of one collection, in order, from behind the change at `lsn` and `ordinal`.

    The changes of one transaction have one time; only their order tells them apart, so they are counted, and
    a stream that is resumed in the middle of a transaction goes on counting.
    """

    def __init__(self, collection: str, lsn: int, ordinal: int) -> None:
        self._collection = collection
        self._lsn = lsn
        self._ordinal = ordinal
        self.end_token = ""  # if the stream says no more: the collection was dropped or renamed

    def feed(self, raw: bytes) -> SourceChange | None:
        """What one event says about a document; None if it is about none."""
        event = decode_bson(raw)
        kind = event["operationType"]
        if kind == "invalidate":
            self.end_token = encode_resume_token(event["_id"])
            return None
        if kind not in ("insert", "update", "replace", "delete"):
            return None  # such as a drop, which ends the stream with the next event
        lsn, token = _time_of(event), encode_resume_token(event["_id"])
        self._ordinal = self._ordinal + 1 if lsn == self._lsn else 0
        self._lsn = lsn
        key, txn, time = (
            document_key(event["documentKey"]["_id"]),
            _transaction_of(event),
            _instant_of(event, lsn),
        )
        if kind == "delete":
            change = SourceChange(lsn, self._ordinal, txn, time, "delete", self._collection, key)
        else:
            full = event.get("fullDocument")
            data = b"" if full is None else document_data(full)
            # An update has what the document was when somebody asked, which was later.
            image: ImageKind = "missing" if full is None else "lookup" if kind == "update" else "full"
            change = SourceChange(lsn, self._ordinal, txn, time, "put", self._collection, key, data)
            change = change._replace(image=image, replaces=kind == "replace")
        before = event.get("fullDocumentBeforeChange")
        return change._replace(token=token, before=None if before is None else document_data(before))


def encode_resume_token(token: Mapping[str, Any]) -> str:
    """A resume token as it is written down."""
    data = token.get("_data")
    text = data if isinstance(data, str) and len(token) == 1 else json_util.dumps(dict(token))
    if len(text) > TOKEN_BYTES_MAX:
        raise SourceError(f"a resume token has more than {TOKEN_BYTES_MAX} bytes")
    return text


def decode_resume_token(text: str) -> dict[str, Any]:
    return json_util.loads(text) if text.startswith("{") else {"_data": text}


def token_lsn(text: str) -> int:
    """The cluster time of a token."""
    found = _TOKEN.match(str(decode_resume_token(text).get("_data")))
    if found is None:
        raise SourceError("a resume token is not of a form that is known: MongoDB 4.4 or newer is needed")
    return int(found[1], 16)


def is_event_token(text: str) -> bool:
    """Whether a token stands behind an event, and not before all that happened at its time."""
    return _EVENT_TOKEN.match(str(decode_resume_token(text).get("_data"))) is not None


def timestamp_lsn(time: Timestamp) -> int:
    return time.time << 32 | time.inc


def _time_of(event: Mapping[str, Any]) -> int:
    time = event.get("clusterTime")
    return (
        timestamp_lsn(time) if isinstance(time, Timestamp) else token_lsn(encode_resume_token(event["_id"]))
    )


def _instant_of(event: Mapping[str, Any], lsn: int) -> str:
    """When it was committed: older servers say no more than the second."""
    time = event.get("wallTime")
    return format_instant_ms(int(time) if isinstance(time, DatetimeMS) else (lsn >> 32) * 1000)


def _transaction_of(event: Mapping[str, Any]) -> str | None:
    number, session = event.get("txnNumber"), event.get("lsid")
    if number is None or session is None:
        return None
    return f"{bytes(session['id']).hex()}:{int(number)}"
