"""The windows and groups of an answer as one text of JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import orjson

from tailrace.query.families.numbers import np
from tailrace.query.states.keyed import Key, KeyedStates, Piece, group_ids
from tailrace.query.states.shown import Piece as Text
from tailrace.query.states.shown import count_pieces, joined, summary_pieces
from tailrace.schema.instants import from_unix_ms
from tailrace.store.arrow import BINARY, pa


def shown_windows(
    states: KeyedStates,
    group_by: Sequence[str],
    interval_ms: int,
    others: Sequence[tuple[Key, bytes]],
    look_at_clock: Callable[[], None],
) -> list[bytes | memoryview]:
    """All windows with their groups, in order, as one text in pieces, not to copy it once more.

    `others` are groups that were made elsewhere, as JSON.
    """
    keys = _Keys(states, group_by, others)
    if not len(keys.windows):
        return [b"[]"]
    texts: list[Any] = []
    for piece, named in zip(states.pieces, keys.texts, strict=True):
        look_at_clock()
        texts.append(_group_texts(piece, named))
    texts.append(pa.array([shown for _, shown in others], BINARY))
    order = np.lexsort([keys.ranks, keys.windows])
    windows = keys.windows[order]
    found = pa.concat_arrays(texts)
    if (order[1:] < order[:-1]).any():
        found = found.take(pa.array(order))
    look_at_clock()
    return _wrapped(found, windows, interval_ms)


class _Keys:
    """The window of every group, its name as JSON, and how the names of a window are ordered."""

    def __init__(
        self, states: KeyedStates, group_by: Sequence[str], others: Sequence[tuple[Key, bytes]]
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
        names = [
            orjson.dumps(
                {name: of[column[row]] for name, of, column in zip(group_by, listed, columns, strict=True)}
            )
            for row in leads.tolist()
        ]
        rank = np.empty(len(names), np.int64)
        rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
        self.ranks = rank[which]
        named = pa.array(names, BINARY)
        self.texts: list[Any] = []
        at = 0
        for piece in pieces:
            self.texts.append(named.take(pa.array(which[at : at + len(piece.windows)])))
            at += len(piece.windows)


def _group_texts(piece: Piece, named: Any) -> Any:
    """Each group as JSON, its measures in the order of their names."""
    parts: list[Text] = [b'{"key":', named, b',"measures":{']
    for index, name in enumerate(sorted([*piece.counts, *piece.summaries])):
        parts.append(b"%b%b:" % (b"," if index else b"", orjson.dumps(name)))
        if name in piece.counts:
            parts += count_pieces(piece.counts[name])
        else:
            parts += summary_pieces(piece.summaries[name])
    parts.append(b"}}")
    return joined(_fewer(parts))


def _fewer(parts: Sequence[Text]) -> list[Text]:
    """The same with constant pieces that follow each other as one."""
    found: list[Text] = []
    for part in parts:
        if isinstance(part, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += part
        else:
            found.append(part)
    return found


def _wrapped(texts: Any, windows: Any, interval_ms: int) -> list[bytes | memoryview]:
    """Groups in their windows. What lies between them is written in front of each."""
    is_first = np.concatenate([[True], windows[1:] != windows[:-1]])
    shown_at = lru_cache(None)(from_unix_ms)  # a window mostly ends where the next one starts
    between = [b","]
    for start_ms in windows[is_first].tolist():
        start, end = shown_at(start_ms), shown_at(start_ms + interval_ms)
        before = b"]}," if len(between) > 1 else b"["
        between.append(b'%b{"start":"%b","end":"%b","groups":[' % (before, start.encode(), end.encode()))
    which = np.where(is_first, np.cumsum(is_first), 0)
    found = joined([pa.array(between, BINARY).take(pa.array(which)), texts])
    offsets = np.frombuffer(found.buffers()[1], np.int32, len(found) + 1)
    return [memoryview(found.buffers()[2])[offsets[0] : offsets[-1]], b"]}]"]
