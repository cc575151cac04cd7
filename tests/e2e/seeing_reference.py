"""What transformers computes from a text with images, with rows changed: the measure for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from PIL.Image import Image
from transformers import AutoProcessor

from tests.families.reference import load_reference_model, reference_activations
from tests.families.seeing import IMAGE_TOKEN, picture
from tests.hook_reference import edited, outputs_of

TEXT: Final = f" Paris is {IMAGE_TOKEN} and Rome is {IMAGE_TOKEN} good"
IMAGES: Final = (picture(1), picture(2, 40, 24))
LAYER: Final = 1
NUM_TOKENS: Final = 6
_ENCODER: Final = "model.vision_model.encoder.layers"
Change = Callable[[torch.Tensor], torch.Tensor]


class SeeingReference:
    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.model: Any = load_reference_model(checkpoint)
        self.processor: Any = AutoProcessor.from_pretrained(checkpoint)

    def inputs(self, text: str, images: tuple[Image, ...]) -> dict[str, Any]:
        return dict(self.processor(text=[text], images=[list(images)], return_tensors="pt"))

    def image_positions(self, text: str = TEXT, images: tuple[Image, ...] = IMAGES) -> list[int]:
        ids = self.inputs(text, images)["input_ids"][0]
        found: list[int] = (ids == self.model.config.image_token_id).nonzero().flatten().tolist()
        return found

    def positions_by_image(self) -> tuple[list[int], list[int]]:
        """Return those of the two images of ``TEXT``, with a word between them."""
        ids = self.inputs(TEXT, IMAGES)["input_ids"][0].tolist()
        word = ids.index(self.processor.tokenizer.encode(" Rome")[0])
        positions = self.image_positions()
        return [one for one in positions if one < word], [one for one in positions if one > word]

    def activations(self, text: str = TEXT, images: tuple[Image, ...] = IMAGES) -> dict[str, torch.Tensor]:
        inputs = self.inputs(text, images)
        ids = inputs.pop("input_ids")[0].tolist()
        return reference_activations(self.checkpoint, ids, **inputs)

    @contextmanager
    def changing(self, positions: Sequence[int], change: Change) -> Iterator[None]:
        """Change some rows of the layer's output while the prompt is computed."""

        def edit(output: torch.Tensor) -> torch.Tensor:
            if output.shape[1] == 1:  # a generated token
                return output
            output = output.clone()
            output[0, list(positions)] = change(output[0, list(positions)])
            return output

        with torch.no_grad(), edited(self.model, f"model.text_model.layers.{LAYER}", edit):
            yield

    def encoded(self, *images: Image) -> list[torch.Tensor]:
        """Return what each block of the vision encoder returns, ``[patches of all images, width]``."""
        blocks = [f"{_ENCODER}.{layer}" for layer in range(len(self.model.get_submodule(_ENCODER)))]
        with torch.no_grad():
            outputs = outputs_of(self.model, self.inputs(IMAGE_TOKEN * len(images), images), *blocks)
        return [output.flatten(0, 1) for output in outputs]

    def last_logits(self, layer: int, change: Change) -> torch.Tensor:
        """Return the logits after ``TEXT``, ``[vocabulary]``, with a block of the encoder changed."""

        def edit(output: torch.Tensor) -> torch.Tensor:
            return change(output.flatten(0, 1).clone()).view_as(output)

        with torch.no_grad(), edited(self.model, f"{_ENCODER}.{layer}", edit):
            logits: torch.Tensor = self.model(**self.inputs(TEXT, IMAGES)).logits[0, -1]
        return logits

    def generated(
        self, positions: Sequence[int] = (), change: Change = lambda rows: rows, *, text: str = TEXT
    ) -> list[int]:
        inputs = self.inputs(text, IMAGES)
        with self.changing(positions, change):
            ids = self.model.generate(
                **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )[0]
        tokens: list[int] = ids[inputs["input_ids"].shape[1] :].tolist()
        return tokens
