"""The tree of envoys on the worker's model, for blocks that came with requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.probes import Probes
from nnsight_engine.modeling.wrapper import WrapperModule
from nnsight_engine.vllm_backend.traces.board import Board

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

LOGITS: Final = "logits"
SAMPLES: Final = "samples"


class WorkerModel(Envoy):
    """What ``model`` is in a block: the modules that vLLM runs, and what it makes behind them.

    ``model.logits.output`` is ``[1, vocabulary]``, what the next token is about to be sampled from, and
    ``model.samples.output`` is ``[1, 1]``, the token sampled.
    """

    def __init__(
        self, module: torch.nn.Module, board: Board, rename: Mapping[str, Any] | None = None
    ) -> None:
        """Stand for the loaded model."""
        super().__init__(module, interleaver=board, rename=rename)  # type: ignore[arg-type] # stands for all of them
        for name in (LOGITS, SAMPLES):
            self._add_envoy(WrapperModule(), name)
        modules = [(envoy._module, str(envoy.path)) for envoy in self._by_module.values()]
        self._probe_set = Probes(modules, board)  # type: ignore[arg-type] # as above

    def install(self) -> None:
        """Hear of every module's call, and of the operations that blocks look at."""
        self._probe_set.install()
        for source in self._sources:
            source.install()

    def remove(self) -> None:
        """Leave the modules as they were."""
        for source in self._sources:
            source.remove()
        self._probe_set.remove()
