"""The windows and groups of an answer as one text of JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import orjson

from tailrace.schema.timestamps import from_unix_ms
from tailrace.search.aggregates.keyed import GroupKey, KeyedStates, group_ids
from tailrace.search.aggregates.shown import join_texts
from tailrace.search.numpy_arrays import np
from tailrace.storage.segments.parquet import BINARY, pa

# A window mostly ends where the next one starts, and is asked for again.
_shown_at = lru_cache(16_384)(from_unix_ms)


def encode_windows(
    states: KeyedStates,
    group_by: Sequence[str],
    interval_ms: int,
    others: Sequence[tuple[GroupKey, bytes]],
    look_at_clock: Callable[[], None],
) -> list[bytes | memoryview]:
    """All windows with their groups, in order, as one text in pieces, not to copy it once more.

    `others` are groups that were made elsewhere, as JSON.
    """
    keys = _WindowKeys(states, group_by, others)
    if not len(keys.windows):
        return [b"[]"]
    texts: list[Any] = []
    for piece in states.pieces:
        look_at_clock()
        texts.append(piece.texts())
    texts.append(pa.array([shown for _, shown in others], BINARY))
    order = np.lexsort([keys.ranks, keys.windows])
    found = pa.concat_arrays(texts)
    if (order[1:] < order[:-1]).any():
        found = found.take(pa.array(order))
    look_at_clock()
    return _wrap_groups(found, keys, order, interval_ms, len(others))


class _WindowKeys:
    """The window of every group, its name as JSON, and how the names of a window are ordered."""

    def __init__(
        self, states: KeyedStates, group_by: Sequence[str], others: Sequence[tuple[GroupKey, bytes]]
    ) -> None:
        pieces, texts = states.pieces, states.texts
        columns: list[Any] = []
        for place, values in enumerate(texts):
            coded = values.coded([key[1][place] for key, _ in others])
            columns.append(np.concatenate([*(piece.codes[place] for piece in pieces), coded]))
        windows = [*(piece.windows for piece in pieces), np.array([key[0] for key, _ in others], np.int64)]
        self.windows = np.concatenate(windows)
        ids = group_ids(columns, len(self.windows))
        _, leads, which = np.unique(ids, return_index=True, return_inverse=True)
        listed = [values.listed() for values in texts]
        self.names = [
            orjson.dumps(
                {name: of[column[row]] for name, of, column in zip(group_by, listed, columns, strict=True)}
            )
            for row in leads.tolist()
        ]
        rank = np.empty(len(self.names), np.int64)
        rank[sorted(range(len(self.names)), key=self.names.__getitem__)] = np.arange(len(self.names))
        self.ranks = rank[which]
        self.which = which  # the place of each group's name


def _wrap_groups(
    texts: Any, keys: _WindowKeys, order: Any, interval_ms: int, others: int
) -> list[bytes | memoryview]:
    """Groups in their windows. What lies between them, and the name of each, is written in front of it."""
    windows = keys.windows[order]
    is_first = np.concatenate([[True], windows[1:] != windows[:-1]])
    between = [b","]
    for start_ms in windows[is_first].tolist():
        start, end = _shown_at(start_ms), _shown_at(start_ms + interval_ms)
        before = b"]}," if len(between) > 1 else b"["
        between.append(b'%b{"start":"%b","end":"%b","groups":[' % (before, start.encode(), end.encode()))
    named = [b'{"key":%b,"measures":' % name for name in keys.names] + [b""]
    behind = [b"}", b""]
    which = keys.which.copy()
    which[len(which) - others :] = len(named) - 1  # these are whole as they are
    is_other = (which == len(named) - 1).astype(np.int64)
    found = join_texts(
        [
            pa.array(between, BINARY).take(pa.array(np.where(is_first, np.cumsum(is_first), 0))),
            pa.array(named, BINARY).take(pa.array(which[order])),
            texts,
            pa.array(behind, BINARY).take(pa.array(is_other[order])) if others else b"}",
        ]
    )
    offsets = np.frombuffer(found.buffers()[1], np.int32, len(found) + 1)
    return [memoryview(found.buffers()[2])[offsets[0] : offsets[-1]], b"]}]"]
