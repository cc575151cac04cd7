"""Query parameters of several routes: of lists, page by page, and of uploads."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query

from api_schemas.names import NAME_PATTERN

_MAX_PAGE: Final = 100

PageLimit = Annotated[int, Query(ge=1, le=_MAX_PAGE)]
AfterId = Annotated[str | None, Query(max_length=64, description="The last id of the previous page.")]
OfName = Annotated[str | None, Query(pattern=rf"^{NAME_PATTERN}$", description="Only versions of this name.")]
Strict = Annotated[bool, Query(description="Refuse a file that names another model, instead of a warning.")]

__all__ = ["AfterId", "OfName", "PageLimit", "Strict"]
