"""Tiny random checkpoints of models that see, with their tokenizers and image processors.

Their processors work on PIL images: torchvision is not installed. Pixels of an image are 1/16 of what the
language model's rows are, so a whole picture costs few tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    ProcessorMixin,
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
IMAGE_SIZE: Final = 16
PATCH_SIZE: Final = 4
VISION_LAYERS: Final = 3

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_TEXT: Final[dict[str, Any]] = {
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
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": VISION_LAYERS,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}


def picture(seed: int, width: int = IMAGE_SIZE, height: int = IMAGE_SIZE) -> Image.Image:
    """Return an image of four fields in random colours."""
    pixels = np.random.default_rng(seed).integers(0, 255, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)


def write_llava(directory: Path) -> Path:
    """Write a LLaVA: each image is 16 tokens, all of them with rows of the image."""
    tokenizer = _tokenizer(IMAGE_TOKEN)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION),
        text_config=LlamaConfig(vocab_size=len(tokenizer), **_TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
    )
    images = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        do_convert_rgb=True,
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
        chat_template=CHAT_TEMPLATE,
    )
    return _write(config, processor, directory)


def write_idefics3(directory: Path) -> Path:
    """Write an Idefics3: an image is split, and marks of rows stand between the tokens of its parts."""
    marks = ["<fake_token_around_image>", IMAGE_TOKEN, "<global-img>", "<end_of_utterance>"]
    tokenizer = _tokenizer(*marks)
    config = Idefics3Config(
        vision_config={**_VISION, "num_attention_heads": 2},
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **_TEXT},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * IMAGE_SIZE}, max_image_size={"longest_edge": IMAGE_SIZE}
    )
    processor = Idefics3Processor(
        image_processor=images,
        tokenizer=tokenizer,
        image_seq_len=(IMAGE_SIZE // PATCH_SIZE // 2) ** 2,
        chat_template=CHAT_TEMPLATE,
    )
    return _write(config, processor, directory)


def write_gemma3(directory: Path) -> Path:
    """Write a Gemma 3: each image is 4 tokens between two marks, which attend to each other."""
    marks = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = _tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        extra_special_tokens=marks,
    )
    first, last, soft = tokenizer.convert_tokens_to_ids(list(marks.values()))
    text = {
        **_TEXT,
        "head_dim": 64,
        "sliding_window": 64,
        "query_pre_attn_scalar": 48,
        "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    }
    del text["tie_word_embeddings"]
    config = Gemma3Config(
        vision_config=_VISION,
        text_config={"vocab_size": len(tokenizer), **text},
        mm_tokens_per_image=4,
        boi_token_index=first,
        eoi_token_index=last,
        image_token_index=soft,
    )
    images = Gemma3ImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, image_seq_length=4)
    processor = Gemma3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_length=4, chat_template=CHAT_TEMPLATE
    )
    return _write(config, processor, directory)


def _tokenizer(*marks: str) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    if marks:
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _write(config: PreTrainedConfig, processor: ProcessorMixin, directory: Path) -> Path:
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model, torch.Generator().manual_seed(0), 0.1)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory
