"""The protocol between the model's calls and the blocks, wherever these run.

A block runs in the worker (``request.TracedRequest``) or in a sandbox process, whose side in the worker is
a session (``sandboxed.sandbox_session.SandboxSession``). The dispatcher treats both alike: at each place it
asks who is waiting, offers the value, continues with the changed one, and refuses values that cannot be
provided.
"""

from __future__ import annotations

from typing import Protocol


class Participant(Protocol):
    """One or several blocks, as registered with the dispatcher.

    Attributes:
        needed_modules: Whether they needed, in the last step, values that no tap provides.
        needs_modules: Whether they need such values in this step.
    """

    needed_modules: bool
    needs_modules: bool

    @property
    def order(self) -> int:
        """Position in the order of arrival, in which values are offered."""

    @property
    def in_step(self) -> bool:
        """Whether it takes part in the running step."""

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
