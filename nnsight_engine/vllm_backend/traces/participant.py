"""The protocol between the model's calls and the blocks, wherever these run."""

from __future__ import annotations

from typing import Protocol


class Participant(Protocol):
    """A ``TracedRequest``, or the ``SandboxSession`` of a sandbox process, as the dispatcher sees it."""

    needed_modules: bool
    needs_modules: bool

    @property
    def order(self) -> int: ...

    @property
    def in_step(self) -> bool: ...

    @property
    def partial(self) -> bool:
        """Whether the step computes a chunk of the prompt that does not reach its end."""

    def uses(self, provider: str) -> bool:
        """Return whether it has any use for the value that the model has reached."""

    def arrive(self, provider: str) -> None:
        """Apply changes of an earlier run of these rows, before the value is offered to any block."""

    def is_due(self, provider: str) -> bool:
        """Return whether the value is to be offered to it now."""

    def serve(self, provider: str) -> None:
        """Offer it the value; its changes replace the value of the dispatcher's place."""

    def leave(self, provider: str) -> None:
        """Close the value: later changes no longer reach the model."""

    def watch_pass(self, provider: str) -> None:
        """Record the value as all blocks have left it."""

    def refuse(self, provider: str, error: BaseException) -> None:
        """Raise an error in the blocks that have a use for a value that cannot be provided."""
