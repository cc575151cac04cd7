"""Images of vLLM's prompts."""

from __future__ import annotations

import hashlib
from typing import Any

from nnsight_engine.plans.prompt_media import NO_MEDIA, PromptMedia, Spans


def media_of(prompt: Any) -> PromptMedia:
    """Return the media of a prompt that vLLM's renderer has processed."""
    if not isinstance(prompt, dict) or prompt.get("type") != "multimodal":
        return NO_MEDIA
    hashes = sorted(prompt["mm_hashes"].items())
    placeholders = sorted(prompt["mm_placeholders"].get("image", ()), key=lambda one: one.offset)
    return PromptMedia(
        images=tuple(map(_spans, placeholders)),
        digest=hashlib.sha256(repr(hashes).encode()).hexdigest(),
    )


def _spans(placeholder: Any) -> Spans:
    return tuple((first, last + 1) for first, last in placeholder.extract_embeds_range())
