"""Who sends a request, and what they may: all that is known of a caller once their key has been checked."""

from __future__ import annotations

import dataclasses
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Limits, Scope, Tier


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """A caller.

    Attributes:
        tenant: Whose data are theirs; empty for everybody on a server without keys.
        key_id: The key that they hold; empty without keys.
        scopes: What they may.
        tier: Where their code runs.
        limits: Of their key.
        tenant_limits: Of all keys of their tenant together.
        trusted_codecs: Whether they may send blocks as pickles, where the server takes such.
    """

    tenant: str
    key_id: str
    scopes: frozenset[Scope]
    tier: Tier
    limits: Limits
    tenant_limits: Limits
    trusted_codecs: bool = False

    @property
    def has_key(self) -> bool:
        """Whether the server has keys, so that this caller has shown one."""
        return bool(self.key_id)

    def check(self, *scopes: Scope) -> None:
        """Let a caller pass who has all of these.

        Raises:
            ApiError: ``missing_scope``; ``missing_api_key``, where no one may without a key.
        """
        missing = [scope for scope in scopes if scope not in self.scopes]
        if missing and not self.has_key:
            raise ApiError(
                ErrorCode.NO_KEY,
                "Keys are looked after with a key, and this server has none yet: whoever runs it makes the "
                "first with `nnsight-engine keys create --tenant NAME --scopes admin`.",
            )
        if missing:
            asked = ",".join(one for one in Scope if one in self.scopes or one in missing)
            raise ApiError(
                ErrorCode.MISSING_SCOPE,
                f"The key {self.key_id!r} lacks the scope {', '.join(missing)}: whoever runs this server "
                f"makes one with `nnsight-engine keys create --tenant {self.tenant} --scopes {asked}`.",
            )


EVERYBODY: Final = Principal(
    "", "", frozenset(Scope) - {Scope.ADMIN}, Tier.TRUSTED, limits=Limits(), tenant_limits=Limits()
)
"""Who sends requests to a server without keys, which listens to this machine alone.

Not an administrator: a page in a browser on this machine, or a proxy, could else make itself a key.
"""

__all__ = ["EVERYBODY", "Principal"]
