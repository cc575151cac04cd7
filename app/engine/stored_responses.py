"""Responses that vLLM keeps for later requests, separate for each tenant and limited in number.

vLLM's own dictionaries end with the engine, and anyone who knows an id reads them.
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
    if isinstance(value, asyncio.Task):
        return not value.done()
    return getattr(value, "status", None) in _UNDER_WAY


class StoredResponses(MutableMapping[str, Any]):
    """A dictionary of the tenant's own entries, that of the current request; the oldest are dropped.

    An entry that ``is_needed`` stays, however many newer ones there are.
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
        return self._entries[tenant_served(), name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an entry; ``queue_full`` if all older ones beyond the limits are needed."""
        tenant = tenant_served()
        self._entries[tenant, name] = value
        own_keys = [key for key in self._entries if key[0] == tenant]
        try:
            self._drop(own_keys, self._max_of_tenant)
            self._drop(list(self._entries), self._max_stored)
        except ApiError:
            del self._entries[tenant, name]
            raise

    def _drop(self, entries: list[Entry], max_entries: int) -> None:
        """Remove the oldest entries that are not needed, down to ``max_entries``; raises ``queue_full``."""
        num_over = len(entries) - max_entries
        for key in entries if num_over > 0 else ():
            if not self._is_needed(key, self._entries[key]):
                del self._entries[key]
                num_over -= 1
            if not num_over:
                return
        if num_over > 0:
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                f"{max_entries} responses in the background are under way, as many as may be; send this "
                "again when one of them has ended, or cancel one.",
                "background",
            )

    def __delitem__(self, name: str) -> None:
        del self._entries[tenant_served(), name]

    def __iter__(self) -> Iterator[str]:
        tenant = tenant_served()
        return iter([name for owner, name in self._entries if owner == tenant])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def has(self, entry: Entry) -> bool:
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
