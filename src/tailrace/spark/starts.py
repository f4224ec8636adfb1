"""Where a read begins and ends: words, offsets and times as positions of each stream."""

from __future__ import annotations

import logging

from tailrace.client.errors import ClientError
from tailrace.common.errors import TailraceError
from tailrace.protocol import offsets
from tailrace.spark.catalogue import (
    STREAM_START,
    Position,
    StreamCatalogue,
    StreamState,
    position_from_offset,
)
from tailrace.spark.options import OptionError, Positions, ReadOptions
from tailrace.spark.reading import DataLossError
from tailrace.spark.server_client import is_gone
from tailrace.storage.segments.parquet import pa

logger = logging.getLogger("tailrace.spark")


class PositionResolver:
    """Resolves positions, and looks whether they still mean something."""

    def __init__(self, catalogue: StreamCatalogue, options: ReadOptions) -> None:
        self._catalogue = catalogue
        self._options = options

    def starting(self, state: StreamState, default: str) -> Position:
        """Where a new read of the stream begins."""
        options = self._options
        if options.starting_ns is not None:
            return self.at_time(state, options.starting_ns)
        return self._positioned(state, options.starting or default, default)

    def ending(self, state: StreamState) -> Position:
        """Where a batch read of the stream ends."""
        options = self._options
        if options.ending_ns is not None:
            # As with a start, the first entry at that time is the first one behind it.
            return self.at_time(state, options.ending_ns)
        return self._positioned(state, options.ending or "latest", "latest")

    def _positioned(self, state: StreamState, positions: Positions, default: str) -> Position:
        if isinstance(positions, dict):
            given = positions.get(state.name, default)
            if given not in ("earliest", "latest"):
                return self._explicit(state, given)
            positions = given
        return state.earliest if positions == "earliest" else state.tail

    def _explicit(self, state: StreamState, text: str) -> Position:
        if text in ("-1", "now"):
            return state.earliest if text == "-1" else state.tail
        try:
            return position_from_offset(text)
        except TailraceError as error:
            raise OptionError(f"{text!r} is no offset of stream {state.name}: {error}") from None

    def at_time(self, state: StreamState, instant_ns: int) -> Position:
        """Before the first entry that was appended at that time or later; the tail if there is none."""
        page = self._catalogue.server.rows(state.name, since_ns=instant_ns, entries_max=1)
        rows = pa.ipc.open_stream(page.body).read_next_batch()
        if not rows.num_rows:
            return min(state.tail, position_from_offset(page.next_offset))
        entry: int = rows.column("entry")[0].as_py()
        return Position(rows.column("epoch")[0].as_py(), entry - 1)

    def checked(self, state: StreamState, start: Position) -> Position:
        """The position if the stream still has everything behind it; else the earliest, or an error."""
        if self._holds(state, start):
            return start
        if self._options.fail_on_data_loss:
            raise DataLossError(
                state.name,
                f"entries behind offset {start.offset} are gone; what there is begins behind "
                f"{state.earliest.offset}",
            )
        logger.warning("stream %s: entries behind offset %s are gone", state.name, start.offset)
        return state.earliest

    def _holds(self, state: StreamState, start: Position) -> bool:
        if start == STREAM_START:
            return state.earliest.entry == 0
        if start.epoch == state.tail.epoch:
            return state.earliest.entry <= start.entry <= state.tail.entry
        # Of an older epoch some entries may never have made it into this one: the server knows.
        try:
            self._catalogue.server.rows(state.name, offset=start.offset, entries_max=1)
        except ClientError as error:
            if is_gone(error) or error.code == "offset_beyond_tail":
                return False
            raise
        return True


def encode_positions(positions: dict[str, Position]) -> dict[str, str]:
    """Positions as Spark keeps them: flat, and sorted so that equal ones are equal texts."""
    return {name: positions[name].offset for name in sorted(positions)}


def decode_positions(offsets_by_stream: dict[str, str]) -> dict[str, Position]:
    return {name: Position(*offsets.parse_offset(text)) for name, text in offsets_by_stream.items()}
