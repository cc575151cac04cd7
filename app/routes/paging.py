"""Query parameters of routes that list something page by page."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query

from api_schemas.names import NAME_PATTERN

_MAX_PAGE: Final = 100

PageLimit = Annotated[int, Query(ge=1, le=_MAX_PAGE)]
AfterId = Annotated[str | None, Query(max_length=64, description="The last id of the previous page.")]
OfName = Annotated[str | None, Query(pattern=rf"^{NAME_PATTERN}$", description="Only versions of this name.")]

__all__ = ["AfterId", "OfName", "PageLimit"]
