"""What goes wrong with a sandbox, beside what the code in it does."""

from __future__ import annotations


class SandboxUnavailableError(RuntimeError):
    """There is no sandbox here: the machine has none, or it could not be started."""


class SandboxEndedError(RuntimeError):
    """The process of a sandboxed trace was ended: it used more than its share, or broke the rules."""

    @classmethod
    def late(cls, seconds: float) -> SandboxEndedError:
        """It did not answer in time."""
        return cls(
            f"The sandbox ran longer than {seconds:g} s within one step of the engine, which others share, "
            "and was ended. Save less, compute after the trace, or ask the operator for a larger budget."
        )

    @classmethod
    def long(cls) -> SandboxEndedError:
        """It has taken all that one trace may."""
        return cls(
            "The engine has waited for this trace's sandbox for as long as it does for one trace, so it was "
            "ended. Compute less in each step, or ask the operator for a larger budget."
        )

    @classmethod
    def gone(cls) -> SandboxEndedError:
        """It has died."""
        return cls(
            "The sandbox was ended by the system: the block used more memory or time than one may, or "
            "crashed. Compute with less at once."
        )

    @classmethod
    def unrepeated(cls) -> SandboxEndedError:
        """It changed more in a step than is kept for the step to be run again."""
        return cls(
            "The sandbox was ended, because a step had to be computed again for it and could not be: the "
            "block changed much in it, or the engine took the request's memory meanwhile. Send it again; "
            "change fewer positions, or ask for something inside the first layer before."
        )

    @classmethod
    def broken(cls, why: str) -> SandboxEndedError:
        """It said what no honest one says."""
        return cls(f"The sandbox was ended, because it broke the rules: {why}.")


__all__ = ["SandboxEndedError", "SandboxUnavailableError"]
