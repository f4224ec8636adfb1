"""The durable log: decide, commit, publish. Knows nothing of HTTP."""

from __future__ import annotations
