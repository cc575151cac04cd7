"""A CPU on which vLLM compiles, cuts and dispatches as on a GPU, with what CUDA graphs ask of their pieces.

vLLM's CPU platform compiles a model in one piece and has no graphs. This one leaves the configuration as it
is on a GPU, and vLLM's own code does the rest: it cuts the model, compiles the pieces, wraps them in the
platform's graphs, and chooses a graph for each step. The graphs here run their piece each time, and keep the
contract of a replay: inputs at the addresses of the capture, outputs in its memory, and no tap in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import pytest
import torch
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

from nnsight_engine.vllm_backend.cpu_kernels.install import V2CpuPlatform
from nnsight_engine.vllm_backend.steps.graphs import CapturedTaps
from nnsight_engine.vllm_backend.steps.runner import ModelProxy
from nnsight_engine.vllm_backend.taps import CONTEXT_KEY

CAPTURE_SIZES: Final = (1, 2, 4, 8)


class GraphedMetadataBuilder(CPUAttentionMetadataBuilder):
    """Says of steps that only decode what a GPU's attention says."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class GraphedAttention(CPUAttentionBackend):
    """A CPU's attention, as part of full graphs."""

    @staticmethod
    def get_builder_cls() -> type[GraphedMetadataBuilder]:
        return GraphedMetadataBuilder


class RecordedGraph:
    """Stands for a CUDA graph of the whole model: a replay runs the model as it was called in the capture.

    Of a step it knows only what the runner has prepared for a replay, and what was in the forward context of
    the capture: no plan.
    """

    recording: ClassVar[RecordedGraph | None] = None

    def __init__(self) -> None:
        self._full: FullGraphs | None = None
        self._inputs: dict[str, Any] = {}
        self._additional: dict[str, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def capturing(cls, graph: RecordedGraph, *_: Any, **__: Any) -> Iterator[None]:
        """Record, within the context, the call of the model."""
        cls.recording = graph
        yield
        cls.recording = None

    def record(self, full: FullGraphs, inputs: dict[str, Any]) -> None:
        """Note a call of the model."""
        self._full, self._inputs = full, inputs
        self._additional = dict(get_forward_context().additional_kwargs)

    def replay(self) -> None:
        """Call the model again, for what the runner has prepared."""
        assert self._full is not None
        self._full.call(self._inputs, self._additional)


class FullGraphs:
    """Capture a V2 runner's full graphs, with stand-ins for what a GPU does."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._model = runner.model
        self._slot_mappings: dict[str, torch.Tensor] = {}
        self._attention: Any = None
        self._prepare_slots, self._prepare_attention = runner.prepare_attn, runner.model_state.prepare_attn
        runner.prepare_attn = self._noting_slots
        runner.model_state.prepare_attn = self._noting_attention
        manager = runner.cudagraph_manager
        manager._capture_descs.pop(CUDAGraphMode.PIECEWISE, None)  # noqa: SLF001 - pieces capture themselves
        with runner.handler.graphs.capturing(manager):
            manager.capture(
                ModelProxy(runner.model, forward=self._recording),
                runner.model_state,
                runner.input_buffers,
                None,
                runner.block_tables,
                runner.attn_groups,
                runner.kv_cache_config,
            )

    def _recording(self, **inputs: Any) -> Any:
        graph = RecordedGraph.recording
        if graph is not None:
            graph.record(self, inputs)
        return self._model(**inputs)

    def _noting_slots(self, batch: Any) -> Any:
        tables, slots = self._prepare_slots(batch)
        self._slot_mappings = build_slot_mappings_by_layer(slots, self._runner.kv_cache_config)
        return tables, slots

    def _noting_attention(self, *args: Any, **kwargs: Any) -> Any:
        self._attention = self._prepare_attention(*args, **kwargs)
        return self._attention

    def call(self, inputs: dict[str, Any], additional: dict[str, Any]) -> None:
        """Run the model on inputs of a capture, and put its output where the capture did."""
        num_tokens = len(inputs["positions"])
        with set_forward_context(
            self._attention,
            self._runner.vllm_config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            slot_mapping=self._slot_mappings,
        ):
            get_forward_context().additional_kwargs.update(additional)
            output: torch.Tensor = self._model(**inputs)
        self._runner.cudagraph_manager.hidden_states[:num_tokens] = output


class NoPasses(PostGradPassManager):
    def __call__(self, graph: Any) -> None:
        """Do nothing."""


class Piece:
    """A piece of the compiled model, with the contract of a CUDA graph.

    Attributes:
        num_made: How many pieces there are, of all engines in this process.
        num_replayed: How often one was run again for a batch of its captured size.
    """

    num_made: ClassVar[int] = 0
    num_replayed: ClassVar[int] = 0

    def __init__(self, runnable: Any, vllm_config: Any, runtime_mode: CUDAGraphMode, **_: Any) -> None:
        del vllm_config
        Piece.num_made += 1
        self._runnable = runnable
        self._mode = runtime_mode
        self._captured: dict[Any, tuple[list[int], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        context = get_forward_context()
        if context.cudagraph_runtime_mode is CUDAGraphMode.FULL:
            found = context.additional_kwargs.get(CONTEXT_KEY)
            assert found is None or isinstance(found, CapturedTaps), "a full graph would pass over the taps"
        if context.cudagraph_runtime_mode is not self._mode:
            return self._runnable(*args)
        step = context.additional_kwargs.pop(CONTEXT_KEY, None)  # what taps go by
        output = self._runnable(*args)
        if step is not None:
            context.additional_kwargs[CONTEXT_KEY] = step
        addresses = [one.data_ptr() for one in args if isinstance(one, torch.Tensor)]
        captured_at, kept = self._captured.setdefault(context.batch_descriptor, (addresses, output))
        if kept is output:
            return kept
        assert addresses == captured_at, "a graph reads where its inputs were when it was captured"
        Piece.num_replayed += 1
        pairs = zip(kept, output, strict=True) if isinstance(output, (tuple, list)) else [(kept, output)]
        for old, new in pairs:
            if isinstance(new, torch.Tensor) and old is not new:
                old.copy_(new)
        return kept


class GraphedCpuPlatform(V2CpuPlatform):
    """CPUs with graphs."""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "tests.e2e.graphed_platform.Piece"

    def get_global_graph_pool(self) -> None:
        """Return no pool: graphs here take no memory of their own."""

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        """Name what runs passes over the graph; vLLM's own look for kernels of a GPU."""
        return "tests.e2e.graphed_platform.NoPasses"

    @classmethod
    def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        return "tests.e2e.graphed_platform.GraphedAttention"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Do what a CPU needs, and let the mode of compiling be."""
        compilation = vllm_config.compilation_config
        mode, sizes = compilation.mode, compilation.cudagraph_capture_sizes
        super().check_and_update_config(vllm_config)
        compilation.mode, compilation.cudagraph_capture_sizes = mode, sizes
        compilation.compile_sizes = []


@contextlib.contextmanager
def graphed_engines() -> Iterator[None]:
    """Have engines that start in the context capture graphs, if their options say so."""
    warm_up = CPUWorker.compile_or_warm_up_model

    def capturing(worker: Any) -> Any:
        times = warm_up(worker)
        if worker.model_runner.cudagraph_manager.needs_capture():
            FullGraphs(worker.model_runner)
        return times

    own = current_platform.__class__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUWorker, warm_up.__name__, capturing)
        patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
        patch.setattr(torch.cuda, "graph", RecordedGraph.capturing)
        for name in ("graph_capture", "capture_pool"):
            patch.setattr(cudagraph_utils, name, lambda *_args, **_options: contextlib.nullcontext())
        patch.setattr(cudagraph_utils, "current_stream", lambda: None)
        current_platform.__class__ = GraphedCpuPlatform  # all modules share the instance
        selector._cached_get_attn_backend.cache_clear()  # noqa: SLF001 - of another platform
        try:
            yield
        finally:
            current_platform.__class__ = own
            selector._cached_get_attn_backend.cache_clear()  # noqa: SLF001 - as above
