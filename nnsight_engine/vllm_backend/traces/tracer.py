"""The object that ``tracer`` refers to in a block that arrived with a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.interleaving.barrier import Barrier
from nnsight_engine.remote_backend.errors import LocalBlockError
from nnsight_engine.vllm_backend.traces.caches import RequestCache

if TYPE_CHECKING:
    import torch

    from nnsight_engine.envoys.cache_misses import CacheMisses
    from nnsight_engine.vllm_backend.traces.model import WorkerModel
    from nnsight_engine.vllm_backend.traces.request import TracedRequest


class BlockTracer(InterleavingTracer):
    """The tracer of one trace on the worker's side: loops, barriers, stop, caches, the result."""

    caches_inputs: ClassVar[bool] = False

    def __init__(self, model: WorkerModel) -> None:
        super().__init__(_runs_nothing, model)
        self._barriers: dict[int, Barrier] = {}

    def invoke(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002 - refused whatever it is
        """Raise: the requests of the trace are already running."""
        raise ValueError(
            "Cannot invoke during an active model execution / interleaving. Invokes stand side by "
            "side in a trace without an input of its own: `with model.trace() as tracer:`."
        )

    def local(self) -> NoReturn:
        """Raise: the step of all requests would wait for the local code."""
        raise LocalBlockError.on_vllm()

    def _new_cache(
        self, *, device: torch.device | str | None, dtype: torch.dtype | None, detach: bool
    ) -> RequestCache:
        return RequestCache(device=device, dtype=dtype, detach=detach)

    def _note_cache(self, cache: CacheMisses) -> None:
        current = self.interleaver.current
        assert current is not None  # noqa: S101 - its block has made the cache
        request: TracedRequest = current.interleaver  # type: ignore[assignment] # here they are requests
        request.cache_misses.append(cache)

    def known_barrier(self, number: int, participants: int) -> Barrier:
        """Return the barrier of a number, which was made before the invokes; all invokes share it."""
        barrier = self._barriers.get(number)
        if barrier is None:
            barrier = self._barriers[number] = Barrier(self.interleaver, participants)
        return barrier


def _runs_nothing() -> NoReturn:
    raise AssertionError("the engine runs the model")
