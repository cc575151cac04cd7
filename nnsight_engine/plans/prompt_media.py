from __future__ import annotations

import msgspec

Spans = tuple[tuple[int, int], ...]
"""Half-open ranges of positions, ascending."""


class PromptMedia(msgspec.Struct, frozen=True):
    """The positions of each image in the prompt; marks between an image's parts are none of them.

    ``digest`` is a hash of everything that is no text, also of audio and videos; empty if there is nothing.
    """

    images: tuple[Spans, ...] = ()
    digest: str = ""


NO_MEDIA = PromptMedia()
