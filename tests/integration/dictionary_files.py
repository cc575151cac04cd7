"""Small dictionaries in SAELens' layout, for uploads to the fake engine's server."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import safetensors.numpy

WIDTH: Final = 8
NUM_FEATURES: Final = 16
CFG: Final[dict[str, Any]] = {
    "architecture": "jumprelu", "d_in": WIDTH, "d_sae": NUM_FEATURES, "dtype": "float32", "device": "cpu",
    "apply_b_dec_to_input": False, "normalize_activations": "none", "reshape_activations": "none",
    "metadata": {
        "sae_lens_version": "6.21.0", "hook_name": "blocks.2.hook_resid_post", "model_name": "fake-model",
    },
}  # fmt: skip


def numbers(seed: int = 0, **changed: Any) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "W_enc": (WIDTH, NUM_FEATURES),
        "W_dec": (NUM_FEATURES, WIDTH),
        "b_enc": (NUM_FEATURES,),
        "b_dec": (WIDTH,),
        "threshold": (NUM_FEATURES,),
    }
    made = {name: chance.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: one for name, one in {**made, **changed}.items() if one is not None}


def weights(seed: int = 0, **changed: Any) -> bytes:
    return safetensors.numpy.save(numbers(seed, **changed))


def text_weights() -> str:
    """Return weights whose bytes are all ASCII, for tools that take a file's content for text."""
    return safetensors.numpy.save({name: np.zeros_like(one) for name, one in numbers().items()}).decode(
        "ascii"
    )


def cfg(**changed: Any) -> bytes:
    return json.dumps({**CFG, **changed}).encode()
