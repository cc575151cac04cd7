"""The sandbox is started ahead of its first code where there are keys for it, and costs others nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api_schemas.keys import Scope, Tier
from tests.integration.conftest import Serve
from tests.integration.tenants import Tenants

USUAL = (Scope.COMPLETIONS, Scope.INTERVENTIONS, Scope.CODE)


@pytest.mark.both_databases
@pytest.mark.parametrize(
    ("scopes", "key", "settings", "expected"),
    [
        (USUAL, {"tier": Tier.SANDBOXED}, {}, True),
        ((Scope.CODE,), {"tier": Tier.SANDBOXED, "expires_in_s": 3600}, {}, True),
        (USUAL, {"tier": Tier.TRUSTED}, {}, False),
        ((Scope.COMPLETIONS, Scope.INTERVENTIONS), {"tier": Tier.SANDBOXED}, {}, False),
        (USUAL, {"tier": Tier.SANDBOXED, "expires_in_s": 1e-6}, {}, False),
        (USUAL, {"tier": Tier.SANDBOXED}, {"sandbox": "off"}, False),
        (USUAL, {"tier": Tier.SANDBOXED}, {"allow_code": False}, False),
    ],
)
async def test_the_sandbox_is_started_for_keys_that_need_it(
    serve: Serve, scopes: tuple[Scope, ...], key: dict[str, Any], settings: dict[str, Any], expected: bool
) -> None:
    async with serve() as server:
        assert not server.engine.has_sandbox
        await Tenants(server).headers("acme", *scopes, **key)
    async with serve(**settings) as server:
        await asyncio.gather(*(one for one in asyncio.all_tasks() if one.get_name() == "engine-started"))
        assert server.engine.has_sandbox == expected
