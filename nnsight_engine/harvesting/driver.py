"""What the drivers share: prompts to tokens, names of points, a line of progress."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from api_schemas.errors import ApiError
from api_schemas.operations import Where, WhereClause
from api_schemas.points import PointPattern
from nnsight_engine.core.token_texts import NoSuchTokenError, TokenTexts
from nnsight_engine.datasets.manifest import SettingsError
from nnsight_engine.datasets.plan import Tokens
from nnsight_engine.datasets.prompts import Prompt
from nnsight_engine.datasets.writer import Progress


class Encoder:
    """Prompts to tokens, as the model's own inputs are."""

    def __init__(self, tokenizer: Any, max_tokens: int | None, longest: int | None) -> None:
        """Cut prompts to ``max_tokens``; refuse those of more than ``longest``, the model's limit."""
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._longest = longest
        self._numbers = itertools.count(1)

    def __call__(self, prompt: Prompt) -> Tokens:
        """Return a prompt's tokens; raise SettingsError if the model does not take as many."""
        tokens = np.asarray(self._ids(prompt)[: self._max_tokens], np.int32)
        number = next(self._numbers)
        if self._longest is not None and len(tokens) > self._longest:
            raise SettingsError(
                f"the {number}. prompt of this run has {len(tokens)} tokens, and the model takes "
                f"{self._longest}: shorten it, or cut all prompts with max_tokens={self._longest}"
            )
        return tokens

    def _ids(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.messages is not None:
            ids: Any = self._tokenizer.apply_chat_template(prompt.messages, tokenize=True, return_dict=False)
        else:
            ids = self._tokenizer(prompt.text).input_ids
        return list(ids)


def names_of(patterns: Iterable[str], num_layers: int) -> list[str]:
    """Return the names of points of patterns such as ``layers.*.output``, each once; raise SettingsError."""
    names: dict[str, None] = {}
    for text in patterns:
        try:
            names |= dict.fromkeys(map(str, PointPattern.parse(text).resolve(num_layers)))
        except ApiError as error:
            raise SettingsError(str(error)) from error
    return list(names)


def unknown_point(name: str) -> SettingsError:
    return SettingsError(
        f"{name} has no row of one width for each token; print(model.points) lists the points"
    )


def by_ids(where: Where, tokenizer: Any) -> Where:
    """Return a where-clause with the ids of the tokens that it names by their texts."""
    texts = TokenTexts(tokenizer)

    def ids(clause: WhereClause) -> list[int | str] | None:
        if clause.tokens is None:
            return None
        try:
            return [texts.token(token) if isinstance(token, str) else token for token in clause.tokens]
        except NoSuchTokenError as error:
            raise SettingsError(f"`where.tokens`: {error}") from error

    exclude = where.exclude
    if exclude is not None:
        exclude = exclude.model_copy(update={"tokens": ids(exclude)})
    return where.model_copy(update={"tokens": ids(where), "exclude": exclude})


class Display(contextlib.ExitStack):
    """A line on standard error; by default only on a terminal."""

    def __init__(self, *, show: bool | None) -> None:
        super().__init__()
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        is_shown = console.is_terminal if show is None else show
        self._bars = Bars(*columns, console=console) if is_shown else None
        if self._bars is not None:
            self.enter_context(self._bars)
            self._task = self._bars.add_task("harvest")

    def show(self, progress: Progress) -> None:
        if self._bars is None:
            return
        dropped = f", {progress.num_dropped} dropped" if progress.num_dropped else ""
        text = (
            f"harvest: {progress.num_prompts} prompts, {progress.num_rows} rows, "
            f"{decimal(progress.num_bytes)}, {progress.num_shards} shards, "
            f"{decimal(progress.pending_bytes)} to write{dropped}"
        )
        self._bars.update(self._task, description=text)
