"""What an append has to pass on a stream with documents: its profile, then its registry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
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
    """Profiles by their documents, ready for use."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Profile] = OrderedDict()

    def of(self, documents: dict[str, bytes] | None) -> Profile:
        document = None if documents is None else documents.get(PROFILE_DOCUMENT)
        if document is None:
            return GENERIC
        found = self._kept.get(document)
        if found is None:
            found = self._kept[document] = read_profile(document)
            if len(self._kept) > PROFILES_CACHED_MAX:
                self._kept.popitem(last=False)
        return found


class AppendValidator:
    """Asked by the sequencer when all else about an append is in order."""

    def __init__(self, contracts: StreamSchemaCache, clock: Clock, limits: Limits) -> None:
        self._contracts = contracts
        self._clock = clock
        self._bytes_max = limits.append_body_bytes
        self._entry_bytes_max = limits.request_body_bytes
        self._key_bytes_max = limits.key_bytes
        # Streams with documents that were appended to, for the tail index, which takes and empties the set.
        self.grown: set[Stream] = set()
        # Schemas and profiles that streams are about to adopt, by number: they see what is appended.
        self.candidates: dict[int, AdoptionCandidate] = {}
        self._canonical: WeakKeyDictionary[StreamSchema, Profile] = WeakKeyDictionary()
        self.profiles = ProfileCache()

    def check(self, request: AppendRequest, stream: Stream) -> Sequence[bytes | None] | None:
        """As `judge`, for entries that are about to be appended."""
        self.grown.add(stream)
        keys = self.judge(request, stream)
        if self.candidates:
            self._show(request, stream)
        return keys

    def _show(self, request: AppendRequest, stream: Stream) -> None:
        candidate = self.candidates.get(stream.number)
        if candidate is not None:
            candidate.see(request)

    def judge(self, request: AppendRequest, stream: Stream) -> Sequence[bytes | None] | None:
        """Brings the entries into the form in which they are stored, or refuses them; gives their keys."""
        self._check_sizes(request)
        profile = self.profiles.of(stream.documents)
        if not profile.checks:
            return self._contracts.guard(request, stream)
        contract = self._contracts.of(stream.documents)
        if contract is not None:
            contract.check_key(request)
        valid = contract is None or self._writes_valid(profile, contract)
        rule = contract is not None and contract.has_rule
        default = not rule and request.key is None
        judged = contract if rule or not valid else None
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
            key = None if judged is None else judged.judge(record, _entry_label(request, index), valid=valid)
            if default:
                key = self._key(default_key(record), request, index)
            keys.append(key)
            if profile.reencodes:
                stored = encode_json_record(record)
                size += len(stored)
                if size > self._bytes_max:
                    message = f"the records are larger than {self._bytes_max} bytes once they are normalised"
                    raise TailraceError("payload_too_large", message)
                payloads.append(stored)
        if profile.reencodes:
            request.body = b",".join(payloads)
            if request.lengths is not None:
                request.lengths = [len(stored) for stored in payloads]
        return keys if rule or default else None

    def _check_sizes(self, request: AppendRequest) -> None:
        """Each entry is decoded, which takes many times its size."""
        limit = self._entry_bytes_max
        if len(request.body) > limit and max(request.lengths or (len(request.body),)) > limit:
            message = f"an entry of a stream with a schema or a profile has at most {limit} bytes"
            raise TailraceError("payload_too_large", message, limit_bytes=limit)

    def check_normal(
        self, profile: Profile, defaults: Sequence[str | None], request: AppendRequest, stream: Stream
    ) -> Sequence[bytes | None] | None:
        """As `check`, for entries that are what this profile made of them already.

        `defaults` are the keys that the profile gives them. The records themselves are only looked at where
        the stream's own registry has something to say.
        """
        if self.profiles.of(stream.documents) is not profile:
            return self.check(request, stream)  # it was changed meanwhile: they are looked at again
        self.grown.add(stream)
        keys = self._judge_normal(profile, defaults, request, stream)
        if self.candidates:
            self._show(request, stream)
        return keys

    def _judge_normal(
        self, profile: Profile, defaults: Sequence[str | None], request: AppendRequest, stream: Stream
    ) -> Sequence[bytes | None]:
        contract = self._contracts.of(stream.documents)
        if contract is None or (not contract.has_rule and self._writes_valid(profile, contract)):
            return [self._key(key, request, index) for index, key in enumerate(defaults)]
        valid = self._writes_valid(profile, contract)
        keys: list[bytes | None] = []
        for index, (payload, default) in enumerate(zip(split_append_body(request), defaults, strict=True)):
            key = contract.judge(decode_json_record(payload), _entry_label(request, index), valid=valid)
            keys.append(key if contract.has_rule else self._key(default, request, index))
        return keys

    def _writes_valid(self, profile: Profile, contract: StreamSchema) -> bool:
        """Whether the profile writes nothing that the current schema refuses; looked at once."""
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
            return None  # half a character finds nothing anyway
        if len(key) > self._key_bytes_max:
            message = (
                f"{_entry_label(request, index)}routing key must have at most {self._key_bytes_max} bytes"
            )
            raise TailraceError("invalid_request", message)
        return key


def _entry_label(request: AppendRequest, index: int) -> str:
    """Which entry of a batch a message is about."""
    return "" if request.lengths is None else f"record {index}: "


def _refusal(error: UnusableRecordError | TailraceError, where: str) -> TailraceError:
    if isinstance(error, UnusableRecordError):
        return TailraceError("invalid_request", f"{where}(root) {error}")
    return TailraceError(error.code, where + error.message) if where else error
