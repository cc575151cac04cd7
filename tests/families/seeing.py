"""A tiny random checkpoint of a model that sees, with its tokenizer and image processor.

Of vLLM's models only few read images without torchvision, of which there is no build for CPUs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from tests.families.checkpoints import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    MAX_POSITIONS,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    build_tokenizer,
    randomize,
)

if TYPE_CHECKING:
    from pathlib import Path

IMAGE_TOKEN: Final = "<image>"
_PATCH_SIZE: Final = 4
_PART_SIZE: Final = 16
"""Pixels of each side of the parts into which images are split; an image has 2 × 2, and itself in small."""
_SCALE: Final = 2
"""Patches of each side that are one token together."""

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def picture(seed: int, width: int = _PART_SIZE, height: int = _PART_SIZE) -> Image.Image:
    """Return an image of four fields in random colours."""
    pixels = np.random.default_rng(seed).integers(0, 255, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)


def write_idefics3(directory: Path) -> Path:
    """Write a tiny Idefics3, float32; SmolVLM has the same layers.

    An image is five parts of four tokens each, with marks between them.

    Returns:
        ``directory``, ready for ``from_pretrained`` and for vLLM.
    """
    tokenizer = build_tokenizer()
    marks = ["<fake_token_around_image>", IMAGE_TOKEN, "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": _PART_SIZE,
        "patch_size": _PATCH_SIZE,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=_SCALE,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * _PART_SIZE}, max_image_size={"longest_edge": _PART_SIZE}
        ),
        tokenizer=tokenizer,
        image_seq_len=(_PART_SIZE // _PATCH_SIZE // _SCALE) ** 2,
        chat_template=_CHAT_TEMPLATE,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model, torch.Generator().manual_seed(0), 0.1)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory
