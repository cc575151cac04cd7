"""The worker class that vLLM loads by name in every worker process; its public methods are RPCs.

Before the model is loaded, the class of vLLM's runner is replaced by a subclass with ``RunnerMixin`` in
front.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

from vllm.lora.request import LoRARequest

from nnsight_engine.core.tensors import hash_of_weights
from nnsight_engine.serialization import encode_error
from nnsight_engine.vllm_backend.compat import platform_worker_class
from nnsight_engine.vllm_backend.module_tree import OutlineEntry
from nnsight_engine.vllm_backend.rpc_results import PENDING, write_shared
from nnsight_engine.vllm_backend.steps.faults import mend_rotary_embedding, mend_router
from nnsight_engine.vllm_backend.steps.handler import StepHandler
from nnsight_engine.vllm_backend.steps.runner import RunnerMixin
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

logger = logging.getLogger(__name__)

_COLLECT_S: Final = 0.01
"""Seconds that the engine waits for a trace's results before it continues with other requests."""

_PlatformWorker: Any = platform_worker_class()


class InterventionWorker(_PlatformWorker):
    def init_device(self) -> None:
        """Prepare the device as vLLM does; mend vLLM's faults on a CPU, and extend the runner's class."""
        super().init_device()
        if self.device.type == "cpu":
            mend_rotary_embedding()
            mend_router()
        runner = self.model_runner
        cls = type(runner)
        runner.__class__ = type(f"Intervention{cls.__name__}", (RunnerMixin, cls), {})

    @property
    def _handler(self) -> StepHandler:
        handler: StepHandler = self.model_runner.handler
        return handler

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        # Blocks of requests that write are zeroed, see ``UncleanBlocks``; vLLM prepares for zeroing all.
        if not kv_cache_config.needs_kv_cache_zeroing:
            self.model_runner._init_kv_zero_meta()  # noqa: SLF001 - as vLLM's workers do

    def compile_or_warm_up_model(self) -> Any:
        self._handler.learn_route(self.model_runner.dummy_run)
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the step; the last stage first serves earlier stages, which would otherwise wait for it."""
        self._handler.serve_stages(scheduler_output, self.model_runner.due_prompt_logprobs)
        return super().execute_model(scheduler_output)

    # Called over vLLM's RPC, on all workers. Of these, one runs the blocks; what concerns blocks, it answers.

    @property
    def _traces(self) -> WorkerTraces | None:
        return self._handler.traces if self._handler.runs_blocks else None

    def describe_interventions(self) -> dict[str, Any]:
        return self._handler.model_spec.to_plain() if self._handler.runs_blocks else {}

    def hash_weights(self, config: str) -> str:
        """Return a hash over this worker's weights, see ``hash_of_weights``."""
        return hash_of_weights(config, self.model_runner.model)

    # Datasets are written by the worker that also runs blocks. Arguments and results are plain values.

    def open_dataset(self, key: str, to: str, manifest: bytes, options: dict[str, Any]) -> None:
        """Begin to open a dataset that is going to be written here; see ``DatasetSinks``."""
        if not self._handler.runs_blocks:
            return
        if self._handler.datasets is None:
            # The packages that write datasets are an extra.
            module = importlib.import_module("nnsight_engine.vllm_backend.steps.dataset_sinks")
            self._handler.datasets = module.DatasetSinks(self._handler.model_spec)
        self._handler.datasets.open(key, to, manifest, options)

    def count_shard(self, key: str, record: dict[str, Any]) -> None:
        if self._handler.datasets is not None:
            self._handler.datasets.count_shard(key, record)

    def begin_shard(self, key: str, shard: dict[str, Any], empty: list[int]) -> None:
        if self._handler.datasets is not None:
            self._handler.datasets.begin_shard(key, shard, empty)

    def dataset_state(self, key: str) -> dict[str, Any] | None:
        datasets = self._handler.datasets
        return None if datasets is None else datasets.state(key)

    def end_dataset(self, key: str, complete: bool) -> None:  # noqa: FBT001 - arguments of an RPC have places
        if self._handler.datasets is not None:
            self._handler.datasets.end(key, complete=complete)

    def forget_dataset(self, key: str) -> None:
        if self._handler.datasets is not None:
            self._handler.datasets.forget(key)

    def describe_traces(self) -> dict[str, Any]:
        return self._handler.trace_spec.to_plain() if self._handler.runs_blocks else {}

    def count_interventions(self) -> dict[str, int]:
        """Return the number of resources that live requests hold."""
        traced = {} if self._traces is None else self._traces.num_live()
        return {**self._handler.interventions.num_live(), **traced}

    def count_events(self) -> dict[str, Any]:
        """Return the event counts of this worker and its sandboxes; empty on ranks that run no blocks."""
        handler = self._handler
        handler.counts.sandboxes = dict(handler.traces.sandboxes.counts)
        return handler.counts.to_plain() if handler.runs_blocks else {}

    def hold_trace(self, key: str, data: bytes) -> None:
        """Store the blocks of a trace ahead of its requests, which carry none."""
        if self._traces is not None:
            self._traces.store.hold(key, data)

    def collect_trace(self, key: str, results: dict[str, Any], index: int | None = None) -> bytes:
        """Return the encoded results of a trace, or of one of its blocks; their requests must have ended."""
        collected = self._handler.traces.collect(key, results, index)
        return b"" if self._traces is None else b"".join(collected.pieces)

    def finish_trace(
        self, key: str, results: dict[str, Any], path: str | None = None
    ) -> tuple[bytes | None, float, str, str, str, bool] | str | None:
        """Return the fields of ``EndedTrace``, the first one None for results that are in the file ``path``.

        Returns ``PENDING`` while its blocks run: other requests must not wait for them, so the caller polls.
        """
        traces = self._handler.traces
        if not traces.has_collected(key, results, _COLLECT_S):
            return None if self._traces is None else PENDING
        collected = traces.collect(key, results)
        if self._traces is None:
            return None
        is_in_file = path is not None and write_shared(collected.pieces, path)
        saved = None if is_in_file else b"".join(collected.pieces)
        return saved, *collected[1:]

    def drop_trace(self, key: str) -> float | None:
        """Drop a trace without collecting it; return the seconds it took."""
        return self._handler.traces.drop(key)

    def prepare_sandbox(self) -> tuple[bool, dict[str, Any] | None] | None:
        """Start the sandbox, without waiting: return whether a process is ready, and the encoded error.

        The error is None unless no process can start. Returns None on ranks that run no blocks.
        """
        if self._traces is None:
            return None
        try:
            return self._traces.prepare_sandbox(), None
        except Exception as error:  # noqa: BLE001 - returned to the caller
            return False, encode_error(error)

    def adopt_names(self, data: bytes) -> dict[str, Any] | None:
        """Install a client's names and envoy classes; return the encoded error."""
        return None if self._traces is None else self._traces.adopt(data)

    def keep_edit(self, name: str, data: bytes) -> dict[str, Any] | None:
        """Store an edit under a name; return the encoded error."""
        return None if self._traces is None else self._traces.keep_edit(name, data)

    def remove_edit(self, name: str) -> None:
        if self._traces is not None:
            self._traces.edits.remove(name)

    def load_adapter(self, name: str, number: int, path: str) -> str | None:
        """Load a LoRA adapter; return the reason if it cannot be loaded."""
        try:
            self.add_lora(LoRARequest(name, number, path))
        except Exception as error:
            logger.exception("the adapter %r cannot be loaded", name)
            return str(error) or type(error).__name__
        return None

    def outline_model(self) -> list[OutlineEntry]:
        return [] if self._traces is None else self._traces.outline()
