"""``VLLM``: blocks written against a model, run inside vLLM's engine beside the requests they came with."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, Literal, NoReturn

import torch
from vllm import EngineArgs

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.modeling.wrapper import WrapperModule
from nnsight_engine.tracing.tracer import Backend
from nnsight_engine.vllm_backend.compat import (
    EngineLimits,
    check_supported,
    engine_options,
    own_environment,
    ray_executor,
)
from nnsight_engine.vllm_backend.engines import AsyncEngine, SyncEngine, answer
from nnsight_engine.vllm_backend.outline import outlined
from nnsight_engine.vllm_backend.prompts import Request, as_prompt
from nnsight_engine.vllm_backend.request_tracer import RequestTracer
from nnsight_engine.vllm_backend.stream_tracer import StreamBackend, StreamTracer
from nnsight_engine.vllm_backend.traces.model import LOGITS, SAMPLES
from nnsight_engine.vllm_backend.traces.points import EnginePoints, StandardNames

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
        rename: Further names for modules.
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
        rename: Mapping[str, Any] | None = None,
        limits: EngineLimits | None = None,
        **engine_args: Any,
    ) -> None:
        """Prepare; the engine starts with ``dispatch``."""
        if mode not in _HOSTS:
            raise ValueError(f'mode is "sync" or "async", got {mode!r}')
        super().__init__(torch.nn.Module(), rename=rename)
        mine = self.__dict__
        mine["mode"] = mode
        mine["_engine_args"] = {"model": str(model), **engine_args}
        mine["_limits"] = limits or EngineLimits()
        mine["_starting"] = threading.RLock()
        mine["engine"] = None
        if dispatch:
            self.dispatch()

    def dispatch(self) -> None:
        """Start the engine and learn the model's modules; nothing if that was done."""
        with self.__dict__["_starting"]:
            if self.dispatched:
                return
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
            host = _HOSTS[self.__dict__["mode"]]({**arguments, **ours})
            self.__dict__["host"], self.__dict__["engine"] = host, host.inner
            entries = answer(host.call("outline_model"))
            self._update(outlined([tuple(entry) for entry in entries]))
            for name in (LOGITS, SAMPLES):
                self._add_envoy(WrapperModule(), name)
            spec = ModelSpec.from_plain(answer(host.call("describe_traces")))
            self.__dict__["_points"] = EnginePoints.on_client(self, entries[0][1], spec)

    def shutdown(self) -> None:
        """End the engine; the next trace starts another."""
        with self.__dict__["_starting"]:
            host, self.__dict__["engine"] = self.__dict__.pop("host", None), None
            if host is not None:
                host.close()

    @property
    def dispatched(self) -> bool:
        """Whether the engine has started."""
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
            **kwargs: Sampling parameters, for all invokes that have none of their own.
        """
        if kwargs.pop("validate", False) or kwargs.pop("scan", False):
            raise NotImplementedError("validate=True is not supported on vLLM yet: leave it out")
        kwargs.setdefault("max_tokens", kwargs.pop("max_new_tokens", 1))
        self.dispatch()
        if isinstance(self.host, AsyncEngine):
            backend, tracer_cls = backend or StreamBackend(), tracer_cls or StreamTracer
        tracer_cls = tracer_cls or RequestTracer
        return super().trace(*args, backend=backend, tracer_cls=tracer_cls, **kwargs)  # type: ignore[return-value]

    def scan(self, *args: Any, fn: Any = None, **kwargs: Any) -> NoReturn:
        """Refuse: the engine runs on real values only."""
        raise NotImplementedError(
            "scan() is not supported on vLLM yet: run the block once on one token instead"
        )

    def edit(self, *, inplace: bool = False, backend: Backend | None = None) -> NoReturn:
        """Refuse: a block cannot stay in the engine yet."""
        raise NotImplementedError(
            "edit() is not supported on vLLM yet: write the edit into each trace's block"
        )

    # How invokes become requests.

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        if not inputs:
            raise ValueError(
                "an invoke on vLLM is a request and needs a prompt: `with tracer.invoke(prompt):`. Requests "
                "run in batches with others, so there is no invoke for all rows"
            )
        if len(inputs) > 1:
            raise TypeError(f"an invoke takes one prompt, got {len(inputs)} positional arguments")
        params = kwargs.pop("sampling_params", None)
        return (Request(as_prompt(inputs[0]), kwargs, params),), {}, 1

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        requests, shared = batched_input
        return (*requests, *inputs), {**shared, **kwargs}


__all__ = ["VLLM"]
