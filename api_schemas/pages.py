"""Pages of a list, in the format of OpenAI's lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, Self, TypeVar

from pydantic import BaseModel, Field


class Listed(BaseModel):
    """An item of a list, with the id by which the next page is asked for."""

    id: str


T = TypeVar("T", bound=Listed)


class Page(BaseModel, Generic[T]):
    """A page, the newest first.

    Attributes:
        object: Always ``list``.
        data: The items.
        first_id: The id of the first item.
        last_id: The id of the last item; pass it as ``after`` for the next page.
        has_more: Whether there is a next page.
    """

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None = None
    last_id: str | None = Field(default=None, description="Pass it as `after` for the next page.")
    has_more: bool

    @classmethod
    def of(cls, data: Sequence[T], *, has_more: bool) -> Self:
        items = list(data)
        ends = {"first_id": items[0].id, "last_id": items[-1].id} if items else {}
        return cls(data=items, has_more=has_more, **ends)


__all__ = ["Listed", "Page"]
