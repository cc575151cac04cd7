"""What can go wrong with blocks that run elsewhere, beside what they raise themselves."""

from __future__ import annotations

from collections.abc import Collection


class LostTraceError(RuntimeError):
    """The engine has nothing of a request that it has run."""

    @classmethod
    def of(cls, missing: Collection[int]) -> LostTraceError:
        """Say of which blocks."""
        return cls(
            f"The engine returned nothing of {len(missing)} of the trace's blocks, the first being number "
            f"{min(missing)}: too many traces waited to be collected, or its worker could not read the "
            "request. Run the trace again."
        )


class RemoteError(RuntimeError):
    """A server did not run a trace.

    Attributes:
        code: What is wrong, as the server's API calls it; None where no server answered.
        status: The answer's HTTP status; None where there was none.
        param: The field that is wrong.
    """

    def __init__(
        self, message: str, *, code: str | None = None, status: int | None = None, param: str | None = None
    ) -> None:
        """Keep the parts; ``str()`` gives the message."""
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param


class RemoteConnectionError(RemoteError, ConnectionError):
    """The server could not be reached, or the connection broke."""


class LocalBlockError(RuntimeError):
    """A block asks for a part of it to run where it was written, and runs where that cannot be done."""

    @classmethod
    def on_vllm(cls) -> LocalBlockError:
        """In an engine that serves many requests in one step."""
        return cls(
            "tracer.local() is not for blocks inside vLLM: all requests of a step would wait for your "
            "machine. Save what you need, compute with it after the trace, and trace again; a session keeps "
            "the values on the server in between"
        )

    @classmethod
    def on_server(cls) -> LocalBlockError:
        """In a process of a server, which cannot reach its client yet."""
        return cls(
            "tracer.local() is not for traces on a server yet: save what you need, compute with it after the "
            "trace, and trace again"
        )
