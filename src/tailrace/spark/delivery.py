"""Sends appends, each with its number, so that sending it again changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tailrace.client.errors import ClientError
from tailrace.client.model import is_json
from tailrace.client.wire import ProducerFields
from tailrace.spark.server_client import ServerClient
from tailrace.spark.sink_appends import SinkAppend, json_array
from tailrace.spark.sink_options import WriteOptions
from tailrace.spark.sink_rows import SinkError


class TargetStreams:
    """The streams that are written to, made if they are not there. Remembers their types."""

    def __init__(self, server: ServerClient, options: WriteOptions) -> None:
        self._server = server
        self._options = options
        self._types: dict[str, str] = {}

    def type_of(self, stream: str) -> str:
        found = self._types.get(stream)
        if found is None:
            found = self._types[stream] = self._find(stream)
        return found

    def is_json(self, stream: str) -> bool:
        return is_json(self.type_of(stream))

    def _find(self, stream: str) -> str:
        info = self._server.head(stream)
        if info is None and self._options.create:
            self._server.create(stream, self._options.content_type)
            info = self._server.head(stream)
        if info is None:
            raise SinkError(f"there is no stream {stream}, and createStream is false")
        if info.closed:
            raise SinkError(f"stream {stream} is closed: nothing more can be written to it")
        return info.content_type


class AppendSender:
    """The appends of one partition in one batch. Numbers count from 0 for each target."""

    def __init__(self, server: ServerClient, targets: TargetStreams, producer_id: str, epoch: int) -> None:
        self._server = server
        self._targets = targets
        self._producer_id = producer_id
        self._epoch = epoch
        self._following: Counter[str] = Counter()
        self.rows = 0
        self.accepted = 0  # appends that were new, or had been sent before

    def send_all(self, appends: Iterable[SinkAppend]) -> None:
        for append in appends:
            self.send(append)

    def send(self, append: SinkAppend) -> None:
        content_type = self._targets.type_of(append.stream)
        if is_json(content_type):
            self._send(append, json_array(append.values), content_type)
        else:
            # A body is one entry, so each row needs a request of its own.
            for value in append.values.to_pylist():
                self._send(append, value, content_type)
        self.rows += len(append.values)

    def _send(self, append: SinkAppend, body: bytes, content_type: str) -> None:
        seq = self._following[append.stream]
        producing = ProducerFields(self._producer_id, self._epoch, seq)
        try:
            self._server.append(append.stream, body, content_type, append.key, producing)
        except ClientError as error:
            raise _explain_error(error, append.stream, self._producer_id) from error
        self._following[append.stream] = seq + 1
        self.accepted += 1


class AppendRefusedError(SinkError):
    """The server refused an append, and nothing of it was stored."""


def _explain_error(error: ClientError, stream: str, producer_id: str) -> SinkError:
    match error.code:
        case "stale_epoch":
            return SinkError(
                f"stream {stream}: another run of the same query ({producer_id}) is alive and ahead; "
                "stop one of them"
            )
        case "stream_closed":
            return SinkError(f"stream {stream} is closed: nothing more can be written to it")
        case _ if 400 <= error.status < 500 and error.status not in (408, 409, 429):
            return AppendRefusedError(f"stream {stream}: {error}")
        case _:
            return SinkError(f"stream {stream}: {error}")
