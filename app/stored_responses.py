"""Responses that vLLM keeps for later requests, separate for each tenant and limited in number.

vLLM keeps them in dictionaries for as long as it runs, and whoever knows an id reads them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import Any, Final

from nnsight_engine.core.work_context import tenant_served

MAX_STORED: Final = 1000
MAX_OF_TENANT: Final = 100


class StoredResponses(MutableMapping[str, Any]):
    """A dictionary in which each tenant sees its own entries only; the oldest are dropped.

    The tenant is that of the request whose code uses the dictionary.

    Args:
        max_stored: The number of entries of all tenants.
        max_of_tenant: The number of entries of one tenant.
    """

    def __init__(self, max_stored: int = MAX_STORED, max_of_tenant: int = MAX_OF_TENANT) -> None:
        self._max_stored = max_stored
        self._max_of_tenant = max_of_tenant
        self._entries: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def __getitem__(self, name: str) -> Any:
        """Return an entry of the tenant."""
        return self._entries[tenant_served(), name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an entry of the tenant, and drop the oldest ones above the limits."""
        tenant = tenant_served()
        self._entries[tenant, name] = value
        own = [key for key in self._entries if key[0] == tenant]
        for key in own[: max(0, len(own) - self._max_of_tenant)]:
            del self._entries[key]
        while len(self._entries) > self._max_stored:
            self._entries.popitem(last=False)

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


__all__ = ["StoredResponses"]
