"""The bundled model in transformers, float32, with the values that ordinary hooks give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


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
        values: dict[str, torch.Tensor] = {}
        handles = []

        def keep(name: str) -> Any:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                values[name] = tensor.detach().reshape(-1, tensor.shape[-1]).clone()

            return hook

        for index, layer in enumerate(self.layers):
            handles.append(layer.register_forward_hook(keep(f"layers.{index}.output")))
            handles.append(layer.self_attn.register_forward_hook(keep(f"layers.{index}.attn.output")))
            handles.append(layer.mlp.register_forward_hook(keep(f"layers.{index}.mlp.output")))
        handles.append(self.model.model.embed_tokens.register_forward_hook(keep("embed.output")))
        handles.append(self.model.model.norm.register_forward_hook(keep("norm.output")))
        with torch.inference_mode():
            values["logits"] = self.model(torch.tensor([token_ids])).logits[0]
        for handle in handles:
            handle.remove()
        return values

    def run_edited(self, token_ids: list[int], layer: int, edit: Any) -> torch.Tensor:
        """Return the logits ``[tokens, vocabulary]`` with a layer's output ``[tokens, hidden]`` edited."""

        def hook(_module: Any, _args: Any, output: Any) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            edited = edit(tensor[0].clone()).unsqueeze(0)
            return (edited, *output[1:]) if isinstance(output, tuple) else edited

        handle = self.layers[layer].register_forward_hook(hook)
        try:
            with torch.inference_mode():
                logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0]
                return logits
        finally:
            handle.remove()
