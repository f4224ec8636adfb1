"""Options that say what a token or a key allows."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Scopes = Annotated[
    list[str], Parameter(help="What it allows: read, write or manage; may be repeated.", negative="")
]
Prefixes = Annotated[
    list[str] | None, Parameter(help="Only names that begin with this; may be repeated.", negative="")
]
Databases = Annotated[list[str] | None, Parameter(help="Only these databases; may be repeated.", negative="")]
ActorId = Annotated[str | None, Parameter(help="The hub address, if it is not the subject.")]
