"""Images of a prompt: the positions at which the model reads them instead of tokens' embeddings."""

from __future__ import annotations

import msgspec

Spans = tuple[tuple[int, int], ...]
"""Half-open ranges of positions, ascending."""


class PromptMedia(msgspec.Struct, frozen=True):
    """What a prompt has beside its tokens.

    Attributes:
        images: The positions of each image, in the order of the prompt. Marks between an image's parts are
            tokens, and none of its positions.
        digest: Hash of the content of everything that is no text, also of audio and videos; empty if there is
            nothing.
    """

    images: tuple[Spans, ...] = ()
    digest: str = ""


NO_MEDIA = PromptMedia()
