"""The HTTP surface: routes, answers, live readers, and the server that is made of them."""

from __future__ import annotations
