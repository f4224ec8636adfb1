"""Subscriptions: durable sets of cursors over streams that wake a worker when there is something new."""

from __future__ import annotations
