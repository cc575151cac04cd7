"""Collective operations of all tensor-parallel ranks for a block, each on its part of the model.

All ranks call every method with the same arguments: the leading one for a block, the others by its order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core.trees import tensors
from nnsight_engine.vllm_backend.traces.block_adapters import block_adapters
from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from nnsight_engine.vllm_backend.traces.shards import Shards, map_numbered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.traces.model import WorkerModel
    from nnsight_engine.vllm_backend.traces.ranks import Ranks


_ITSELF: Final = frozenset({"", "forward"})
"""Method names that mean calling the module itself."""


class TpCollectives:
    def __init__(self, ranks: Ranks, model: WorkerModel, points: ModelPoints) -> None:
        self.ranks = ranks
        self.shards = Shards(points, model.own_modules())
        self.adapters = block_adapters(points.model)
        self._model = model

    def refusal(self, provider: str) -> SpreadModuleError | None:
        return None if self.shards.is_understood(provider) else SpreadModuleError.place(provider)

    def check(self, provider: str, value: Any) -> None:
        """Raise SpreadModuleError if a value is not sharded as the layout of its place says."""
        if not self.shards.place(provider).fits(list(tensors(value))):
            raise SpreadModuleError.place(provider)

    def is_spread(self, provider: str) -> bool:
        return self.shards.place(provider).is_spread

    def whole(self, provider: str, value: Any) -> Any:
        return self.shards.place(provider).whole(value, self.ranks.gather)

    def with_parts(self, provider: str, value: Any, changed: Mapping[int, torch.Tensor]) -> Any:
        """Return this rank's part with some tensors replaced; ``changed`` are whole tensors, by number."""
        place = self.shards.place(provider)

        def put_in(number: int, part: torch.Tensor) -> torch.Tensor:
            whole, layout = changed.get(number), place.of(number)
            if whole is None or layout is None:
                return part if whole is None else whole
            return layout.part(whole, self.ranks.rank, self.ranks.size)

        return map_numbered(value, put_in)

    def check_call(self, path: str, method: str) -> None:
        """Raise SpreadModuleError if it is not known how the input or the output is sharded."""
        for provider in (f"{path}.input", f"{path}.output"):
            if not self.shards.is_understood(provider):
                raise SpreadModuleError.place(provider)
        if method not in _ITSELF and (self.shards.has_parts(path) or hasattr(torch.nn.Module, method)):
            raise SpreadModuleError.method(path, method)

    def call(
        self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], adapter: int | None
    ) -> Any:
        envoy = self._model.get(path)
        # As on a block's own thread.
        with torch.inference_mode(mode=False), torch.no_grad(), self.adapters.using(adapter):
            if method not in _ITSELF:
                return getattr(envoy._module, method)(*args, **kwargs)  # noqa: SLF001 - an envoy of ours
            entrance, exit_ = self.shards.place(f"{path}.input"), self.shards.place(f"{path}.output")
            args, kwargs = entrance.part((args, kwargs), self.ranks.rank, self.ranks.size)
            output = envoy._apply_to_values(*args, **kwargs)  # noqa: SLF001 - the same
            return exit_.whole(output, self.ranks.gather)

    def fetch(self, path: str, name: str) -> torch.Tensor:
        """Return the whole of a module's tensor; SpreadModuleError if its sharding is not known."""
        part: torch.Tensor = getattr(self._model.get(path)._module, name)  # noqa: SLF001 - an envoy of ours
        with torch.inference_mode(mode=False), torch.no_grad():
            whole: torch.Tensor = self.shards.held(path, name, part).whole(part, self.ranks.gather)
            return whole
