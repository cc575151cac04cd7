"""The authenticated caller of a request, with its permissions."""

from __future__ import annotations

import dataclasses
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Limits, Scope, Tier
from api_schemas.names import Reference

_MAX_NAMED: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """A caller.

    Attributes:
        tenant: The tenant whose data it accesses; empty on a server without keys.
        key_id: The id of its key; empty on a server without keys.
        scopes: Its scopes.
        tier: The isolation in which its code runs.
        limits: The limits of its key.
        tenant_limits: The limits of all keys of its tenant together.
        trusted_codecs: Whether it may send blocks as pickles, if the server accepts them.
        presets: The only presets by which it may intervene; None for no such limit.
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
        """Whether the caller authenticated with a key, which a server with keys requires."""
        return bool(self.key_id)

    def may_use(self, preset: Reference, *, has_code: bool) -> bool:
        """Return whether the caller may use a version of a preset.

        A limit to a name is a limit to what operations of later versions do, and code may do anything. So
        versions with code must be named.
        """
        names = {str(preset)} if has_code else {preset.name, str(preset)}
        return self.presets is None or not self.presets.isdisjoint(names)

    def check_free(self, what: str, param: str | None = None) -> None:
        """Check that the caller may intervene by other means than presets.

        Args:
            what: What the caller asks for, for the message.
            param: The field that asks for it.

        Raises:
            ApiError: ``preset_not_allowed``.
        """
        if self.presets is not None:
            allowed = ", ".join(sorted(self.presets)[:_MAX_NAMED])
            raise ApiError(
                ErrorCode.PRESET_NOT_ALLOWED,
                f"The key {self.key_id!r} may intervene by {len(self.presets)} presets only ({allowed}), and "
                f"this request has {what}.",
                param,
            )

    def check(self, *scopes: Scope) -> None:
        """Check that the caller has all of these scopes.

        Raises:
            ApiError: ``missing_scope``; ``missing_api_key`` if the caller has no key.
        """
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
