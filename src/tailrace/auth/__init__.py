"""Identity and policy: who is asking, and what they may do."""

from __future__ import annotations

from tailrace.auth.bind import bind_check
from tailrace.auth.issue import TokenReport, create_token, inspect_token
from tailrace.auth.policy import Action, authorise, covers, covers_pattern, visible_prefixes
from tailrace.auth.tokens import ANONYMOUS, Identity, TokenVerifier

__all__ = [
    "ANONYMOUS",
    "Action",
    "Identity",
    "TokenReport",
    "TokenVerifier",
    "authorise",
    "bind_check",
    "covers",
    "covers_pattern",
    "create_token",
    "inspect_token",
    "visible_prefixes",
]
