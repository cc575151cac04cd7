"""A small sparse autoencoder in plain torch.

It keeps the largest activations of each token, as in "Scaling and evaluating sparse autoencoders" (Gao et
al., 2024).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

import torch
from rich.progress import track
from safetensors.torch import save_file

SAMPLE: Final = 500
"""States by which the first encoder is scaled."""


class SparseAutoencoder(torch.nn.Module):
    """``x ≈ a W_dec + b_dec`` with ``a`` the k largest of ``relu((x - b_dec) W_enc + b_enc)``.

    Args:
        states: States to begin from, ``[tokens, width]``: the directions of as many of them as there are
            features, so that each feature is active somewhere.
        num_features: The number of features.
        k: The most that are active at a token.
    """

    def __init__(self, states: torch.Tensor, num_features: int, k: int) -> None:
        """Begin with the encoder as the transpose of the decoder, scaled to rebuild states at their size."""
        super().__init__()
        mean = states.mean(0)
        chosen = torch.randint(len(states), (num_features,), generator=torch.Generator().manual_seed(0))
        directions = torch.nn.functional.normalize(states[chosen] - mean, dim=1)
        self.k = k
        self.W_enc = torch.nn.Parameter(directions.T.contiguous())
        self.W_dec = torch.nn.Parameter(directions.clone())
        self.b_enc = torch.nn.Parameter(torch.zeros(num_features))
        self.b_dec = torch.nn.Parameter(mean)
        with torch.no_grad():
            some = states[chosen[:SAMPLE]] - mean
            rebuilt = self(some + mean) - mean
            self.W_enc.mul_((rebuilt * some).sum() / rebuilt.square().sum())

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Return the activations, ``[…, features]``, of ``[…, width]``."""
        found = torch.relu((states - self.b_dec) @ self.W_enc + self.b_enc)
        largest = found.topk(self.k, dim=-1)
        return torch.zeros_like(found).scatter(-1, largest.indices, largest.values)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states as the features rebuild them."""
        return self.encode(states) @ self.W_dec + self.b_dec


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """How well states are rebuilt.

    Attributes:
        explained: The part of their variance.
        active: The mean number of active features, L0.
        alive: The part of the features that is active anywhere.
    """

    explained: float
    active: float
    alive: float


def train(
    states: torch.Tensor, *, num_features: int, k: int, steps: int, batch: int = 512
) -> tuple[SparseAutoencoder, list[float]]:
    """Train an autoencoder on states, ``[tokens, width]``; return it and the unexplained part by step."""
    sae = SparseAutoencoder(states, num_features, k)
    variance = (states - states.mean(0)).square().sum(1).mean()
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 5 * (1 - step / steps)))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in track(range(steps), description="Training"):
        chosen = states[torch.randint(len(states), (batch,), generator=generator)]
        loss = (sae(chosen) - chosen).square().sum(1).mean() / variance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():  # a feature's size is its activation, not its direction's length
            sae.W_dec.div_(sae.W_dec.norm(dim=1, keepdim=True))
        losses.append(loss.item())
    return sae.requires_grad_(requires_grad=False), losses


def quality(sae: SparseAutoencoder, states: torch.Tensor) -> Quality:
    """Return how well states are rebuilt that were not trained on."""
    active = sae.encode(states) > 0
    unexplained = (sae(states) - states).square().sum() / (states - states.mean(0)).square().sum()
    return Quality(
        1 - unexplained.item(), active.sum(1).float().mean().item(), active.any(0).float().mean().item()
    )


def write(sae: SparseAutoencoder, folder: Path, layer: int, model: str) -> None:
    """Write an autoencoder in SAELens' layout, in half precision."""
    tensors = {name: value.detach().half().contiguous() for name, value in sae.named_parameters()}
    save_file(tensors, folder / "sae_weights.safetensors")
    width, num_features = sae.W_enc.shape
    cfg = {
        "architecture": "topk",
        "d_in": width,
        "d_sae": num_features,
        "k": sae.k,
        "dtype": "float16",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "metadata": {"hook_name": f"blocks.{layer}.hook_resid_post", "model_name": model},
    }
    (folder / "cfg.json").write_text(json.dumps(cfg, indent=2), encoding="utf-8")


def activations(sae: SparseAutoencoder, states: torch.Tensor) -> torch.Tensor:
    """Return the activations at all tokens, ``[tokens, features]``."""
    return torch.cat([sae.encode(part) for part in states.split(4096)])
