"""What compiling one request has at hand: the model, the prompt, the tokenizer.

Lives for one call of ``compile_request``. Arrays over the prompt are made when first needed,
since most requests need none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import excerpt
from nnsight_engine.core.model_spec import ModelSpec

Tokenize = Callable[[str], list[int]]
"""Token ids of a string, without the special tokens that begin or end a prompt."""

MAX_TOKEN_STRINGS: Final = 1024
"""Different strings that one request may have tokenized: bounds the time it takes."""

_MAX_IDS_SHOWN: Final = 8


class CompileScope:
    """The model, the prompt and the tokenizer of one request.

    Args:
        spec: The model's description.
        prompt_token_ids: The prompt.
        max_tokens: Most tokens that will be generated.
        tokenize: Of the model's tokenizer.
    """

    def __init__(
        self, spec: ModelSpec, prompt_token_ids: Sequence[int], max_tokens: int, tokenize: Tokenize
    ) -> None:
        """Note sizes; nothing is computed yet."""
        self.spec = spec
        self.prompt_len = len(prompt_token_ids)
        # The last generated token is never fed back, so it has no position.
        self.num_positions = self.prompt_len + max(max_tokens, 1) - 1
        self._prompt_token_ids = prompt_token_ids
        self._tokenize = tokenize
        self._ids_by_text: dict[str, int] = {}

    @functools.cached_property
    def prompt_ids(self) -> npt.NDArray[np.int64]:
        """The prompt's token ids, ``[prompt_len]``."""
        return np.asarray(self._prompt_token_ids, np.int64)

    @functools.cached_property
    def prompt_positions(self) -> npt.NDArray[np.int64]:
        """The prompt's positions, ``[prompt_len]``."""
        return np.arange(self.prompt_len, dtype=np.int64)

    def token_id(self, token: str | int, param: str) -> int:
        """Return the id of a token given by id or by text; raises ApiError ``unknown_token``."""
        if isinstance(token, str):
            known = self._ids_by_text.get(token)
            return self._tokenized(token, param) if known is None else known
        if not 0 <= token < self.spec.vocab_size:
            raise ApiError(
                ErrorCode.UNKNOWN_TOKEN,
                f"A token id must lie between 0 and {self.spec.vocab_size - 1}, got {excerpt(token)}.",
                param,
            )
        return token

    def _tokenized(self, text: str, param: str) -> int:
        if len(self._ids_by_text) >= MAX_TOKEN_STRINGS:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A request may name {MAX_TOKEN_STRINGS} different tokens as strings; give the others as "
                "ids.",
                param,
            )
        ids = self._tokenize(text)
        if len(ids) != 1:
            shown = f"{ids[:_MAX_IDS_SHOWN]}{'…' if len(ids) > _MAX_IDS_SHOWN else ''}"
            raise ApiError(
                ErrorCode.UNKNOWN_TOKEN,
                f"A token's string must be exactly one token; {excerpt(text)} is {len(ids)}: {shown}. "
                "A leading space counts: ' Paris' and 'Paris' are different tokens.",
                param,
            )
        self._ids_by_text[text] = ids[0]
        return ids[0]
