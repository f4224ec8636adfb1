"""The touch state of a stream: templates, journal, waiters and the budget of fine keys.

It has no I/O: entries are passed in, in order. Running out of fine keys costs precision, never a wake-up.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import msgspec
import xxhash

from tailrace.common.clock import Clock
from tailrace.schema.json_values import expect_object
from tailrace.schema.profiles.state_protocol import Change, TouchConfig, parse_change
from tailrace.schema.profiles.touch_keys import (
    ID_MASK,
    JournalLayer,
    Template,
    TouchedKeys,
    TouchJournal,
    table_key,
    touched_keys,
)
from tailrace.schema.profiles.touch_templates import (
    DeniedTemplate,
    TemplateDeclaration,
    Templates,
    activation_answer,
    parse_templates,
    parse_ttl,
)
from tailrace.schema.profiles.touch_waits import Waiter, Waiters, WaitRequest, unknown_template

COARSE_ONLY_FACTOR: Final = 4  # times the lag at which fine keys are restricted


class FineBudget:
    """Tokens by time and by batch; a stream that is far behind gets fewer of them."""

    def __init__(self, config: TouchConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._tokens = float(config.fine_burst_tokens)
        self._filled = clock.monotonic()
        self._batch = config.fine_touch_budget_per_batch
        self.mode = "fine"

    def begin_batch(self, lag: int) -> None:
        config = self._config
        degrade = config.lag_degrade_fine_touches_at_source_offsets
        if lag > degrade * COARSE_ONLY_FACTOR:
            self.mode = "coarseOnly"
        elif lag > degrade:
            self.mode = "restricted"
        elif lag <= config.lag_recover_fine_touches_at_source_offsets:
            self.mode = "fine"
        now = self._clock.monotonic()
        earned = (now - self._filled) * config.fine_tokens_per_second
        self._tokens = min(float(config.fine_burst_tokens), self._tokens + earned)
        self._filled = now
        if self.mode == "fine":
            self._batch = config.fine_touch_budget_per_batch
        else:
            reserved = config.lag_reserved_fine_touch_budget_per_batch
            self._batch = reserved if self.mode == "restricted" else 0

    def consume(self, keys: int) -> bool:
        """Whether that many fine keys may be worked out."""
        if keys > self._batch or keys > self._tokens:
            return False
        self._batch -= keys
        self._tokens -= keys
        return True


FLUSHES_KEPT: Final = 1024
FLUSH_WINDOW_MS: Final = 10_000

TouchAnswer = dict[str, object]


class StaleCursor(Exception):  # noqa: N818 - an outcome, not a failure
    """The cursor cannot be decided from; `delayed` if the answer waits for a coalescing window."""

    def __init__(self, message: str, *, delayed: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.delayed = delayed


class TouchState:
    """Owned by the loop thread."""

    def __init__(self, config: TouchConfig, epoch: str, clock: Clock, start: int) -> None:
        self.config = config
        self.epoch = epoch
        self._secret = epoch
        self.templates = Templates(config.templates)
        self.waiters = Waiters()
        self.journal = TouchJournal(start, config.memory.pending_max_keys)
        self.budget = FineBudget(config, clock)
        self._clock = clock
        self._bucket: dict[int, None] = {}  # keys touched since the last flush
        self._marks: dict[str, None] = {}
        self._overflowed = False
        self._bucket_start_ms = self.last_flush_ms = self._saved_ms = self.now_ms()
        self._flushes: deque[tuple[int, int]] = deque(
            maxlen=FLUSHES_KEPT
        )  # when, and how long since the one before
        self.changes = self.touches = self.coarse_marks = self.errors = self.overflows = 0
        self.waits = self.wakeups = self.stales = 0

    @classmethod
    def load(
        cls, config: TouchConfig, document: bytes, identity: str, clock: Clock, start: int
    ) -> TouchState:
        """From its durable form. `identity` is what makes sequence numbers mean these entries and no others.

        A fork has its source's document, and a stream that lost its newest entries uses their numbers again:
        the cursors of neither may be taken for those of the other.
        """
        stored = msgspec.json.decode(document, type=dict[str, object])
        secret = cast("str", stored["epoch"])
        epoch = xxhash.xxh3_64_hexdigest(f"{secret}\0{identity}".encode())
        state = cls(config, epoch, clock, start)
        state._secret = secret
        state.templates.load(stored, start)
        return state

    def is_of(self, document: bytes | None) -> bool:
        """Whether this is what became of the document: touches may have been switched off, or off and on."""
        return document is not None and self._secret.encode() in document

    def to_document(self) -> bytes:
        self.templates.seen = False
        self._saved_ms = self.now_ms()
        return msgspec.json.encode({"epoch": self._secret} | self.templates.to_json())

    def now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    # -- taking in -------------------------------------------------------------------------------------

    def apply(self, sequence: int, record: object) -> None:
        """The next entry of the stream."""
        generation = sequence + 1
        assert generation == self.journal.absorbed + 1, "entries are absorbed in order, each once"
        if not self._bucket and not self._marks:
            self._bucket_start_ms = self.now_ms()
        change = parse_change(record)
        if change is not None:
            self.changes += 1
            keys, emission = self._emission(change, sequence, fine=True)
            self.journal.record(keys, generation)
            self.touches += len(keys)
            if emission.coarse:
                self.coarse_marks += 1
                self.journal.mark(change.entity, generation)
                self._marks[change.entity] = None
            self.errors += emission.error
            if len(self._bucket) + len(keys) > self.config.memory.pending_max_keys:
                self._overflowed = True
                self.journal.everyone = generation
            else:
                self._bucket.update(dict.fromkeys(keys))
        self.journal.absorbed = generation

    def skip_to(self, generation: int) -> None:
        """Entries were trimmed before they were read: all clients have to query again."""
        self.journal = TouchJournal(generation, self.config.memory.pending_max_keys)
        self.journal.everyone = generation
        self._overflowed = True

    def derive(self, past: JournalLayer, sequence: int, record: object) -> None:
        """Derive the touches of an older entry into a separate layer.

        Of templates retired since then only the entity is known: their waiters get coarse touches.
        """
        change = parse_change(record)
        if change is None:
            return
        keys, emission = self._emission(change, sequence, fine=False)
        for key in keys:
            past.record(key, sequence + 1)
        remembered = self.templates.remembered.values()
        forgotten = any(one.entity == change.entity and sequence < one.generation for one in remembered)
        if emission.coarse or forgotten:
            self.journal.mark(change.entity, sequence + 1)

    def _emission(self, change: Change, sequence: int, *, fine: bool) -> tuple[list[int], TouchedKeys]:
        """All keys of a change; `fine` if it has to live within the budget."""
        of_entity = self.templates.by_entity.get(change.entity, {})
        active = [template for template in of_entity.values() if template.active_from <= sequence]
        if fine and active and not self.budget.consume(2 * len(active)):
            emission = TouchedKeys([], coarse=True)
        else:
            emission = touched_keys(change, active, self.config.on_missing_before)
        return [table_key(change.entity), *(one.key for one in active), *emission.keys], emission

    def flush(self) -> None:
        """Wakes those who listen to what was touched since the last time."""
        now_ms = self.now_ms()
        self._flushes.append((now_ms, now_ms - self.last_flush_ms))
        self.last_flush_ms = now_ms
        if self._overflowed:
            self.overflows += 1
            woken = dict(self.waiters.all)
        else:
            woken = self.waiters.touched_by(self._bucket, self._marks)
        self._bucket, self._marks, self._overflowed = {}, {}, False
        for waiter in woken:
            # A wait from `now` may be ahead of what is absorbed: what lies before it is not its business.
            if self._touched(waiter):
                self._end(waiter, touched=True)

    # -- templates -------------------------------------------------------------------------------------

    def activate(self, body: object) -> tuple[TouchAnswer, bool]:
        """The response to a request, and whether the state has to be stored."""
        given = expect_object(body, "activate", ("templates", "inactivityTtlMs"))
        ttl_ms = parse_ttl(given, self.config.templates, "activate")
        declared = parse_templates(given.get("templates"), "activate.templates")
        activated, denied, changed = self.declare(declared, ttl_ms)
        return activation_answer(activated, denied, self.epoch, self.config.templates), changed

    def declare(
        self, declared: list[TemplateDeclaration | None], ttl_ms: int
    ) -> tuple[list[Template], list[DeniedTemplate], bool]:
        activated: list[Template] = []
        denied: list[DeniedTemplate] = []
        changed = False
        for one in declared:
            if one is None:
                denied.append(DeniedTemplate(0, "invalid"))
                continue
            outcome = self.templates.activate(
                one, ttl_ms, self.journal.absorbed, self.now_ms(), self.waiters.uses
            )
            if isinstance(outcome, DeniedTemplate):
                denied.append(outcome)
                continue
            if outcome.active_from == self.journal.absorbed and outcome.table_before is None:
                last = self.journal.last_key(table_key(outcome.entity))
                outcome.table_before = last or self.journal.floor
                changed = True
            activated.append(outcome)
        return activated, denied, changed

    def expire_templates(self) -> bool:
        """Now and then: retires templates; whether there is something to be written down."""
        now_ms = self.now_ms()
        used = [identity for identity in self.templates.active if self.waiters.uses(identity)]
        self.templates.touch(used, now_ms)
        changed = self.templates.retire_idle(self.journal.absorbed, now_ms, self.waiters.uses)
        overdue = now_ms - self._saved_ms >= self.config.templates.last_seen_persist_interval_ms
        return changed or (self.templates.seen and overdue)

    # -- waiting ---------------------------------------------------------------------------------------

    def cursor_of(self, request: WaitRequest, head: int) -> int:
        """The generation a wait starts from, or that it cannot."""
        if request.cursor is None:
            return head
        epoch, generation = request.cursor
        if epoch != self.epoch:
            raise StaleCursor("cursor epoch mismatch; rerun/re-subscribe and start from cursor")
        if generation > head:
            raise StaleCursor("cursor is ahead of the stream; rerun/re-subscribe and start from cursor")
        if generation < min(self.journal.floor, self.templates.unknown_before):
            raise StaleCursor("cursor is too old; rerun/re-subscribe and start from cursor")
        return generation

    def begin(
        self, request: WaitRequest, cursor: int, answer: Callable[[TouchAnswer], None]
    ) -> Waiter | None:
        """Answers at once, or returns who waits now. The journal reaches back to the cursor."""
        self.waits += 1
        waiter = self._waiter(request, cursor, answer)
        self.templates.touch(request.templates, self.now_ms())
        gap = any(self._gap_touched(one, cursor) for one in request.templates)
        if gap or self._touched(waiter):
            self._answer(waiter, touched=True)
        elif not request.timeout_ms:
            self._answer(waiter, touched=False)
        else:
            self.waiters.add(waiter)
            return waiter
        return None

    def _waiter(self, request: WaitRequest, cursor: int, answer: Callable[[TouchAnswer], None]) -> Waiter:
        mode = self.mode
        tables: set[int] = set()
        ids = set(request.ids)
        entities: set[str] = set()
        for identity, name in zip(request.templates, request.template_names, strict=True):
            template = self.templates.active.get(identity)
            if template is not None:
                entity = template.entity
                if not request.exact:
                    ids.add(template.key & ID_MASK)
            elif identity in self.templates.remembered:
                entity = self.templates.remembered[identity].entity
                ids.add(table_key(entity) & ID_MASK)
            else:
                raise StaleCursor(unknown_template(name), delayed=True)
            entities.add(entity)
            tables.add(table_key(entity) & ID_MASK)
        kind = "fineKey"
        if not request.fine:
            kind = "tableKey"
            ids = tables or ids
        elif tables and mode == "restricted":
            kind = "templateKey"
        elif tables and mode == "coarseOnly":
            kind = "tableKey"
            ids |= tables
        return Waiter(
            cursor,
            kind,
            request.keys,
            frozenset(ids),
            request.fine,
            frozenset(entities),
            request.templates,
            self._clock.monotonic() + request.timeout_ms / 1000,
            answer,
        )

    def _gap_touched(self, identity: int, cursor: int) -> bool:
        """Before a template was active only the key of its table was touched."""
        template = self.templates.active.get(identity)
        if template is None or cursor >= template.active_from:
            return False
        last = template.table_before
        return (self.journal.last_key(table_key(template.entity)) if last is None else last) > cursor

    def _touched(self, waiter: Waiter) -> bool:
        """Whether something it listens to was touched at or after its cursor."""
        journal, cursor = self.journal, waiter.cursor
        if journal.everyone > cursor:
            return True
        if waiter.fine:
            if not waiter.entities and journal.coarse_any > cursor:
                return True
            if any(journal.coarse.get(entity, 0) > cursor for entity in waiter.entities):
                return True
        return any(journal.last_key(key) > cursor for key in waiter.keys) or any(
            journal.last_id(one) > cursor for one in waiter.ids
        )

    def expire(self) -> None:
        """Answers those whose time is over."""
        for waiter in self.waiters.due(self._clock.monotonic()):
            self._end(waiter, touched=False)

    def wake_everyone(self) -> None:
        for waiter in tuple(self.waiters.all):
            self._end(waiter, touched=True)

    def _end(self, waiter: Waiter, *, touched: bool) -> None:
        if self.waiters.remove(waiter):
            self._answer(waiter, touched=touched)

    def _answer(self, waiter: Waiter, *, touched: bool) -> None:
        self.wakeups += touched
        generation = max(self.journal.absorbed, waiter.cursor)
        waiter.answer(
            {"touched": touched, "cursor": f"{self.epoch}:{generation}", "effectiveWaitKind": waiter.kind}
            | self._bucket_facts()
        )

    def stale(self, request: WaitRequest, message: str, head: int) -> TouchAnswer:
        self.stales += 1
        return {
            "stale": True,
            "cursor": f"{self.epoch}:{head}",
            "epoch": self.epoch,
            "generation": head,
            "effectiveWaitKind": "fineKey" if request.fine else "tableKey",
            **self._bucket_facts(),
            "error": {"code": "stale", "message": message},
        }

    def _bucket_facts(self) -> TouchAnswer:
        return {
            "bucketMaxSourceOffsetSeq": str(self.journal.absorbed - 1),
            "flushAtMs": self.last_flush_ms,
            "bucketStartMs": self._bucket_start_ms,
        }

    # -- inspection ------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        return self.budget.mode if self.templates.active else "idle"

    def meta(self, head: int, scanned_through: str) -> TouchAnswer:
        memory = self.config.memory
        journal = self.journal
        now_ms = self.now_ms()
        recent = sorted([span for at, span in self._flushes if at > now_ms - FLUSH_WINDOW_MS])
        return {
            "mode": "memory",
            "cursor": f"{self.epoch}:{journal.absorbed}",
            "epoch": self.epoch,
            "generation": journal.absorbed,
            "bucketMs": memory.bucket_ms,
            "coalesceMs": self.config.touch_coalesce_window_ms,
            "filterSize": 1 << memory.filter_pow2,
            "k": memory.k,
            "pendingKeys": len(self._bucket),
            "overflowBuckets": self.overflows,
            "activeWaiters": len(self.waiters.all),
            "bucketMaxSourceOffsetSeq": str(journal.absorbed - 1),
            "lastFlushAtMs": self.last_flush_ms,
            "flushIntervalMsMaxLast10s": recent[-1] if recent else 0,
            "flushIntervalMsP95Last10s": recent[len(recent) * 95 // 100] if recent else 0,
            "settled": journal.absorbed >= head and not self._bucket and not self._marks,
            "coarseIntervalMs": self.config.coarse_interval_ms,
            "touchCoalesceWindowMs": self.config.touch_coalesce_window_ms,
            "activeTemplates": len(self.templates.active),
            "lagSourceOffsets": head - journal.absorbed,
            "touchMode": self.mode,
            "walScannedThrough": scanned_through,
            "journalKeys": sum(len(layer.keys) for layer in journal.layers),
            "journalFrom": journal.floor,
            "changesTotal": self.changes,
            "touchesTotal": self.touches,
            "coarseMarksTotal": self.coarse_marks,
            "missingBeforeErrorsTotal": self.errors,
            "waitsTotal": self.waits,
            "wakeupsTotal": self.wakeups,
            "staleTotal": self.stales,
        }


def new_touch_document() -> bytes:
    """Of a stream whose touches are switched on: an epoch that no other has."""
    return msgspec.json.encode(
        {"epoch": secrets.token_hex(8), "templates": [], "remembered": [], "unknownBefore": 0}
    )
