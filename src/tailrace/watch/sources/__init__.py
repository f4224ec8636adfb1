"""Sources of changes outside the server: what they are told to follow, and what they say, as changes."""

from __future__ import annotations
