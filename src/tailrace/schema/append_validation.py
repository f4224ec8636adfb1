"""Validation of appends to streams with a profile or a schema registry, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.decide import AppendRequest
from tailrace.log.model import Stream
from tailrace.schema.adoption import AdoptionCandidate
from tailrace.schema.json_values import UnusableRecordError, decode_json_record, encode_json_record
from tailrace.schema.profiles.profile import GENERIC, Profile, is_canonical, read_profile
from tailrace.schema.stream_schema import StreamSchema, StreamSchemaCache, split_append_body

PROFILE_DOCUMENT = "profile"  # key of the document
PROFILES_CACHED_MAX = 1000


class ProfileCache:
    """Parsed profiles by their documents."""

    def __init__(self) -> None:
        self._parsed = lru_cache(PROFILES_CACHED_MAX)(read_profile)

    def get(self, documents: dict[str, bytes] | None) -> Profile:
        document = None if documents is None else documents.get(PROFILE_DOCUMENT)
        return GENERIC if document is None else self._parsed(document)


class AppendValidator:
    """Called by the sequencer after all other checks of an append."""

    def __init__(self, contracts: StreamSchemaCache, clock: Clock, limits: Limits) -> None:
        self._contracts = contracts
        self._clock = clock
        self._bytes_max = limits.append_body_bytes
        self._entry_bytes_max = limits.request_body_bytes
        self._key_bytes_max = limits.key_bytes
        # Streams with documents that were appended to; the tail index consumes the set.
        self.grown: set[Stream] = set()
        # Schemas and profiles being adopted, by stream number: they check what is appended.
        self.candidates: dict[int, AdoptionCandidate] = {}
        self._canonical: WeakKeyDictionary[StreamSchema, Profile] = WeakKeyDictionary()
        self.profiles = ProfileCache()

    def check(self, request: AppendRequest, stream: Stream) -> Sequence[bytes | None] | None:
        """As `normalise`, for entries that are about to be appended."""
        self.grown.add(stream)
        keys = self.normalise(request, stream)
        if self.candidates:
            self._notify_candidate(request, stream)
        return keys

    def _notify_candidate(self, request: AppendRequest, stream: Stream) -> None:
        candidate = self.candidates.get(stream.number)
        if candidate is not None:
            candidate.record_append(request)

    def normalise(self, request: AppendRequest, stream: Stream) -> Sequence[bytes | None] | None:
        """Bring the entries into their stored form, or reject them. Returns their routing keys."""
        self._check_sizes(request)
        profile = self.profiles.get(stream.documents)
        if not profile.checks:
            return self._contracts.validate_append(request, stream)
        contract = self._contracts.get(stream.documents)
        if contract is not None:
            contract.check_key(request)
        valid = contract is None or self._writes_valid(profile, contract)
        rule = contract is not None and contract.has_routing_key
        default = not rule and request.key is None
        applied = contract if rule or not valid else None
        now_ms = self._clock.now_ns() // 1_000_000
        accept, default_key = profile.accept, profile.default_key
        payloads: list[bytes] = []
        keys: list[bytes | None] = []
        size = 0
        for index, payload in enumerate(split_append_body(request)):
            try:
                record = accept(decode_json_record(payload), now_ms)
            except (UnusableRecordError, TailraceError) as error:
                raise _refusal(error, _entry_label(request, index)) from None
            key = (
                None
                if applied is None
                else applied.validate_record(record, _entry_label(request, index), valid=valid)
            )
            if default:
                key = self._key(default_key(record), request, index)
            keys.append(key)
            if profile.reencodes:
                stored = encode_json_record(record)
                size += len(stored)
                if size > self._bytes_max:
                    message = f"normalised records are larger than {self._bytes_max} bytes"
                    raise TailraceError("payload_too_large", message)
                payloads.append(stored)
        if profile.reencodes:
            request.body = b",".join(payloads)
            if request.lengths is not None:
                request.lengths = [len(stored) for stored in payloads]
        return keys if rule or default else None

    def _check_sizes(self, request: AppendRequest) -> None:
        """Entries are decoded, which takes many times their size in memory."""
        limit = self._entry_bytes_max
        if len(request.body) > limit and max(request.lengths or (len(request.body),)) > limit:
            message = f"entries of a stream with a schema or a profile must have at most {limit} bytes"
            raise TailraceError("payload_too_large", message, limit_bytes=limit)

    def check_normalised(
        self, profile: Profile, defaults: Sequence[str | None], request: AppendRequest, stream: Stream
    ) -> Sequence[bytes | None] | None:
        """As `check`, for entries that this profile has normalised already.

        `defaults` are the routing keys from the profile. Records are decoded only if the stream's own
        registry has to check them.
        """
        if self.profiles.get(stream.documents) is not profile:
            return self.check(request, stream)  # the profile was changed in the meantime
        self.grown.add(stream)
        keys = self._validate_normalised(profile, defaults, request, stream)
        if self.candidates:
            self._notify_candidate(request, stream)
        return keys

    def _validate_normalised(
        self, profile: Profile, defaults: Sequence[str | None], request: AppendRequest, stream: Stream
    ) -> Sequence[bytes | None]:
        contract = self._contracts.get(stream.documents)
        if contract is None or (not contract.has_routing_key and self._writes_valid(profile, contract)):
            return [self._key(key, request, index) for index, key in enumerate(defaults)]
        valid = self._writes_valid(profile, contract)
        keys: list[bytes | None] = []
        for index, (payload, default) in enumerate(zip(split_append_body(request), defaults, strict=True)):
            key = contract.validate_record(
                decode_json_record(payload), _entry_label(request, index), valid=valid
            )
            keys.append(key if contract.has_routing_key else self._key(default, request, index))
        return keys

    def _writes_valid(self, profile: Profile, contract: StreamSchema) -> bool:
        """Whether all records of the profile are valid under the current schema; cached."""
        if self._canonical.get(contract) is profile:
            return True
        if not profile.reencodes or not is_canonical(profile, contract.registry):
            return False
        self._canonical[contract] = profile
        return True

    def _key(self, text: str | None, request: AppendRequest, index: int) -> bytes | None:
        if not text:
            return None
        try:
            key = text.encode()
        except UnicodeEncodeError:
            return None  # a key with a lone surrogate cannot be read by
        if len(key) > self._key_bytes_max:
            message = (
                f"{_entry_label(request, index)}routing key must have at most {self._key_bytes_max} bytes"
            )
            raise TailraceError("invalid_request", message)
        return key


def _entry_label(request: AppendRequest, index: int) -> str:
    """The prefix of a message about one entry of a batch."""
    return "" if request.lengths is None else f"record {index}: "


def _refusal(error: UnusableRecordError | TailraceError, where: str) -> TailraceError:
    if isinstance(error, UnusableRecordError):
        return TailraceError("invalid_request", f"{where}(root) {error}")
    return TailraceError(error.code, where + error.message) if where else error
