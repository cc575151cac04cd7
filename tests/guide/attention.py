"""A model with attention heads that no library knows, and envoys for it, as the extension guide has them."""

# Views are defined as the guide does, by the name of the stub, as a setter is.
# mypy: disable-error-code="no-redef"

from __future__ import annotations

from typing import Any

import torch
from nnsight_engine.intervention.envoy import Envoy, eproperty
from nnsight_engine.intervention.hooks import requires_output

NUM_HEADS = 4
HEAD_WIDTH = 3
WIDTH = NUM_HEADS * HEAD_WIDTH


class Attention(torch.nn.Module):
    """Attends, and returns ``[num_rows, num_tokens, WIDTH]``, the heads side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = NUM_HEADS
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        query, key, value = (
            part.view(rows, tokens, self.n_heads, HEAD_WIDTH).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=2)
        )
        weights = torch.softmax(query @ key.transpose(2, 3), dim=3)
        attended: torch.Tensor = (weights @ value).transpose(1, 2).reshape(rows, tokens, WIDTH)
        return attended


class Block(torch.nn.Module):
    """Attention with a residual path; returns a tuple, as blocks of many libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.out(self.self_attn(x)), None


class Attender(torch.nn.Module):
    """Two blocks and a head, always with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = torch.nn.ModuleList([Block(), Block()])
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.head = torch.nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class AttnEnvoy(Envoy):
    """Exposes attention output as a list of per-head ``[num_rows, num_tokens, head_width]`` views."""

    @eproperty(key="output")
    @requires_output
    def heads(self) -> Any:
        """Per-head views of the attention output. Mutate in place to edit a head."""

    @heads.preprocess
    def heads(self, value: Any) -> Any:
        value = value[0] if isinstance(value, tuple) else value
        num_heads = getattr(self._module, "n_heads", NUM_HEADS)
        return list(value.unflatten(2, (num_heads, -1)).unbind(dim=2))

    def zero(self, head: int) -> None:
        """Zero a head: a method is found on the envoy like a property."""
        self.heads[head][:] = 0


class BlockEnvoy(Envoy):
    """Exposes ``.hidden``, the residual stream at the output of a transformer block."""

    @eproperty(key="output")
    @requires_output
    def hidden(self) -> Any:
        """The block's hidden-state output, unpacked from the tuple layout."""

    @hidden.preprocess
    def hidden(self, value: Any) -> Any:
        return value[0] if isinstance(value, tuple) else value

    @hidden.postprocess
    def hidden(self, value: Any) -> Any:
        return value, None
