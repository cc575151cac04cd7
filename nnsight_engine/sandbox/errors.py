"""Errors of a sandbox, except for those of the code in it."""

from __future__ import annotations


class SandboxUnavailableError(RuntimeError):
    """No sandbox is available: the machine does not support them, or it could not be started."""


class SandboxEndedError(RuntimeError):
    """The sandbox process of a trace was ended: it exceeded its limits, or broke the protocol."""

    @classmethod
    def late(cls, seconds: float) -> SandboxEndedError:
        return cls(
            f"The sandbox ran longer than {seconds:g} s within one step of the engine, which others share, "
            "and was ended. Save less, compute after the trace, or ask the operator for a larger budget."
        )

    @classmethod
    def long(cls) -> SandboxEndedError:
        return cls(
            "The engine has waited for this trace's sandbox for as long as it does for one trace, so it was "
            "ended. Compute less in each step, or ask the operator for a larger budget."
        )

    @classmethod
    def gone(cls) -> SandboxEndedError:
        return cls(
            "The sandbox was ended by the system: the block used more memory or time than one may, or "
            "crashed. Compute with less at once."
        )

    @classmethod
    def unrepeated(cls) -> SandboxEndedError:
        return cls(
            "The sandbox was ended, because a step had to be computed again for it and could not be: the "
            "block changed much in it, or the engine took the request's memory meanwhile. Send it again; "
            "change fewer positions, or ask for something inside the first layer before."
        )

    @classmethod
    def broken(cls, why: str) -> SandboxEndedError:
        return cls(f"The sandbox was ended, because it broke the rules: {why}.")
