"""What a stream's records mean: how they are brought into one form, and what the server does with them."""

from __future__ import annotations
