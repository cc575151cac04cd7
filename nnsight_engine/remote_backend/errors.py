"""Errors of remote execution; no import of torch here, as terminal commands import them at startup."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


class LostTraceError(RuntimeError):
    """The engine returned no outcome for some of the blocks that it ran."""

    @classmethod
    def of(cls, missing: Collection[int]) -> LostTraceError:
        return cls(
            f"The engine returned nothing of {len(missing)} of the trace's blocks, the first being number "
            f"{min(missing)}: too many traces waited to be collected, or its worker could not read the "
            "request. Run the trace again."
        )


class RemoteError(RuntimeError):
    """A server did not run a trace.

    Attributes:
        code: Error code of the server's API; None if no server responded.
        status: HTTP status of the response; None if there was none.
        param: The request field that is invalid.
        retry_after_s: Delay in seconds that the server asks for before the next attempt.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        param: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s

    @classmethod
    def from_body(cls, plain: Any, *, status: int | None = None, retry_after_s: float = 0.0) -> RemoteError:
        """Return the error in a body with OpenAI's error object; ``KeyError`` or ``TypeError`` without."""
        error = plain["error"]
        message, code, param = error["message"], error["code"], error.get("param")
        if not isinstance(message, str):
            raise TypeError("the error's message is no text")
        return cls(
            message,
            code=None if code is None else str(code),
            status=status,
            param=None if param is None else str(param),
            retry_after_s=retry_after_s,
        )

    @classmethod
    def from_response(cls, response: httpx.Response) -> RemoteError:
        """Return the error of a response that has been read; 500 characters of a body in another form."""
        status, after = response.status_code, response.headers.get("retry-after", "")
        try:
            pause_s = float(after) if after.isdecimal() else 0.0
            return cls.from_body(response.json(), status=status, retry_after_s=pause_s)
        except (ValueError, KeyError, TypeError):
            text = response.text[:500] or response.reason_phrase
            return cls(f"{response.url} answered {status}: {text}", status=status)


class RemoteConnectionError(RemoteError, ConnectionError):
    """The server could not be reached, or the connection broke."""


class LocalBlockError(RuntimeError):
    """A block uses ``tracer.local()`` where its part cannot be run at the client."""

    @classmethod
    def on_vllm(cls) -> LocalBlockError:
        return cls(
            "tracer.local() is not for blocks inside vLLM: all requests of a step would wait for your "
            "machine. Save what you need, compute with it after the trace, and trace again; a session keeps "
            "the values on the server in between"
        )

    @classmethod
    def unreachable(cls) -> LocalBlockError:
        return cls(
            "tracer.local() needs its client, and none is connected: write `with tracer.local():` in the "
            "trace's own block, with the name that the trace is bound to, and send it over HTTP with a "
            "client of this version"
        )

    @classmethod
    def in_session(cls) -> LocalBlockError:
        return cls(
            "tracer.local() is not for the traces of a session on a server: trace outside of the session, or "
            "save what you need and compute with it after"
        )

    @classmethod
    def unanswered(cls, timeout_s: float) -> LocalBlockError:
        return cls(
            f"no client answered tracer.local() within {timeout_s:g} s (the server's local_block_timeout_s): "
            "the client has gone, does not wait for its job, or computes for longer"
        )

    @classmethod
    def misplaced(cls) -> LocalBlockError:
        return cls(
            "tracer.local() stands in a trace's own block or in an invoke, where the client finds it; not "
            "in a function, in an edit, or under validate=True"
        )

    @classmethod
    def changed(cls, name: str) -> LocalBlockError:
        """Return the error for a part that modified a copy in place, which the engine would not notice."""
        return cls(
            f"`{name}` was changed in place within tracer.local(), where it is a copy of the engine's: "
            f"assign a new value instead, `{name} = ...`, or use a variable that only the parts under "
            "tracer.local() mention, which is your own"
        )

    @classmethod
    def without_values(cls) -> LocalBlockError:
        return cls(
            "a part under tracer.local() computes with a meta tensor, which has no values: your model was "
            "loaded without its weights. Compute with them on the server, or load it with dispatch=True"
        )

    @classmethod
    def repeated(cls) -> LocalBlockError:
        return cls(
            "the server began with the trace again, after a restart, when parts of it had run under "
            "tracer.local(): they would run twice. Run the trace again"
        )

    @classmethod
    def without_gradients(cls) -> LocalBlockError:
        return cls(
            "gradients do not pass through tracer.local(): use `.detach()` on what it computed, or compute "
            "with it on the server"
        )
