"""Models whose traces can run on a server: ``model.trace(prompt, remote="http://host:8000")``."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.modeling.mixins.meta import MetaMixin
from nnsight_engine.remote_backend.client.backend import Remote, chosen_backend
from nnsight_engine.remote_backend.messages import name_of
from nnsight_engine.remote_backend.sending.outgoing_trace import TransformersDialect
from nnsight_engine.tracing.tracer import Backend, Session, refuse_statement

_HERE: Final = "local"
"""The value of ``remote=`` for running in this process, with all the steps of a remote run."""

_LIBRARIES: Final = ("nnsight_engine.", "builtins", "abc", "typing")


class RemoteableMixin(MetaMixin):
    """A model whose structure is known locally, and whose weights may be on a server.

    Attributes:
        remote: The default for traces that do not specify where they run.
    """

    def __init__(self, source: Any, *args: Any, remote: Remote = None, **kwargs: Any) -> None:
        """Wrap a module, or load one.

        Args:
            source: A module, or an argument of the class's loader.
            *args: Passed to the loader.
            remote: The default place where traces run: a server's address, True for that of
                ``CONFIG.API.HOST``. No weights are needed then.
            **kwargs: See ``MetaMixin``.
        """
        attributes = self.__dict__
        attributes["remote"] = remote
        attributes["_own_names"] = kwargs.get("rename")
        super().__init__(source, *args, **kwargs)

    def trace(
        self,
        *args: Any,
        remote: Remote = None,
        blocking: bool = True,
        backend: Backend | None = None,
        **kwargs: Any,
    ) -> InterleavingTracer:
        """Open a trace, see ``Envoy.trace``.

        Args:
            *args: The input; without one, the block defines invokes.
            remote: Where it runs: a server's address, True for that of ``CONFIG.API.HOST``, False for
                locally; ``"local"`` sends it to this process like to a server, to check that it can be
                serialized.
            blocking: Whether to wait for its end; otherwise it is a job, see ``RemoteBackend``.
            backend: The backend that runs the compiled block; ``RemoteBackend(...)`` has more options than
                ``remote``.
            **kwargs: See ``Envoy.trace``.
        """
        refuse_statement(sys._getframe(1), "trace")  # noqa: SLF001 - checks the caller's statement
        chosen = self._chosen(backend, remote, blocking=blocking)
        return super().trace(*args, backend=chosen, **kwargs)

    def session(
        self, *, remote: Remote = None, blocking: bool = True, backend: Backend | None = None
    ) -> Session:
        """Group traces: ``with model.session(remote=True):`` sends all of them as one request.

        Only the session specifies where it runs. Values assigned in one trace can be used in the next, on the
        server too.
        """
        refuse_statement(sys._getframe(1), "session")  # noqa: SLF001 - checks the caller's statement
        return super().session(backend=self._chosen(backend, remote, blocking=blocking))

    def _chosen(self, backend: Backend | None, remote: Remote, *, blocking: bool) -> Backend | None:
        """Return the backend of a trace, by ``remote`` or this model's default; None runs it here."""
        default: Remote = self.__dict__["remote"]
        if backend is None and (default if remote is None else remote) == _HERE:
            # Imported lazily, since it depends on this package.
            in_process = importlib.import_module("nnsight_engine.local_engine.in_process")
            chosen: Backend = in_process.InProcessBackend(self, blocking=blocking)
            return chosen
        return chosen_backend(backend, remote, default, blocking=blocking)

    def to_model_key(self) -> str:
        """Return the name by which a server finds this model, for ``RemoteBackend(model_key=...)``.

        Raises:
            ValueError: The model was created from a module, which has no name.
        """
        source = self.__dict__.get("repo_id")
        if not source:
            raise ValueError(
                "a server finds a model by its name, and this one was created from a module without a name: "
                "load it by name"
            )
        return name_of(source)

    def remote_dialect(self) -> TransformersDialect:
        """Return the dialect in which this model's traces are sent to a server.

        Raises:
            ValueError: The model uses classes that the server does not have.
        """
        kinds = {type(envoy) for envoy in self._root._walk()}  # noqa: SLF001 - an envoy of ours
        bases = {
            base for kind in kinds for base in kind.__mro__ if not base.__module__.startswith(_LIBRARIES)
        }
        if bases:
            names = ", ".join(sorted(cls.__name__ for cls in bases))
            raise ValueError(
                f"a server has only this library's classes of models and envoys, and this model has {names}: "
                "use LanguageModel itself, without envoys="
            )
        attributes = self.__dict__
        return TransformersDialect(
            self, attributes.get("repo_id") or "", attributes.get("revision"), attributes["_own_names"]
        )
