"""Responses that vLLM keeps for later requests, separate for each tenant and limited in number.

vLLM keeps them in dictionaries for as long as an engine runs, and whoever knows an id reads them. Here they
stay when the next engine starts, and each tenant sees its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.core.work_context import tenant_served

MAX_STORED: Final = 1000
MAX_OF_TENANT: Final = 100
_UNDER_WAY: Final = frozenset({"queued", "in_progress"})

Entry = tuple[str, str]
"""A tenant, and the name of its entry."""


def is_under_way(value: Any) -> bool:
    """Return whether a response, or the task of one, has not ended."""
    if isinstance(value, asyncio.Task):
        return not value.done()
    return getattr(value, "status", None) in _UNDER_WAY


class StoredResponses(MutableMapping[str, Any]):
    """A dictionary in which each tenant sees its own entries only; the oldest are dropped.

    The tenant is that of the request whose code uses the dictionary.

    Args:
        max_stored: The number of entries of all tenants.
        max_of_tenant: The number of entries of one tenant.
        is_needed: Returns whether an entry stays, however many newer ones there are.
    """

    def __init__(
        self,
        max_stored: int = MAX_STORED,
        max_of_tenant: int = MAX_OF_TENANT,
        is_needed: Callable[[Entry, Any], bool] = lambda _, value: is_under_way(value),
    ) -> None:
        self._max_stored = max_stored
        self._max_of_tenant = max_of_tenant
        self._is_needed = is_needed
        self._entries: OrderedDict[Entry, Any] = OrderedDict()

    def __getitem__(self, name: str) -> Any:
        """Return an entry of the tenant."""
        return self._entries[tenant_served(), name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an entry of the tenant, and drop the oldest ones above the limits that are not needed.

        Raises:
            ApiError: ``queue_full``: all are needed.
        """
        tenant = tenant_served()
        self._entries[tenant, name] = value
        own = [key for key in self._entries if key[0] == tenant]
        try:
            self._drop(own, self._max_of_tenant)
            self._drop(list(self._entries), self._max_stored)
        except ApiError:
            del self._entries[tenant, name]
            raise

    def _drop(self, entries: list[Entry], most: int) -> None:
        num_over = len(entries) - most
        for key in entries if num_over > 0 else ():
            if not self._is_needed(key, self._entries[key]):
                del self._entries[key]
                num_over -= 1
            if not num_over:
                return
        if num_over > 0:
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                f"{most} responses in the background are under way, as many as may be; send this again when "
                "one of them has ended, or cancel one.",
                "background",
            )

    def __delitem__(self, name: str) -> None:
        """Remove an entry of the tenant."""
        del self._entries[tenant_served(), name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the tenant's entries."""
        tenant = tenant_served()
        return iter([name for owner, name in self._entries if owner == tenant])

    def __len__(self) -> int:
        """Return the number of the tenant's entries."""
        return sum(1 for _ in self)

    def has(self, entry: Entry) -> bool:
        """Return whether there is an entry, of whichever tenant."""
        return entry in self._entries


def stores_of_responses() -> dict[str, StoredResponses]:
    """Return the dictionaries of vLLM's class for responses, by its attribute."""
    responses = StoredResponses()
    # The messages of a response stay as long as it does: one that is continued without them forgets them.
    messages = StoredResponses(
        2 * MAX_STORED, 2 * MAX_OF_TENANT, is_needed=lambda entry, _: responses.has(entry)
    )
    return {
        "response_store": responses,
        "msg_store": messages,
        "event_store": StoredResponses(),
        "background_tasks": StoredResponses(),
    }


__all__ = ["StoredResponses", "is_under_way", "stores_of_responses"]
