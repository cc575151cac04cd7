"""The two ways in which a message can fail: it cannot be written, or it cannot be trusted as read."""

from __future__ import annotations


class EncodeError(ValueError):
    """A value cannot travel; the message names the path to it, its type, why, and what to do instead."""


class DecodeError(ValueError):
    """Bytes are no message that this side accepts: broken, beyond a limit, or refused by its policy."""
