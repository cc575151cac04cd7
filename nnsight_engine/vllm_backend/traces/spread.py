"""What all tensor-parallel ranks do together for a block, each with its part of the model.

Every method here is called on all ranks, with the same arguments: by the leading one because a block asks for
it, by the others because they were told to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core.trees import tensors
from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from nnsight_engine.vllm_backend.traces.shards import Shards, map_numbered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nnsight_engine.vllm_backend.families import ModelPoints
    from nnsight_engine.vllm_backend.traces.model import WorkerModel
    from nnsight_engine.vllm_backend.traces.ranks import Ranks


_ITSELF: Final = frozenset({"", "forward"})
"""Methods that are what a module does when it is called."""


class Spread:
    """A model that is spread over ranks.

    Attributes:
        ranks: The ranks.
        shards: Where its values are spread.
    """

    def __init__(self, ranks: Ranks, model: WorkerModel, points: ModelPoints) -> None:
        """Stand for this rank's part of it."""
        self.ranks = ranks
        self.shards = Shards(points, model.own_modules())
        self._model = model

    def refusal(self, provider: str) -> SpreadModuleError | None:
        """Return why a block cannot have a provider's value; None if it can."""
        return None if self.shards.is_understood(provider) else SpreadModuleError.place(provider)

    def check(self, provider: str, value: Any) -> None:
        """Make sure that a value can be put together.

        Raises:
            SpreadModuleError: It is not spread as its place says.
        """
        if not self.shards.place(provider).fits(list(tensors(value))):
            raise SpreadModuleError.place(provider)

    def is_spread(self, provider: str) -> bool:
        """Tell whether each rank has a part of a provider's value only."""
        return self.shards.place(provider).is_spread

    def whole(self, provider: str, value: Any) -> Any:
        """Return a provider's value put together."""
        return self.shards.place(provider).whole(value, self.ranks.gather)

    def with_parts(self, provider: str, value: Any, changed: Mapping[int, torch.Tensor]) -> Any:
        """Return this rank's part of a provider's value, of which some wholes were changed, by number."""
        place = self.shards.place(provider)

        def put_in(number: int, part: torch.Tensor) -> torch.Tensor:
            whole, layout = changed.get(number), place.of(number)
            if whole is None or layout is None:
                return part if whole is None else whole
            return layout.part(whole, self.ranks.rank, self.ranks.size)

        return map_numbered(value, put_in)

    def check_call(self, path: str, method: str) -> None:
        """Make sure that a block can call a module, or a method of it.

        Raises:
            SpreadModuleError: It is not known how what goes in or comes out is spread.
        """
        for provider in (f"{path}.input", f"{path}.output"):
            if not self.shards.is_understood(provider):
                raise SpreadModuleError.place(provider)
        if method not in _ITSELF and (self.shards.has_parts(path) or hasattr(torch.nn.Module, method)):
            raise SpreadModuleError.method(path, method)

    def call(self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, or a method of it, with wholes; returns the whole of what it returns."""
        envoy = self._model.get(path)
        # As on a block's own thread.
        with torch.inference_mode(mode=False), torch.no_grad():
            if method not in _ITSELF:
                return getattr(envoy._module, method)(*args, **kwargs)  # noqa: SLF001 - an envoy of ours
            entrance, exit_ = self.shards.place(f"{path}.input"), self.shards.place(f"{path}.output")
            args, kwargs = entrance.part((args, kwargs), self.ranks.rank, self.ranks.size)
            output = envoy._apply_apart(*args, **kwargs)  # noqa: SLF001 - the same
            return exit_.whole(output, self.ranks.gather)

    def fetch(self, path: str, name: str) -> torch.Tensor:
        """Return the whole of a tensor that a module has a part of.

        Raises:
            SpreadModuleError: It is not known how it is spread.
        """
        part: torch.Tensor = getattr(self._model.get(path)._module, name)  # noqa: SLF001 - an envoy of ours
        with torch.inference_mode(mode=False), torch.no_grad():
            whole: torch.Tensor = self.shards.held(path, name, part).whole(part, self.ranks.gather)
            return whole


class Presence:
    """Which traced requests there are, as every rank knows it: by what the scheduler says.

    Whether a block is still of use is for the leading rank to know; whether ranks talk to each other in a
    step must be the same on all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start without any."""
        super().__init__(*args, **kwargs)
        self._present: set[str] = set()

    @property
    def idle(self) -> bool:
        """Whether there is no traced request."""
        return not self._present

    def takes_part(self, request_id: str) -> bool:
        """Tell whether a request is traced."""
        return request_id in self._present

    def _met(self, arrived: Sequence[tuple[str, Any]], finished: set[str]) -> bool:
        """Take note of requests that came and went; False if there are none."""
        gone = finished & self._present
        self._present -= gone
        self._present |= {request_id for request_id, _ in arrived}
        return bool(gone or arrived)
