"""Keys for the tenants of a run, created over HTTP with an admin key, and revoked at its end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import httpx

from api_schemas.administration import CreatedKey, Limits, NewKey, Scope, Tier
from loadtests.run_spec import HOSTILE, TENANT_OF

logger = logging.getLogger(__name__)

_INTERVENING: Final = (Scope.COMPLETIONS, Scope.INTERVENTIONS)
_CODING: Final = (*_INTERVENING, Scope.CODE)
_EXPIRES_S: Final = 86400.0
"""Longer than a run: a key that could not be revoked, because the server is down or overloaded, expires."""
_KEYS: Final[Mapping[str, NewKey]] = {
    key.tenant: key
    for key in (
        NewKey(tenant="loadtest-plain", scopes=(Scope.COMPLETIONS,)),
        NewKey(tenant="loadtest-long", scopes=(Scope.COMPLETIONS,)),
        NewKey(tenant="loadtest-steering", scopes=_INTERVENING),
        NewKey(tenant="loadtest-reading", scopes=_INTERVENING),
        NewKey(tenant="loadtest-sandboxed", scopes=_CODING),
        NewKey(tenant="loadtest-trusted", scopes=_CODING, tier=Tier.TRUSTED),
        # The limit that an operator would set for untrusted code: a block may delay a step of all requests.
        NewKey(
            tenant=TENANT_OF[HOSTILE[0]],
            scopes=_CODING,
            limits=Limits(intervention_seconds_per_minute=10),
        ),
    )
}


@contextlib.contextmanager
def tenants(client: httpx.Client, admin_key: str, kinds: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield keys by tenant for the tenants that send these kinds of requests; revoked after the block.

    Raises:
        httpx.HTTPStatusError: The server refuses to create them.
    """
    headers = {"authorization": f"Bearer {admin_key}"}
    wanted = sorted({TENANT_OF[kind] for kind in kinds})
    made: list[CreatedKey] = []
    try:
        for tenant in wanted:
            body = {**_KEYS[tenant].model_dump(mode="json"), "expires_in_s": _EXPIRES_S}
            answer = client.post("/v1/admin/keys", json=body, headers=headers).raise_for_status()
            made.append(CreatedKey.model_validate(answer.json()))
        yield {key.tenant: key.key for key in made}
    finally:
        for key in made:
            try:
                client.delete(f"/v1/admin/keys/{key.id}", headers=headers).raise_for_status()
            except httpx.HTTPError as error:
                logger.warning(
                    "key %s of %s could not be ended, it expires in a day: %s", key.id, key.tenant, error
                )


__all__ = ["tenants"]
