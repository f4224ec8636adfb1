"""Touches: hints that rows behind a query have changed. Extra ones are allowed, missed ones are not."""

from __future__ import annotations
