"""Small modules that the guide's examples wrap where a language model would only be in the way."""

from __future__ import annotations

from collections import OrderedDict

import torch


class TinyMLP(torch.nn.Sequential):
    """``layer1`` (5 -> 10) and ``layer2`` (10 -> 2), always with the same weights."""

    layer1: torch.nn.Linear
    layer2: torch.nn.Linear

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = OrderedDict[str, torch.nn.Module](
                layer1=torch.nn.Linear(5, 10), layer2=torch.nn.Linear(10, 2)
            )
        super().__init__(layers)


class SparseAutoencoder(torch.nn.Module):
    """An auxiliary module: features of a hidden state, and the state rebuilt from them."""

    def __init__(self, width: int, num_features: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.encoder = torch.nn.Linear(width, num_features)
            self.decoder = torch.nn.Linear(num_features, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rebuilt: torch.Tensor = self.decoder(self.encoder(hidden).relu())
        return rebuilt
