"""What tests share. Nothing here stands in for a part of the product."""

from __future__ import annotations
