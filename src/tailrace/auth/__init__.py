"""Identity and policy: who is asking, and what they may do."""

from __future__ import annotations

from tailrace.auth.api_keys import ApiKey, make_key
from tailrace.auth.bind import bind_check
from tailrace.auth.book import IdentityBook
from tailrace.auth.edge_signature import EdgeMark, Vouched
from tailrace.auth.grants import Grants
from tailrace.auth.identity_file import IdentityFile, Register
from tailrace.auth.issue import TokenReport, create_token, inspect_token
from tailrace.auth.policy import (
    Action,
    authorise,
    covers,
    covers_pattern,
    is_hub,
    may,
    visible_databases,
    visible_prefixes,
)
from tailrace.auth.revocations import RevokedMarks
from tailrace.auth.tokens import ANONYMOUS, Identity, bad_token, stands_for_another
from tailrace.auth.verifier import TokenVerifier

__all__ = [
    "ANONYMOUS",
    "Action",
    "ApiKey",
    "EdgeMark",
    "Grants",
    "Identity",
    "IdentityBook",
    "IdentityFile",
    "Register",
    "RevokedMarks",
    "TokenReport",
    "TokenVerifier",
    "Vouched",
    "authorise",
    "bad_token",
    "bind_check",
    "covers",
    "covers_pattern",
    "create_token",
    "inspect_token",
    "is_hub",
    "make_key",
    "may",
    "stands_for_another",
    "visible_databases",
    "visible_prefixes",
]
