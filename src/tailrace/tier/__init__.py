"""Moving data off the hot path: checkpoints of the journal."""

from __future__ import annotations
