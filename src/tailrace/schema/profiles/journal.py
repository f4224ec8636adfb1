"""The journal: when each key was last touched, for as far back as a bounded memory reaches.

Times are generations: the number of source entries up to and including the one that touched the key. The
journal is a cache over the stream; what it no longer knows can be derived from the stream again.
"""

from __future__ import annotations

from typing import Final

from tailrace.schema.profiles.keys import ID_MASK

LAYERS_MAX: Final = 3
KEY_BYTES: Final = 250  # of one key in its two tables, about
ENTITIES_MAX: Final = 4096  # with coarse marks; beyond, marks are for everyone


class JournalLayer:
    """Keys touched from a generation on, by key and by the 32 bits clients may use instead."""

    __slots__ = ("ids", "keys", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.keys: dict[int, int] = {}
        self.ids: dict[int, int] = {}

    def note(self, key: int, generation: int) -> None:
        self.keys[key] = generation
        self.ids[key & ID_MASK] = generation


class TouchJournal:
    """Layers, oldest first. Each is decided by itself; a key's newest touch is in the newest that has it."""

    def __init__(self, start: int, layer_keys_max: int) -> None:
        self._keys_max = layer_keys_max
        self.layers = [JournalLayer(start)]
        self.absorbed = start
        self.everyone = 0  # generation of the last touch that is for all keys
        self.coarse: dict[str, int] = {}  # last coarse mark by entity
        self.coarse_any = 0

    @property
    def floor(self) -> int:
        """Touches after this generation are known."""
        return self.layers[0].start

    @property
    def memory_bytes(self) -> int:
        return sum(len(layer.keys) for layer in self.layers) * KEY_BYTES

    def note(self, keys: list[int], generation: int) -> None:
        layer = self.layers[-1]
        for key in keys:
            layer.note(key, generation)
        if len(layer.keys) >= self._keys_max:
            self.layers.append(JournalLayer(generation))
            if len(self.layers) > LAYERS_MAX:
                del self.layers[0]

    def mark(self, entity: str, generation: int) -> None:
        """From here on it is not known which rows of the entity were touched at this generation."""
        if entity not in self.coarse and len(self.coarse) >= ENTITIES_MAX:
            self.everyone = max(self.everyone, generation)
            return
        self.coarse[entity] = max(self.coarse.get(entity, 0), generation)
        self.coarse_any = max(self.coarse_any, generation)

    def extend_back(self, past: JournalLayer, upto: int) -> None:
        """Takes in what was derived again, if nothing was forgotten meanwhile and there is room for it."""
        oldest = self.layers[0]
        if self.floor != upto:
            return
        if len(self.layers) < LAYERS_MAX:
            self.layers.insert(0, past)
        elif len(oldest.keys) + len(past.keys) <= 2 * self._keys_max:
            past.keys |= oldest.keys
            past.ids |= oldest.ids
            self.layers[0] = past

    def last_key(self, key: int) -> int:
        """The generation of the key's last touch; 0 if none is known."""
        for layer in reversed(self.layers):
            if (found := layer.keys.get(key)) is not None:
                return found
        return 0

    def last_id(self, key_id: int) -> int:
        for layer in reversed(self.layers):
            if (found := layer.ids.get(key_id)) is not None:
                return found
        return 0
