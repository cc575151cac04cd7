"""What a block does with modules beside the model's run leaves what the model has made."""

from __future__ import annotations

import torch

from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher


def test_a_module_that_writes_into_its_arguments_writes_into_copies() -> None:
    given, named = torch.zeros(2, 3), torch.zeros(3)
    seen = given._version, named._version

    def fused(hidden: torch.Tensor, pair: list[torch.Tensor], *, residual: torch.Tensor) -> torch.Tensor:
        pair[0].add_(2)
        return hidden.add_(1).add_(residual.add_(3)).add_(pair[0])

    result = TraceDispatcher().applied("model.norm", fused, (given, [given]), {"residual": named})
    assert result.tolist() == [[6.0] * 3] * 2
    assert not given.any()
    assert not named.any()
    # By these a block's edits are known, which go back into the model.
    assert (given._version, named._version) == seen
