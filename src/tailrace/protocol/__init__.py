"""Wire formats without I/O: offsets, names, headers, framing."""

from __future__ import annotations
