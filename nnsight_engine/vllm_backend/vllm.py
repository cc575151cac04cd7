"""``VLLM``: blocks written against a model, run inside vLLM's engine beside the requests they came with."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.envoys.aliases import Rename
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.envoy_map import EnvoyMap, check_envoys
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.envoys.tracers.session import Session
from nnsight_engine.modeling.wrapper import WrapperModule
from nnsight_engine.remote_backend.backend import Remote, RemoteBackend, chosen_backend
from nnsight_engine.remote_backend.identity import name_of
from nnsight_engine.serialization import restore_error
from nnsight_engine.tracing.tracer import Backend, refuse_statement
from nnsight_engine.vllm_backend.client_names import ClientNames
from nnsight_engine.vllm_backend.edits import Edits, EngineEditingTracer
from nnsight_engine.vllm_backend.model_outline import OutlineEntry, outlined
from nnsight_engine.vllm_backend.prompts import INPUT_NAMES, Request, as_prompt, refuse_function
from nnsight_engine.vllm_backend.remote import VLLMDialect, local_tokenizer
from nnsight_engine.vllm_backend.rpc_results import answer
from nnsight_engine.vllm_backend.traces.points import LOGITS, SAMPLES, EnginePoints, StandardNames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_engine.remote_backend.transport import Transport
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.engines import AsyncEngine, SyncEngine
    from nnsight_engine.vllm_backend.request_tracer import RequestTracer
    from nnsight_engine.vllm_backend.scanning import RequestScanner
    from nnsight_engine.vllm_backend.traces.entry import EditEntry

_MODES = ("sync", "async")


class VLLM(StandardNames):
    """A model in vLLM's engine: ``with model.trace("Hello", max_tokens=5) as tracer:``.

    A block runs in the engine's workers, on the rows of its own request, while other requests share the
    steps. What it saves comes back into the user's variables. Modules are vLLM's: their values are flat,
    ``[tokens, width]``, and ``print(model)`` shows which there are. Behind them, ``model.logits.output`` is
    ``[1, vocabulary]`` and ``model.samples.output`` ``[1, 1]``, once per generated token. Beside the modules
    are the standard points of ``LanguageModel``, as ``[tokens, ...]``: ``model.layers[3].attn.heads``,
    ``model.points``.

    Args:
        model: A model's name or folder, as vLLM takes it.
        remote: Where traces run unless they say otherwise: a server's address, True for that of
            ``CONFIG.API.HOST``. vLLM need not be installed here then.
        mode: ``"sync"``: a trace's requests have ended when its ``with`` statement has. ``"async"``: they run
            while somebody iterates, ``async for output in tracer.backend(): output.saves``.
        dispatch: Start the engine now; otherwise with the first trace.
        rename: Further names for modules and for standard names, ``{"layers": "blocks"}``, in blocks too.
        envoys: Classes that stand for modules in blocks: a subclass of ``Envoy`` for all, or by the class of
            vLLM's module. They travel to the workers, as source where these do not have them.
        limits: What blocks may use.
        **engine_args: vLLM's engine arguments: ``tensor_parallel_size``, ``max_model_len`` and so on.

    Attributes:
        engine: vLLM's own, ``vllm.LLM`` or ``AsyncLLM``; None before it starts.
        host: What this process asks of it.

    Raises:
        UnsupportedOptionError: An option under which blocks could be silently wrong.
    """

    engine: Any
    host: SyncEngine | AsyncEngine

    def __init__(
        self,
        model: str,
        *,
        remote: Remote = None,
        mode: Literal["sync", "async"] = "sync",
        dispatch: bool = False,
        rename: Rename | None = None,
        envoys: EnvoyMap = None,
        limits: EngineLimits | None = None,
        **engine_args: Any,
    ) -> None:
        """Prepare; the engine starts with ``dispatch``."""
        if mode not in _MODES:
            raise ValueError(f'mode is "sync" or "async", got {mode!r}')
        super().__init__(torch.nn.Module(), rename=rename)
        check_envoys(envoys, Envoy)
        mine = self.__dict__
        mine["remote"] = remote
        mine["_is_known"] = False
        mine["_client_names"] = ClientNames(rename, envoys)
        mine["_edits"] = Edits()
        mine["mode"] = mode
        mine["_engine_args"] = {"model": str(model), **engine_args}
        mine["_limits"] = limits
        mine["_starting"] = threading.RLock()
        mine["engine"] = None
        if dispatch:
            self.dispatch()

    def dispatch(self) -> None:
        """Start the engine and learn the model's modules; nothing if that was done."""
        if self._follows_original():
            return
        with self.__dict__["_starting"]:
            if self.dispatched:
                return
            names: ClientNames = self.__dict__["_client_names"]
            message = names.write()
            host = _starting().start(
                self.__dict__["_engine_args"],
                self.__dict__["_limits"],
                self.__dict__["mode"],
                has_envoys=names.envoys is not None,
            )
            self.__dict__["host"], self.__dict__["engine"] = host, host.inner
            entries = [tuple(entry) for entry in answer(host.call("outline_model"))]
            self._know(entries, ModelSpec.from_plain(answer(host.call("describe_traces"))))
            self._equip_workers(message)

    def _know(self, entries: Sequence[OutlineEntry], spec: ModelSpec) -> None:
        """Have the tree and the points of the engine's model."""
        self._update(outlined(entries))
        for name in (LOGITS, SAMPLES):
            self._add_envoy(WrapperModule(), name)
        self.__dict__["_points"] = EnginePoints.on_client(self, entries[0][1], spec)
        self.__dict__["_is_known"] = True

    def _learn(self, transport: Transport) -> None:
        """Have the tree and the points of a server's model, unless some engine's are known already."""
        if self.original is not None:
            self.original._learn(transport)  # noqa: SLF001 - a model of ours
            self._follow()
            return
        with self.__dict__["_starting"]:
            if not self.__dict__["_is_known"]:
                plain = transport.outline()
                entries = [tuple(entry) for entry in plain["outline"]]
                self._know(entries, ModelSpec.from_plain(plain["spec"]))

    def _prepare(self) -> None:
        """Know the model's modules, from where its traces run."""
        if self.__dict__["remote"]:
            self._learn(self._remote_backend().transport)
        else:
            self.dispatch()

    def _remote_backend(self) -> RemoteBackend:
        backend = chosen_backend(None, None, self.__dict__["remote"])
        assert isinstance(backend, RemoteBackend)  # noqa: S101 - there is a server
        return backend

    def _equip_workers(self, names: bytes | None) -> None:
        """Have an engine that has just started know this model's names and edits, or end it."""
        try:
            if names is not None:
                self.ask_workers("adopt_names", names)
            self.own_edits.book.install(self)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """End the engine; the next trace starts another."""
        if self.original is not None:
            self.original.shutdown()
            return
        with self.__dict__["_starting"]:
            host, self.__dict__["engine"] = self.__dict__.pop("host", None), None
            if host is not None:
                host.close()

    @property
    def dispatched(self) -> bool:
        """Whether the engine has started."""
        if self.original is not None:
            return self.original.dispatched
        return self.engine is not None

    def _standard_points(self) -> EnginePoints | None:
        """Return the points; the engine knows them, so it starts if need be."""
        if "engine" in self.__dict__:
            self._prepare()
        return super()._standard_points()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        if self.__dict__["remote"] and not self.dispatched:
            return local_tokenizer(self)
        self.dispatch()
        return self.host.tokenizer

    def trace(  # type: ignore[override] # a trace is a request, which has other options
        self,
        *args: Any,
        remote: Remote = None,
        blocking: bool = True,
        backend: Backend | None = None,
        tracer_cls: type[RequestTracer] | None = None,
        **kwargs: Any,
    ) -> InterleavingTracer:
        """Open a trace: ``with model.trace(prompt, temperature=0) as tracer:``.

        One token is generated unless ``max_tokens`` says otherwise.

        Args:
            *args: The prompt, text or tokens; without one, the block defines invokes, one request each. What
                a tokenizer returns may come by name, ``trace(**tokenizer(text))``.
            remote: Where it runs: a server's address, True for that of ``CONFIG.API.HOST``, False for here.
            blocking: Wait for its end; otherwise, on a server, it is a job, see ``RemoteBackend``.
            backend: What runs the compiled block.
            tracer_cls: The kind of trace.
            **kwargs: Sampling parameters for all invokes, by name or as ``sampling_params=``, over which
                names count; an invoke's own count over both. ``edits=["calm"]``, names of edits to run
                beside the blocks, see ``edit``; ``validate=True`` runs the blocks for nothing first, on no
                more tokens than they need, so that what they raise comes before the run.

        Raises:
            WithBlockNotFoundError: This is no ``with`` statement.
        """
        refuse_statement(sys._getframe(1), "trace")  # noqa: SLF001 - the caller is what it is about
        refuse_function(kwargs)
        streams = blocking and self.__dict__["mode"] == "async"
        backend = chosen_backend(backend, remote, self.__dict__["remote"], blocking=blocking, streams=streams)
        if isinstance(backend, RemoteBackend):
            self._learn(backend.transport)
            return super().trace(*args, backend=backend, **kwargs)
        self.dispatch()
        chosen, backend = _starting().tracing_with(self.host, tracer_cls, backend)
        return super().trace(*args, backend=backend, tracer_cls=chosen, **kwargs)

    def session(
        self, *, remote: Remote = None, blocking: bool = True, backend: Backend | None = None
    ) -> Session:
        """Group traces: ``with model.session(remote=True):`` sends all of them as one request.

        Only the session says where it runs. What one trace assigned the next can use, saved or not.
        """
        refuse_statement(sys._getframe(1), "session")  # noqa: SLF001 - the caller is what it is about
        chosen = chosen_backend(backend, remote, self.__dict__["remote"], blocking=blocking)
        return super().session(backend=chosen)

    def to_model_key(self) -> str:
        """Return what a server knows this model by, for ``RemoteBackend(model_key=...)``."""
        return name_of(self.__dict__["_engine_args"]["model"])

    def remote_dialect(self) -> VLLMDialect:
        """Return how this model's traces are said to a server.

        Raises:
            ValueError: The server cannot know the modules by the client's names.
        """
        names: ClientNames = self.__dict__["_client_names"]
        if names.rename or names.envoys is not None:
            raise ValueError(
                "rename= and envoys= of VLLM are not for remote traces yet: the server's workers know "
                "vLLM's names. Use a model without them"
            )
        given = self.__dict__["_engine_args"]
        return VLLMDialect(self, given["model"], given.get("revision") or "")

    def scan(  # type: ignore[override] # another kind of scan
        self, *args: Any, **kwargs: Any
    ) -> RequestScanner:
        """Open a trace for shapes alone: ``with model.scan(prompt):``.

        vLLM runs on real values only, so the block runs on those, for one token unless ``max_tokens`` says
        otherwise. What it saves comes home without numbers, on torch's meta device, and so do the values of
        all modules, which envoys then give outside a trace as well.

        Args:
            *args: The prompt, as for ``trace``.
            **kwargs: As for ``trace``.
        """
        refuse_statement(sys._getframe(1), "scan")  # noqa: SLF001 - the caller is what it is about
        scanner: RequestScanner = self.trace(*args, remote=False, tracer_cls=_starting().SCANNER, **kwargs)  # type: ignore[assignment]
        return scanner

    def edit(
        self, *, name: str | None = None, inplace: bool = False, backend: Backend | None = None
    ) -> EngineEditingTracer:
        """Keep a block that takes part in traces: ``with model.edit() as edited:``.

        It runs on the rows of each request, before the request's own block, once for every step, with the
        values that its variables have now. With a name it stays in the engine, and ``edits=[name]`` chooses
        it for a trace or an invoke of this model too; without one it is sent with each request.

        Args:
            name: What to keep it as, until ``remove_edit``.
            inplace: Let it take part in all traces of this model, rather than in those of a copy.
            backend: What takes the compiled block.

        Raises:
            ValueError: There is another edit of that name.
            EditLimitError: The engine keeps as many as it may.
        """
        refuse_statement(sys._getframe(1), "edit")  # noqa: SLF001 - the caller is what it is about
        self._prepare()
        return EngineEditingTracer(self, name=name, inplace=inplace, backend=backend)

    @property
    def edits(self) -> list[str]:
        """The names of the edits that the engine keeps."""
        return self.own_edits.book.names

    @property
    def own_edits(self) -> Edits:
        """The edits that take part in this model's traces, and those that the engine keeps."""
        edits: Edits = self.__dict__["_edits"]
        return edits

    def clear_edits(self) -> None:
        """Let no edit take part in all traces of this model any more; the engine keeps those with names."""
        self.own_edits.always.clear()

    def remove_edit(self, name: str) -> None:
        """Take an edit out of the engine; requests that run it go on.

        Raises:
            ValueError: There is none of that name.
        """
        self.own_edits.remove(self, name)

    def chosen_edits(self, names: Any) -> list[EditEntry]:
        """Return the edits of a request of this model that names these.

        Raises:
            ValueError: There is none of one of the names.
        """
        return [edit.entry for edit in self.own_edits.chosen(names)]

    def ask_workers(self, method: str, *args: Any) -> None:
        """Have every worker do something.

        Raises:
            BaseException: What went wrong in one of them.
        """
        for failure in self.host.call(method, *args):
            if failure is not None:
                raise restore_error(failure)

    @property
    def original(self) -> VLLM | None:
        """The model that this one is an edited copy of; it has the engine."""
        original: VLLM | None = self.__dict__.get("_original")
        return original

    def _shallow_copy(self) -> Self:
        copied = super()._shallow_copy()
        copied.__dict__["_original"] = self.original or self
        copied.__dict__["_edits"] = self.own_edits.copied()
        return copied

    def _follows_original(self) -> bool:
        """Have what the original has, if this is a copy; its engine may have been ended and started since."""
        original = self.original
        if original is None:
            return False
        original.dispatch()
        self._follow()
        return True

    def _follow(self) -> None:
        """Have what the original has, but for edits."""
        original = self.original
        assert original is not None  # noqa: S101 - this is a copy
        own = {"_edits", "_original"}
        self.__dict__.update({name: value for name, value in original.__dict__.items() if name not in own})

    # How invokes become requests.

    def _has_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(args) or any(kwargs.get(name) is not None for name in INPUT_NAMES)

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        if not self._has_input(inputs, kwargs):
            raise ValueError(
                "an invoke on vLLM is a request and needs a prompt: `with tracer.invoke(prompt):`. Requests "
                "run in batches with others, so there is no invoke for all rows"
            )
        tokens = {name: kwargs.pop(name) for name in INPUT_NAMES if name in kwargs}
        params, edits = kwargs.pop("sampling_params", None), kwargs.pop("edits", None)
        return (Request(as_prompt(*inputs, **tokens), kwargs, params, edits),), {}, 1

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        requests, shared = batched_input
        return (*requests, *inputs), {**shared, **kwargs}


def _starting() -> Any:
    """Return what starts engines; it needs vLLM, which a client of a server need not have."""
    return importlib.import_module("nnsight_engine.vllm_backend.engine_start")


__all__ = ["VLLM"]
