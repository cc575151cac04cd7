"""The inputs of one request's compilation; arrays over the prompt are created on first use."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import excerpt
from api_schemas.points import ENCODER_BLOCK
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.token_texts import NoSuchTokenError
from nnsight_engine.plans.answer_parts import NO_MARKERS, AnswerMarkers, Part, Parts, PlannedAnswer
from nnsight_engine.plans.prompt_media import NO_MEDIA, PromptMedia
from nnsight_engine.plans.request_plan import PlannedImage

TokenOf = Callable[[str], int]
"""Maps a text to the id of its single token, see ``core.token_texts``; raises NoSuchTokenError."""

MAX_TOKEN_STRINGS: Final = 1024
"""Limit on the different token strings of one request, which bounds the time spent tokenizing them."""


class CompileScope:
    def __init__(
        self,
        spec: ModelSpec,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        token_of: TokenOf,
        markers: AnswerMarkers = NO_MARKERS,
        media: PromptMedia = NO_MEDIA,
    ) -> None:
        self.spec = spec
        self.media = media
        self.prompt_len = len(prompt_token_ids)
        # The last generated token is never fed back, so it has no position.
        self.num_positions = self.prompt_len + max(max_tokens, 1) - 1
        self._prompt_token_ids = prompt_token_ids
        self._token_of = token_of
        self._markers = markers
        self._ids_by_text: dict[str, int] = {}

    @functools.cached_property
    def prompt_ids(self) -> npt.NDArray[np.int64]:
        return np.asarray(self._prompt_token_ids, np.int64)

    @functools.cached_property
    def prompt_positions(self) -> npt.NDArray[np.int64]:
        return np.arange(self.prompt_len, dtype=np.int64)

    @functools.cached_property
    def answer(self) -> PlannedAnswer:
        return self._markers.plan(self.prompt_ids)

    @functools.cached_property
    def prompt_parts(self) -> Parts:
        return self.answer.parts(self.prompt_ids, self.prompt_len)

    def part(self, name: str, param: str) -> Part:
        """Return a part of the answer; raise ``unsupported_combination`` if it cannot be told apart."""
        reason = self._markers.missing.get(name)
        if reason is not None:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION, f"`scope` {name} is not available: {reason}.", param
            )
        return Part[name.upper()]

    def image_positions(self, indexes: Sequence[int], param: str) -> list[int]:
        """Return the positions of images, in the order given, each once; raise ``position_out_of_range``."""
        images = self.media.images
        named = self._image_numbers(indexes, param)
        return [position for index in named for span in images[index] for position in range(*span)]

    def images_in_encoder(self) -> tuple[PlannedImage, ...]:
        leaf = self.spec.leaf(ENCODER_BLOCK)
        num_patches = 1 if leaf is None else leaf.num_patches
        return tuple(
            PlannedImage(spans, num_patches * sum(stop - start for start, stop in spans))
            for spans in self.media.images
        )

    def encoder_rows(self, indexes: Sequence[int], param: str) -> list[int]:
        images = self.images_in_encoder()
        stops = list(itertools.accumulate(image.num_rows for image in images))
        named = self._image_numbers(indexes, param)
        return [row for index in named for row in range(stops[index] - images[index].num_rows, stops[index])]

    def _image_numbers(self, indexes: Sequence[int], param: str) -> list[int]:
        images = self.media.images
        named: dict[int, None] = {}
        for number, index in enumerate(indexes):
            if not -len(images) <= index < len(images):
                known = f"{len(images)} image{'s' if len(images) > 1 else ''}" if images else "no images"
                raise ApiError(
                    ErrorCode.POSITION_OUT_OF_RANGE,
                    f"Images count from 0 and this prompt has {known}, got {excerpt(index)}.",
                    f"{param}.{number}",
                )
            named[index % len(images)] = None
        return list(named)

    def token_id(self, token: str | int, param: str) -> int:
        """Return a token's id; raise ``unknown_token``, or ``invalid_value`` for too many strings."""
        if isinstance(token, str):
            known = self._ids_by_text.get(token)
            token = self._named(token, param) if known is None else known
        if not 0 <= token < self.spec.vocab_size:
            raise ApiError(
                ErrorCode.UNKNOWN_TOKEN,
                f"A token id must lie between 0 and {self.spec.vocab_size - 1}, got {excerpt(token)}.",
                param,
            )
        return token

    def _named(self, text: str, param: str) -> int:
        if len(self._ids_by_text) >= MAX_TOKEN_STRINGS:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A request may name {MAX_TOKEN_STRINGS} different tokens as strings; give the others as "
                "ids.",
                param,
            )
        try:
            token_id = self._token_of(text)
        except NoSuchTokenError as error:
            raise ApiError(
                ErrorCode.UNKNOWN_TOKEN,
                f"A token's string must be exactly one token, as /v1/tokenize tells it; {excerpt(text)} "
                f"{error}. A leading space counts: ' Paris' and 'Paris' are different tokens.",
                param,
            ) from error
        self._ids_by_text[text] = token_id
        return token_id
