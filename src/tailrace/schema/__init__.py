"""What a stream's records look like: schemas, lenses, routing keys and searchable fields. Pure, no I/O."""

from __future__ import annotations
