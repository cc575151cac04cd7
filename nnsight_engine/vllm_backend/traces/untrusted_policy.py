"""The policy for Python of untrusted blocks in a worker or a sandbox process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nnsight_engine.sandbox.restricted import Budget, restricted_policy

if TYPE_CHECKING:
    from nnsight_engine.serialization import Policy
    from nnsight_engine.vllm_backend.compat import EngineLimits


def strangers_policy(limits: EngineLimits) -> Policy:
    """Return the policy for one trace, with a resource budget of its own."""
    budget = Budget(
        max_steps=limits.sandbox_fuel,
        max_bytes=_MADE_BYTES * limits.sandbox_bytes,
        max_saved_bytes=limits.sandbox_message_bytes,
    )
    return restricted_policy(budget)


_MADE_BYTES: Final = 64
"""Bytes that a block may allocate in total, per byte that it may hold at once."""

__all__ = ["strangers_policy"]
