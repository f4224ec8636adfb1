"""The two uses of the language: `filter=` on reads, and the search queries of `q` and of includes.

They share lexer, grammar and clauses. They differ in what a clause may be and in the words of a refusal.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tailrace.common.errors import TailraceError

QUERY_BYTES_MAX: Final = 16 * 1024
CLAUSES_MAX: Final = 1024
QUERY_DEPTH_MAX: Final = 64


class Dialect(NamedTuple):
    """How a query is called in messages, and the code that refuses it."""

    code: str
    parameter: str
    called: str
    clause: str
    field: str
    bare: bool  # words and phrases without a field, prefixes and text fields

    def refuse(self, message: str) -> TailraceError:
        return TailraceError(self.code, message)


FILTER_DIALECT: Final = Dialect(
    "invalid_filter", "filter", "filter", "filter clause", "filter field", bare=False
)
SEARCH_DIALECT: Final = Dialect(
    "invalid_request", "q", "search query", "fielded search clause", "search field", bare=True
)
