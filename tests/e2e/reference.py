"""The bundled model in transformers, float32, with the values that ordinary hooks give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.hook_reference import edited, first, on_first, recorded


class Reference:
    """transformers' own model, to compare with."""

    def __init__(self, path: Path) -> None:
        """Load the weights in float32."""
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.layers = self.model.model.layers

    def run(self, token_ids: list[int]) -> dict[str, torch.Tensor]:
        """Return the residual stream, attention and MLP outputs and logits by point, ``[tokens, width]``."""
        points = {"model.embed_tokens": "embed.output", "model.norm": "norm.output"}
        for index in range(len(self.layers)):
            layer, path = f"layers.{index}", f"model.layers.{index}"
            points |= {path: f"{layer}.output", f"{path}.self_attn": f"{layer}.attn.output"}
            points[f"{path}.mlp"] = f"{layer}.mlp.output"
        with torch.inference_mode(), recorded(self.model, *points) as outputs:
            logits = self.model(torch.tensor([token_ids])).logits[0]
        return {name: first(outputs[path][0])[0] for path, name in points.items()} | {"logits": logits}

    def run_edited(self, token_ids: list[int], layer: int, edit: Any) -> torch.Tensor:
        """Return the logits ``[tokens, vocabulary]`` with a layer's output ``[tokens, hidden]`` edited."""
        change = edited(
            self.model, f"model.layers.{layer}", on_first(lambda rows: edit(rows[0]).unsqueeze(0))
        )
        with torch.inference_mode(), change:
            logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits
