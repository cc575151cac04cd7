"""What a real sandbox process knows of a model that a test plays to it."""

from __future__ import annotations

from typing import Final

import torch

from nnsight_engine.vllm_backend.compat import EngineLimits

WIDTH: Final = 8
LAYERS: Final = 4
VOCABULARY: Final = 16
REFUSED: Final = "model.model.layers.3.mlp.output"
"""A place of which it is not known how the parts of several ranks make a whole."""
LIMITS: Final = EngineLimits(sandbox_bytes=2**28, sandbox_step_s=2.0)


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.Identity()
        self.mlp = torch.nn.Identity()


class _Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Identity()
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = torch.nn.Identity()


class Outline(torch.nn.Module):
    """What the process knows of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Body()
        self.lm_head = torch.nn.Identity()


class Places:
    """The places whose values the process can have."""

    call_bytes = 2**26

    def __init__(self) -> None:
        names = [f"model.model.layers.{layer}" for layer in range(LAYERS)]
        names += [f"{name}.mlp" for name in names] + ["model.logits", "model.samples", "model.lm_head"]
        self.places = frozenset(f"{name}.{side}" for name in names for side in ("input", "output"))
