"""Pure knowledge of the wire: offsets, names, headers, framing. No I/O."""

from __future__ import annotations
