"""Subscriptions: durable sets of cursors over streams that wake a worker when there are new entries."""

from __future__ import annotations
