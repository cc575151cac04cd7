from __future__ import annotations

from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.tracing.tracer import Backend

Remote = bool | str | None
"""Location of a trace: a server's address, True for ``CONFIG.API.HOST``, False for here, None for the
default."""


def chosen_backend(
    backend: Backend | None,
    remote: Remote,
    default: Remote,
    *,
    blocking: bool = True,
    streams: bool = False,
) -> Backend | None:
    """Return the backend that runs a trace; None to run it immediately in this process.

    Raises:
        ValueError: A non-blocking trace would run locally, or one of the arguments would have no effect.
    """
    if backend is not None and (isinstance(remote, str) or not blocking):
        given = "remote=" if isinstance(remote, str) else "blocking="
        raise ValueError(
            f"backend= says where a trace runs and whether it is waited for, so {given} beside it has no "
            "effect: leave it out, or say it to the backend"
        )
    wanted = default if remote is None else remote
    if backend is None and wanted == "local":
        raise ValueError(
            'remote="local" is for LanguageModel, whose traces can run in this process; this one runs in an '
            "engine: leave remote= out, or give a server's address"
        )
    if backend is None and wanted:
        return RemoteBackend(wanted if isinstance(wanted, str) else None, blocking=blocking, streams=streams)
    if backend is None and not blocking:
        raise ValueError("blocking=False is for traces on a server: give `remote=`, its address")
    return backend


__all__ = ["Remote", "chosen_backend"]
