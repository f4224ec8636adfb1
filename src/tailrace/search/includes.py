"""The queries inside a search configuration: checked when it is installed, so that they never fail later."""

from __future__ import annotations

from tailrace.common.errors import TailraceError
from tailrace.schema.search_config import SearchConfig
from tailrace.search.bind import BoundQuery, bind_query
from tailrace.search.dialect import SEARCH_DIALECT


def check_rollup_includes(config: SearchConfig) -> None:
    """Refuses a configuration with an include that is no query on its own fields."""
    for name, rollup in config.rollups.items():
        path = f"search.rollups.{name}"
        if rollup.include is not None:
            bind_rollup_include(rollup.include, config, f"{path}.include")
        for called, measure in rollup.measures.items():
            if measure.include is not None:
                bind_rollup_include(measure.include, config, f"{path}.measures.{called}.include")


def bind_rollup_include(text: str, config: SearchConfig, path: str) -> BoundQuery:
    try:
        return bind_query(text, config, SEARCH_DIALECT)
    except TailraceError as refusal:
        raise TailraceError(refusal.code, f"{path}: {refusal.message}") from None
