"""Authentication and authorization: the identity of a request, and what it may do."""

from __future__ import annotations

from tailrace.auth.api_keys import ApiKey, create_api_key
from tailrace.auth.edge_signature import EdgeSignature, ForwardedClient
from tailrace.auth.identities import IdentityFile, IdentityRecords, IdentityStore, RevokedHashes
from tailrace.auth.policy import (
    Action,
    authorise,
    check_listen_address,
    covers_pattern,
    covers_stream,
    is_allowed,
    is_hub_stream,
    visible_databases,
    visible_prefixes,
)
from tailrace.auth.token_verifier import TokenVerifier
from tailrace.auth.tokens import (
    ANONYMOUS,
    GrantStore,
    Identity,
    TokenReport,
    create_token,
    inspect_token,
    invalid_token_error,
    is_exchanged_token,
)

__all__ = [
    "ANONYMOUS",
    "Action",
    "ApiKey",
    "EdgeSignature",
    "ForwardedClient",
    "GrantStore",
    "Identity",
    "IdentityFile",
    "IdentityRecords",
    "IdentityStore",
    "RevokedHashes",
    "TokenReport",
    "TokenVerifier",
    "authorise",
    "check_listen_address",
    "covers_pattern",
    "covers_stream",
    "create_api_key",
    "create_token",
    "inspect_token",
    "invalid_token_error",
    "is_allowed",
    "is_exchanged_token",
    "is_hub_stream",
    "visible_databases",
    "visible_prefixes",
]
