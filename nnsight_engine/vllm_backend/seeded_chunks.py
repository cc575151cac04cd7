"""Seeded requests whose prompts come in chunks, on a CPU.

A chunk that is not a prompt's last is sampled from too, and the sample discarded. What it drew has to be put
back, or the request would go on from another place of its random stream than without chunks. vLLM 0.32 does
so by the generator's offset, which generators of a GPU have and a CPU's refuse with an error that ends the
engine and everybody in it. Here a CPU's generators are put back whole, and vLLM is not shown them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class SeededChunksMixin:
    """Put in front of vLLM's runner class; see ``worker.py``."""

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
        """Return the CPU generators of requests whose samples of this step are discarded, by their place."""
        generators: dict[int, torch.Generator] = self.input_batch.generators
        if not generators:
            return {}
        mask = self.discard_request_mask.np[: self.input_batch.num_reqs]  # type: ignore[attr-defined]
        indexes = (int(index) for index in np.nonzero(mask)[0])
        found = {index: generators[index] for index in indexes if index in generators}
        return {index: one for index, one in found.items() if one.device.type == "cpu"}
