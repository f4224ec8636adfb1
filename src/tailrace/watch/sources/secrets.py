"""Which secrets of the server sources may use: whoever manages a database does not manage the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from tailrace.common.errors import TailraceError
from tailrace.watch.sources.config import SecretRef

# Of the server itself and of its object store: only a pattern that begins like this lets them be used.
_RESERVED_VARIABLES: Final = ("TAILRACE_", "AWS_", "AZURE_", "GOOGLE_")


class SecretPolicy:
    """What the operator lets sources use, by the names of variables and the directories of files."""

    def __init__(self, variables: Sequence[str], directories: Sequence[str]) -> None:
        self._variables = variables
        self._directories = directories

    def check(self, secret: SecretRef | None) -> None:
        if secret is None:
            return
        if secret.env is not None and not self._may_use_variable(secret.env):
            raise TailraceError(
                "forbidden", f"sources may not use the variable {secret.env} (setting source_variables)"
            )
        if secret.file is not None and not self._may_use_file(secret.file):
            raise TailraceError(
                "forbidden", "sources may not use files outside the setting source_directories"
            )

    def _may_use_variable(self, name: str) -> bool:
        reserved = next((prefix for prefix in _RESERVED_VARIABLES if name.startswith(prefix)), "")
        return any(fnmatchcase(name, pattern) and pattern.startswith(reserved) for pattern in self._variables)

    def _may_use_file(self, file: str) -> bool:
        """Links are followed first: what counts is where the secret is."""
        place = Path(os.path.realpath(file))
        return any(place.is_relative_to(os.path.realpath(directory)) for directory in self._directories)
