"""What lies on disk beside the journal: the hot store and the data directory."""

from __future__ import annotations
