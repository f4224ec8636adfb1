"""Promotion: a stored record as one of the current version."""

from __future__ import annotations

from tailrace.schema.convert import LensFailureError
from tailrace.schema.lens import Lens
from tailrace.schema.lens_parse import parse_lens
from tailrace.schema.record import UnusableRecordError, decode_json_record, encode_json_record
from tailrace.schema.registry import Registry


class Promoter:
    """The lenses of one registry, ready to be applied one after the other."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        lenses = {version: parse_lens(document) for version, document in registry.lenses.items()}
        self._lenses: dict[int, Lens] = {version: lens for version, lens in lenses.items() if version}

    def needed(self, first_sequence: int) -> bool:
        """Whether entries from here on may be of an older version than the current one."""
        boundaries = self._registry.boundaries
        return len(boundaries) > 1 and first_sequence < boundaries[-1].offset

    def promote(self, record: object, version: int) -> object:
        """The record in the current version, or LensFailureError. The one given is used up."""
        if version:
            for step in range(version, self._registry.version):
                record = self._lenses[step].apply(record)
        return record

    def promote_payload(self, payload: bytes | memoryview, sequence: int) -> bytes | memoryview:
        """A stored payload; what needs no promotion is returned byte for byte."""
        version = self._registry.version_at(sequence)
        if version in (0, self._registry.version):
            return payload
        try:
            return encode_json_record(self.promote(decode_json_record(payload), version))
        except UnusableRecordError as error:
            raise LensFailureError(str(error)) from None
