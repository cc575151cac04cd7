"""``VLLM``: blocks written against a model, run inside vLLM's engine beside the requests they came with."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import torch
from vllm import EngineArgs

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.envoys.aliases import Rename
from nnsight_engine.envoys.envoy import EnvoyMap, refuse_statement
from nnsight_engine.modeling.wrapper import WrapperModule
from nnsight_engine.tracing.tracer import Backend
from nnsight_engine.vllm_backend.compat import (
    EngineLimits,
    check_supported,
    engine_options,
    own_environment,
    ray_executor,
)
from nnsight_engine.vllm_backend.edits import Edits, EngineEditingTracer
from nnsight_engine.vllm_backend.engines import AsyncEngine, SyncEngine, answer
from nnsight_engine.vllm_backend.outline import outlined
from nnsight_engine.vllm_backend.prompts import Request, as_prompt
from nnsight_engine.vllm_backend.request_tracer import RequestTracer
from nnsight_engine.vllm_backend.scanning import RequestScanner, refuse_function
from nnsight_engine.vllm_backend.stream_tracer import StreamBackend, StreamTracer
from nnsight_engine.vllm_backend.traces.model import LOGITS, SAMPLES
from nnsight_engine.vllm_backend.traces.names import Names, check_envoys
from nnsight_engine.vllm_backend.traces.points import EnginePoints, StandardNames
from nnsight_engine.wire import restore_error

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.entry import EditEntry

_HOSTS: Final[Mapping[str, type[SyncEngine | AsyncEngine]]] = {"sync": SyncEngine, "async": AsyncEngine}


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
        mode: Literal["sync", "async"] = "sync",
        dispatch: bool = False,
        rename: Rename | None = None,
        envoys: EnvoyMap = None,
        limits: EngineLimits | None = None,
        **engine_args: Any,
    ) -> None:
        """Prepare; the engine starts with ``dispatch``."""
        if mode not in _HOSTS:
            raise ValueError(f'mode is "sync" or "async", got {mode!r}')
        super().__init__(torch.nn.Module(), rename=rename)
        check_envoys(envoys)
        mine = self.__dict__
        mine["_client_names"] = Names(rename, envoys)
        mine["_edits"] = Edits()
        mine["mode"] = mode
        mine["_engine_args"] = {"model": str(model), **engine_args}
        mine["_limits"] = limits or EngineLimits()
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
            names = self.__dict__["_client_names"].write()
            own_environment()
            arguments = {**self.__dict__["_engine_args"]}
            ours = engine_options(self.__dict__["_limits"])
            ours["additional_config"] = {
                **arguments.pop("additional_config", {}),
                **ours["additional_config"],
            }
            if arguments.get("distributed_executor_backend") == "ray":
                arguments["distributed_executor_backend"] = ray_executor()
            config = EngineArgs(**arguments, **ours).create_engine_config()
            check_supported(config, traces_only=True)
            if self.__dict__["_client_names"].envoys is not None and config.parallel_config.world_size > 1:
                raise UnsupportedOptionError(
                    "envoys= is not supported with tensor_parallel_size or pipeline_parallel_size above 1 "
                    "yet: our own classes know where the parts of modules are; use one rank"
                )
            host = _HOSTS[self.__dict__["mode"]]({**arguments, **ours})
            self.__dict__["host"], self.__dict__["engine"] = host, host.inner
            entries = answer(host.call("outline_model"))
            self._update(outlined([tuple(entry) for entry in entries]))
            for name in (LOGITS, SAMPLES):
                self._add_envoy(WrapperModule(), name)
            self._equip_workers(names)
            spec = ModelSpec.from_plain(answer(host.call("describe_traces")))
            self.__dict__["_points"] = EnginePoints.on_client(self, entries[0][1], spec)

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
            self.dispatch()
        return super()._standard_points()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        self.dispatch()
        return self.host.tokenizer

    def trace(  # type: ignore[override] # a trace is a request, which has other options
        self,
        *args: Any,
        backend: Backend | None = None,
        tracer_cls: type[RequestTracer] | None = None,
        **kwargs: Any,
    ) -> RequestTracer:
        """Open a trace: ``with model.trace(prompt, temperature=0) as tracer:``.

        One token is generated unless ``max_tokens`` says otherwise.

        Args:
            *args: The prompt; without one, the block defines invokes, one request each.
            backend: What runs the compiled block.
            tracer_cls: The kind of trace.
            **kwargs: Sampling parameters, for all invokes that have none of their own; ``edits=["calm"]``,
                names of edits to run beside the blocks, see ``edit``; ``validate=True`` runs the blocks for
                nothing first, on no more tokens than they need, so that what they raise comes before the run.

        Raises:
            WithBlockNotFoundError: This is no ``with`` statement.
        """
        refuse_statement(sys._getframe(1), "trace")  # noqa: SLF001 - the caller is what it is about
        refuse_function(kwargs)
        kwargs.setdefault("max_tokens", kwargs.pop("max_new_tokens", 1))
        self.dispatch()
        tracer_cls = tracer_cls or (StreamTracer if isinstance(self.host, AsyncEngine) else RequestTracer)
        if backend is None and issubclass(tracer_cls, StreamTracer):
            backend = StreamBackend()
        return super().trace(*args, backend=backend, tracer_cls=tracer_cls, **kwargs)  # type: ignore[return-value]

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
        scanner: RequestScanner = self.trace(*args, tracer_cls=RequestScanner, **kwargs)  # type: ignore[assignment]
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
        self.dispatch()
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
        return self.own_edits.chosen(names)

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
        own = {"_edits", "_original"}
        self.__dict__.update({name: value for name, value in original.__dict__.items() if name not in own})
        return True

    # How invokes become requests.

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        if not inputs:
            raise ValueError(
                "an invoke on vLLM is a request and needs a prompt: `with tracer.invoke(prompt):`. Requests "
                "run in batches with others, so there is no invoke for all rows"
            )
        if len(inputs) > 1:
            raise TypeError(f"an invoke takes one prompt, got {len(inputs)} positional arguments")
        params, edits = kwargs.pop("sampling_params", None), kwargs.pop("edits", None)
        return (Request(as_prompt(inputs[0]), kwargs, params, edits),), {}, 1

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        requests, shared = batched_input
        return (*requests, *inputs), {**shared, **kwargs}


__all__ = ["VLLM"]
