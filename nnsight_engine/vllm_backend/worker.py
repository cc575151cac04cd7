"""The worker class handed to vLLM by name: the platform's own worker with our runner in it.

vLLM imports this module in every worker process. The runner is vLLM's, its class swapped
for one with ``InterventionRunnerMixin`` in front before the model is loaded.
"""

from __future__ import annotations

from typing import Any, Final

from nnsight_engine.serialization import encode_error
from nnsight_engine.vllm_backend.compat import platform_worker_class
from nnsight_engine.vllm_backend.model_outline import OutlineEntry
from nnsight_engine.vllm_backend.rpc_results import PENDING
from nnsight_engine.vllm_backend.runner import InterventionRunnerMixin
from nnsight_engine.vllm_backend.seeded_chunks import SeededChunksMixin
from nnsight_engine.vllm_backend.shared_memory_results import leave

_COLLECT_S: Final = 0.01
"""How long the engine waits for what a trace has saved before it goes on with others."""

_PlatformWorker: Any = platform_worker_class()


class InterventionWorker(_PlatformWorker):
    """A worker that can intervene."""

    def init_device(self) -> None:
        """Set the device up as the platform does, then give the runner its interventions."""
        super().init_device()
        runner = self.model_runner
        cls = type(runner)
        runner.__class__ = type(
            f"Intervention{cls.__name__}", (InterventionRunnerMixin, SeededChunksMixin, cls), {}
        )

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache as the platform does, and prepare to zero blocks of it, see UncleanBlocks."""
        super().initialize_from_config(kv_cache_config)
        if self.device.type != "cpu" and not kv_cache_config.needs_kv_cache_zeroing:
            self.model_runner._init_kv_zero_meta()  # noqa: SLF001 - called by vLLM's worker likewise

    def compile_or_warm_up_model(self) -> Any:
        """Let blocks be served in compiled steps, then do as the platform does."""
        self.model_runner.learn_route()
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the step; the last stage of a pipeline serves the others first, who would wait for it."""
        self.model_runner.serve_stages(scheduler_output)
        return super().execute_model(scheduler_output)

    # Called over vLLM's RPC, on all ranks. Of a pipeline's stages, only the last has anything to tell.

    def describe_interventions(self) -> dict[str, Any]:
        """Return the model's description as plain values; called over vLLM's RPC."""
        plain: dict[str, Any] = self.model_runner.model_spec.to_plain()
        return plain if self.model_runner.is_last_stage else {}

    def describe_traces(self) -> dict[str, Any]:
        """Return the description that blocks go by; called over vLLM's RPC."""
        plain: dict[str, Any] = self.model_runner.trace_spec.to_plain()
        return plain if self.model_runner.is_last_stage else {}

    def count_interventions(self) -> dict[str, int]:
        """Return how much live requests hold; called over vLLM's RPC."""
        counts: dict[str, int] = self.model_runner.interventions.num_live()
        return {**counts, **self.model_runner.traces.num_live()}

    def count_events(self) -> dict[str, Any]:
        """Return ``EngineCounts`` as plain values; called over vLLM's RPC."""
        runner = self.model_runner
        runner.counts.sandboxes = runner.traces.count_sandboxes()
        plain: dict[str, Any] = runner.counts.to_plain()
        return plain if runner.is_last_stage else {}

    def hold_trace(self, key: str, data: bytes) -> None:
        """Take the blocks of a trace ahead of its requests, which bring none; over vLLM's RPC."""
        self.model_runner.traces.hold(key, data)

    def collect_trace(self, key: str, results: dict[str, Any], index: int | None = None) -> bytes:
        """Return what a trace or one of its blocks saved, once its requests have ended; over vLLM's RPC."""
        return b"".join(self.model_runner.traces.collect(key, results, index))

    def finish_trace(
        self, key: str, results: dict[str, Any], path: str | None = None
    ) -> tuple[bytes | None, str, str, float, str] | str | None:
        """Return what a trace saved, printed last, how it failed, its seconds and tier; over vLLM's RPC.

        ``PENDING`` if its blocks are not done yet: nobody else is to wait for them, so ask again.

        Args:
            key: The trace.
            results: What its requests returned.
            path: Where the server would rather have what is large; the answer has None for it then.
        """
        if not self.model_runner.traces.has_collected(key, results, _COLLECT_S):
            return PENDING
        pieces = self.model_runner.traces.collect(key, results)
        if not pieces:
            return None
        is_left = path is not None and leave(pieces, path)
        saved = None if is_left else b"".join(pieces)
        traces = self.model_runner.traces
        return (saved, *traces.take_left(key), traces.last_spent_s, traces.last_tier)

    def drop_trace(self, key: str) -> float | None:
        """Forget a trace that nobody will collect; returns how long it took; called over vLLM's RPC."""
        spent_s: float | None = self.model_runner.traces.drop(key)
        return spent_s

    def prepare_sandbox(self) -> tuple[bool, dict[str, Any] | None]:
        """Begin to start sandboxes; returns whether there is one, and why none can be; over vLLM's RPC."""
        try:
            return self.model_runner.traces.prepare_sandbox(), None
        except Exception as error:  # noqa: BLE001 - told to whoever asks
            return False, encode_error(error)

    def adopt_names(self, data: bytes) -> dict[str, Any] | None:
        """Take over a client's names and classes; returns its error; called over vLLM's RPC."""
        failure: dict[str, Any] | None = self.model_runner.traces.adopt(data)
        return failure

    def keep_edit(self, name: str, data: bytes) -> dict[str, Any] | None:
        """Keep an edit under a name; returns its error; called over vLLM's RPC."""
        failure: dict[str, Any] | None = self.model_runner.traces.keep_edit(name, data)
        return failure

    def remove_edit(self, name: str) -> None:
        """Forget an edit; called over vLLM's RPC."""
        self.model_runner.traces.remove_edit(name)

    def outline_model(self) -> list[OutlineEntry]:
        """List the model's modules; called over vLLM's RPC."""
        entries: list[OutlineEntry] = self.model_runner.traces.outline()
        return entries
