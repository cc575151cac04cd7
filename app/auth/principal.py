from __future__ import annotations

import dataclasses
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Limits, Scope, Tier
from api_schemas.names import Reference

_MAX_NAMED: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller of a request; tenant and key are empty on a server without keys.

    ``presets`` are the only ones by which it may intervene, None for no such limit. ``trusted_codecs`` allow
    blocks as pickles, if the server accepts them.
    """

    tenant: str
    key_id: str
    scopes: frozenset[Scope]
    tier: Tier
    limits: Limits
    tenant_limits: Limits
    trusted_codecs: bool = False
    presets: frozenset[str] | None = None

    @property
    def has_key(self) -> bool:
        return bool(self.key_id)

    def may_use(self, preset: Reference, *, has_code: bool) -> bool:
        """Return whether the caller may use a version of a preset.

        A limit to a name is a limit to the operations of later versions, and code may do anything. So
        versions with code must be named.
        """
        names = {str(preset)} if has_code else {preset.name, str(preset)}
        return self.presets is None or not self.presets.isdisjoint(names)

    def check_free(self, what: str, param: str | None = None) -> None:
        """Raise ``preset_not_allowed`` unless the caller may intervene by other means than presets."""
        if self.presets is not None:
            allowed = ", ".join(sorted(self.presets)[:_MAX_NAMED])
            raise ApiError(
                ErrorCode.PRESET_NOT_ALLOWED,
                f"The key {self.key_id!r} may intervene by {len(self.presets)} presets only ({allowed}), and "
                f"this request has {what}.",
                param,
            )

    def check(self, *scopes: Scope) -> None:
        """Raise ``missing_scope``, or ``missing_api_key`` without a key, unless the caller has all scopes."""
        missing = [scope for scope in scopes if scope not in self.scopes]
        if missing and not self.has_key:
            raise ApiError(
                ErrorCode.NO_KEY,
                "Administration requires a key, and this server has none yet: its operator creates "
                "the first one with `nnsight-engine keys create --tenant NAME --scopes admin`.",
            )
        if missing:
            requested = ",".join(one for one in Scope if one in self.scopes or one in missing)
            raise ApiError(
                ErrorCode.MISSING_SCOPE,
                f"The key {self.key_id!r} lacks the scope {', '.join(missing)}: the server's operator "
                f"creates one with it by `nnsight-engine keys create --tenant {self.tenant} "
                f"--scopes {requested}`.",
            )


ANONYMOUS: Final = Principal(
    "", "", frozenset(Scope) - {Scope.ADMIN}, Tier.TRUSTED, limits=Limits(), tenant_limits=Limits()
)
"""The caller on a server without keys, which listens to this machine alone.

Not an administrator: otherwise a page in a browser on this machine, or a proxy, could create a key for
itself.
"""

__all__ = ["ANONYMOUS", "Principal"]
