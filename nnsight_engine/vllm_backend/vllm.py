"""``VLLM``: a model whose traced blocks run inside vLLM's engine, together with their requests."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.module_options import EnvoyMap, Rename, check_envoys, check_reached
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.remote_backend.client.backend import Remote, RemoteBackend, chosen_backend
from nnsight_engine.remote_backend.messages import name_of
from nnsight_engine.serialization import restore_error
from nnsight_engine.tracing.tracer import Backend, Session, refuse_statement
from nnsight_engine.vllm_backend.cpu_plugin import check_vllm
from nnsight_engine.vllm_backend.edits import Edits, EngineEditingTracer
from nnsight_engine.vllm_backend.module_tree import ClientNames, OutlineEntry, outlined
from nnsight_engine.vllm_backend.prompts import INPUT_NAMES, Request, as_prompt, refuse_function, with_images
from nnsight_engine.vllm_backend.remote import VLLMDialect, local_tokenizer
from nnsight_engine.vllm_backend.rpc_results import common_result
from nnsight_engine.vllm_backend.traces.points import EnginePoints, StandardNames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_engine.remote_backend.client.http import Transport
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.engines import AsyncEngine, SyncEngine
    from nnsight_engine.vllm_backend.traces.context import EditEntry
    from nnsight_engine.vllm_backend.vllm_tracer import RequestScanner, RequestTracer

_MODES = ("sync", "async")


class VLLM(StandardNames):
    """A model in vLLM's engine: ``with model.trace("Hello", max_tokens=5) as tracer:``.

    A block runs in the engine's workers, on the rows of its own request, while other requests share the
    steps. The values it saves are assigned to the user's variables. Modules are vLLM's: their values are
    flat, ``[tokens, width]``; ``print(model)`` lists them. In addition there are ``model.logits``,
    ``[1, vocabulary]``, and ``model.samples``, ``[1, 1]``, once per generated token, and the standard
    points of ``LanguageModel``, as ``[tokens, ...]``: ``model.layers[3].attn.heads``, ``model.points``.

    Args:
        model: A model's name or folder, as for vLLM.
        remote: Where traces run by default: a server's address, or True for the address in
            ``CONFIG.API.HOST``. vLLM need not be installed on the client then.
        mode: ``"sync"``: a trace's requests have finished when its ``with`` statement ends. ``"async"``: they
            run while the caller iterates: ``async for output in tracer.backend(): output.saves``.
        dispatch: Start the engine now instead of with the first trace.
        rename: Additional names for modules and standard names, ``{"layers": "blocks"}``, valid in blocks
            too.
        envoys: Classes that represent modules in blocks: one subclass of ``Envoy`` for all modules, or a
            mapping from the class of vLLM's module. They are sent to the workers, as source if the workers do
            not have them.
        limits: Limits on the resources of blocks.
        **engine_args: vLLM's engine arguments: ``tensor_parallel_size``, ``max_model_len`` and so on. On a
            CPU the model is compiled only with ``enforce_eager=False``, since that takes minutes.

    Attributes:
        engine: vLLM's engine, ``vllm.LLM`` or ``AsyncLLM``; None before it starts.
        host: This process's interface to the engine.

    Raises:
        UnsupportedOptionError: An option is set under which blocks could be silently wrong.
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
        """Prepare the model; the engine starts now only with ``dispatch``."""
        if mode not in _MODES:
            raise ValueError(f'mode is "sync" or "async", got {mode!r}')
        super().__init__(torch.nn.Module(), rename=rename)
        check_envoys(envoys, Envoy)
        mine = self.__dict__  # past ``__setattr__`` of envoys
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
        """Start the engine, fetch the model's module tree, and send names and edits to the workers.

        Does nothing if the engine has started; shuts it down if a later part fails.
        """
        if self._follows_original():
            return
        with self.__dict__["_starting"]:
            if self.dispatched:
                return
            names: ClientNames = self.__dict__["_client_names"]
            message = names.write()
            check_vllm()
            host = _starting().start(
                self.__dict__["_engine_args"],
                self.__dict__["_limits"],
                self.__dict__["mode"],
                has_envoys=names.envoys is not None,
            )
            self.__dict__["host"], self.__dict__["engine"] = host, host.inner
            try:
                entries = [tuple(entry) for entry in common_result(host.call("outline_model"))]
                self._set_description(
                    entries, ModelSpec.from_plain(common_result(host.call("describe_traces")))
                )
                if message is not None:
                    self.call_workers("adopt_names", message)
                self.own_edits.book.install(self)
            except BaseException:
                self.shutdown()
                raise

    def _set_description(self, entries: Sequence[OutlineEntry], spec: ModelSpec) -> None:
        """Build the module tree and the points from the outline and the spec of an engine."""
        self._update(outlined(entries))
        self._add_values()
        points = self.__dict__["_points"] = EnginePoints.on_client(self, spec)
        check_reached(self, points.name_parts())
        self.__dict__["_is_known"] = True

    def _fetch_description(self, transport: Transport) -> None:
        """Get the module tree and the points from a server, once; a copy takes them from its original."""
        if self.original is not None:
            self.original._fetch_description(transport)  # noqa: SLF001 - same class
            self._follow()
            return
        with self.__dict__["_starting"]:
            if not self.__dict__["_is_known"]:
                plain = transport.outline()
                entries = [tuple(entry) for entry in plain["outline"]]
                self._set_description(entries, ModelSpec.from_plain(plain["spec"]))

    def _prepare(self) -> None:
        """Get the model's description from its server, or from its engine, which starts if it has not."""
        if self.__dict__["remote"]:
            self._fetch_description(self._remote_backend().transport)
        else:
            self.dispatch()

    def _remote_backend(self) -> RemoteBackend:
        backend = chosen_backend(None, None, self.__dict__["remote"])
        assert isinstance(backend, RemoteBackend)  # noqa: S101 - `remote` is set
        return backend

    def shutdown(self) -> None:
        """Shut the engine down; the next trace starts a new one."""
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
        """Return the points; starts the engine if necessary, since the engine describes them."""
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

    def trace(  # type: ignore[override] # a trace is a request and has other options
        self,
        *args: Any,
        remote: Remote = None,
        blocking: bool = True,
        backend: Backend | None = None,
        tracer_cls: type[RequestTracer] | None = None,
        **kwargs: Any,
    ) -> InterleavingTracer:
        """Open a trace: ``with model.trace(prompt, temperature=0) as tracer:``.

        Generates one token unless ``max_tokens`` is given.

        Args:
            *args: The prompt, as text or tokens. Without one, the block defines invokes, one request each. A
                tokenizer's result may be passed by name, ``trace(**tokenizer(text))``.
            remote: Where the trace runs: a server's address, True for the address in ``CONFIG.API.HOST``,
                False for the local engine.
            blocking: Wait until the trace has ended. Otherwise, on a server, it is a job, see
                ``RemoteBackend``.
            backend: Runs the compiled block.
            tracer_cls: The tracer's class.
            **kwargs: Sampling parameters for all invokes, by name or as ``sampling_params=``. Names override
                ``sampling_params=``, and an invoke's own parameters override both. ``edits=["calm"]`` names
                edits to run with the blocks, see ``edit``. ``lora_request=`` is an adapter, as vLLM's
                ``LoRARequest``; an invoke may have its own. ``validate=True`` first runs the blocks on as few
                tokens as they need, so that errors are raised before the actual run.

        Raises:
            WithBlockNotFoundError: The call is not in a ``with`` statement.
        """
        refuse_statement(sys._getframe(1), "trace")  # noqa: SLF001 - it inspects the caller
        refuse_function(kwargs)
        streams = blocking and self.__dict__["mode"] == "async"
        backend = chosen_backend(backend, remote, self.__dict__["remote"], blocking=blocking, streams=streams)
        if isinstance(backend, RemoteBackend):
            self._fetch_description(backend.transport)
            return super().trace(*args, backend=backend, **kwargs)
        self.dispatch()
        chosen, backend = _starting().tracing_with(self.host, tracer_cls, backend)
        return super().trace(*args, backend=backend, tracer_cls=chosen, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> InterleavingTracer:
        """Open a trace, as ``with model.trace(prompt, max_new_tokens=5):`` does.

        Raises:
            WithBlockNotFoundError: The call is not in a ``with`` statement.
        """
        refuse_statement(sys._getframe(1), "generate")  # noqa: SLF001 - it inspects the caller
        return self.trace(*args, **kwargs)

    def session(
        self, *, remote: Remote = None, blocking: bool = True, backend: Backend | None = None
    ) -> Session:
        """Group traces: ``with model.session(remote=True):`` sends all of them as one request.

        Only the session has a ``remote`` argument. A variable assigned in one trace is available in the next,
        saved or not.
        """
        refuse_statement(sys._getframe(1), "session")  # noqa: SLF001 - it inspects the caller
        chosen = chosen_backend(backend, remote, self.__dict__["remote"], blocking=blocking)
        return super().session(backend=chosen)

    def to_model_key(self) -> str:
        """Return the name by which a server knows this model, for ``RemoteBackend(model_key=...)``."""
        return name_of(self.__dict__["_engine_args"]["model"])

    def remote_dialect(self) -> VLLMDialect:
        """Return the encoder of this model's traces for a server.

        Raises:
            ValueError: The model has ``rename`` or ``envoys``, which the server does not know.
        """
        names: ClientNames = self.__dict__["_client_names"]
        if names.rename or names.envoys is not None:
            raise ValueError(
                "rename= and envoys= of VLLM are not supported in remote traces yet: the server's workers "
                "know vLLM's names only. Use a model without them"
            )
        engine_args = self.__dict__["_engine_args"]
        return VLLMDialect(self, engine_args["model"], engine_args.get("revision") or "")

    def scan(  # type: ignore[override] # returns a scanner
        self, *args: Any, **kwargs: Any
    ) -> RequestScanner:
        """Open a trace that returns shapes only: ``with model.scan(prompt):``.

        vLLM cannot run without real values, so the block runs on real values, for one token unless
        ``max_tokens`` is given. Saved tensors are returned on torch's meta device, without data. So are the
        values of all modules, which envoys then also offer outside a trace.

        Args:
            *args: The prompt, as for ``trace``.
            **kwargs: As for ``trace``.
        """
        refuse_statement(sys._getframe(1), "scan")  # noqa: SLF001 - it inspects the caller
        scanner: RequestScanner = self.trace(*args, remote=False, tracer_cls=_starting().SCANNER, **kwargs)  # type: ignore[assignment]
        return scanner

    def edit(
        self, *, name: str | None = None, inplace: bool = False, backend: Backend | None = None
    ) -> EngineEditingTracer:
        """Store a block that takes part in later traces: ``with model.edit() as edited:``.

        The block runs on the rows of each request, before the request's own block, once for every step, with
        the values that its variables have now. With a name, the engine keeps it, and ``edits=[name]`` also
        selects it for a trace or an invoke of this model. Without a name, it is sent with each request.

        Args:
            name: Name under which the engine keeps the edit until ``remove_edit``.
            inplace: Apply it to all traces of this model instead of those of a copy.
            backend: Receives the compiled block.

        Raises:
            ValueError: An edit of that name exists.
            EditLimitError: The engine's limit on edits is reached.
        """
        refuse_statement(sys._getframe(1), "edit")  # noqa: SLF001 - it inspects the caller
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
        """Stop applying edits to all traces of this model; the engine keeps those with names."""
        self.own_edits.always.clear()

    def remove_edit(self, name: str) -> None:
        """Remove an edit from the engine; requests that already run it continue with it.

        Raises:
            ValueError: There is no edit of that name.
        """
        self.own_edits.remove(self, name)

    def chosen_edits(self, names: Any) -> list[EditEntry]:
        """Return the edits for a request of this model that selects these names.

        Raises:
            ValueError: There is no edit of one of the names.
        """
        return [edit.entry for edit in self.own_edits.chosen(names)]

    def call_workers(self, method: str, *args: Any) -> None:
        """Call a method on every worker.

        Raises:
            BaseException: The error of the first worker that failed.
        """
        for failure in self.host.call(method, *args):
            if failure is not None:
                raise restore_error(failure)

    @property
    def original(self) -> VLLM | None:
        """The model of which this one is an edited copy, and which owns the engine; None for the original."""
        original: VLLM | None = self.__dict__.get("_original")
        return original

    def _shallow_copy(self) -> Self:
        copied = super()._shallow_copy()
        copied.__dict__["_original"] = self.original or self
        copied.__dict__["_edits"] = self.own_edits.copied()
        return copied

    def _follows_original(self) -> bool:
        """If this is a copy, dispatch the original and copy its state; return whether it is a copy.

        The original's engine may have been shut down and started again since the last copy.
        """
        original = self.original
        if original is None:
            return False
        original.dispatch()
        self._follow()
        return True

    def _follow(self) -> None:
        """Copy the original's state into this copy, except for what each model has of its own."""
        original = self.original
        assert original is not None  # noqa: S101 - this is a copy
        per_view = {"_edits", "_original"}
        self.__dict__.update(
            {name: value for name, value in original.__dict__.items() if name not in per_view}
        )

    # Conversion of invokes to requests.

    def _has_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(args) or any(kwargs.get(name) is not None for name in INPUT_NAMES)

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Return an invoke's input as a ``Request``, without keyword arguments, and its number of rows, 1."""
        if not self._has_input(inputs, kwargs):
            raise ValueError(
                "an invoke on vLLM is a request and needs a prompt: `with tracer.invoke(prompt):`. Requests "
                "run in batches with others, so there is no invoke for all rows"
            )
        tokens = {name: kwargs.pop(name) for name in INPUT_NAMES if name in kwargs}
        prompt = with_images(as_prompt(*inputs, **tokens), kwargs.pop("images", None))
        request_options = [kwargs.pop(name, None) for name in ("sampling_params", "edits", "lora_request")]
        return (Request(prompt, kwargs, *request_options),), {}, 1

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add an invoke's request to those before; arguments by name are the trace's."""
        requests, shared = batched_input
        return (*requests, *inputs), {**shared, **kwargs}


def _starting() -> Any:
    """Return the module that starts engines; imported late, since a remote client may not have vLLM."""
    return importlib.import_module("nnsight_engine.vllm_backend.engine_start")
