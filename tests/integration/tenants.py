"""A server with keys, for tests of what each opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx

from api_schemas.keys import NewKey, Scope, Tier

if TYPE_CHECKING:
    from tests.integration.conftest import Server


class Tenants:
    """A server with keys; the first is an operator's."""

    def __init__(self, server: Server) -> None:
        self.server = server

    async def headers(
        self, tenant: str, *scopes: Scope, tier: Tier = Tier.TRUSTED, **rest: Any
    ) -> dict[str, str]:
        new = NewKey(tenant=tenant, scopes=scopes or tuple(Scope), tier=tier, **rest)
        return {"authorization": f"Bearer {(await self.server.context.keys.create(new)).key}"}

    async def send(
        self, method: str, path: str, headers: dict[str, str] | None = None, **rest: Any
    ) -> httpx.Response:
        return await self.server.client.request(method, path, headers=headers, **rest)
