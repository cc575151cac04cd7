"""Seeded requests with chunked prefill on a CPU.

vLLM also samples from a chunk that is not the last of its prompt, and discards the sample. The random
generator must then be reset, or the request's random numbers would differ from those without chunks. vLLM
0.32 resets it by the generator's offset, which only GPU generators have; a CPU generator raises an error,
which ends the engine with all its requests. Here the full state of CPU generators is restored, and they are
hidden from vLLM's reset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class SeededChunksMixin:
    """Mixin that ``worker.py`` puts in front of vLLM's runner class."""

    input_batch: Any

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        before = [(generator, generator.get_state()) for generator in self._discarded().values()]
        output = super()._sample(*args, **kwargs)  # type: ignore[misc]
        for generator, state in before:
            generator.set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        batch, discarded = self.input_batch, self._discarded()
        if not discarded:
            return super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        every = batch.generators
        batch.generators = {index: one for index, one in every.items() if index not in discarded}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        finally:
            batch.generators = every

    def _discarded(self) -> dict[int, torch.Generator]:
        """Return, by row, the CPU generators of requests whose samples of this step are discarded."""
        generators: dict[int, torch.Generator] = self.input_batch.generators
        if not generators:
            return {}
        mask = self.discard_request_mask.np[: self.input_batch.num_reqs]  # type: ignore[attr-defined]
        indexes = (int(index) for index in np.nonzero(mask)[0])
        found = {index: generators[index] for index in indexes if index in generators}
        return {index: one for index, one in found.items() if one.device.type == "cpu"}
