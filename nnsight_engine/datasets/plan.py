"""Which prompts are computed together, which share a shard, and which rows of a prompt are kept.

All of it is a function of the prompts' numbers and tokens and of the settings, so that a run that is resumed,
on any machine, makes the same steps and the same files. Where clauses have the meaning of those of
``plans/where.py`` for a prompt without an answer, except that a position that a short prompt lacks is left
out in place of an error.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from api_schemas.operations import Where, WhereClause
from nnsight_engine.datasets.manifest import (
    PlanSettings,
    Point,
    PromptsChangedError,
    RowSettings,
    SettingsError,
    ShardRecord,
)
from nnsight_engine.datasets.prompts import Prompt, PromptDigest

Tokens = npt.NDArray[np.int32]
Item = TypeVar("Item")

NO_POSITION: Final = -1
"""Position and token of a row that is the mean over several."""

_REDUCTION: Final = re.compile(r"(all|last|mean)|(every|random):([1-9][0-9]{0,8})")


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """``count`` is the K of every:K, or the N of random:N."""

    kind: str
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Reduction:
        match = _REDUCTION.fullmatch(text)
        if match is None:
            raise SettingsError(f"`reduce` is all, last, mean, every:K or random:N, got {text!r}")
        return cls(match[1]) if match[1] else cls(match[2], int(match[3]))

    def max_rows(self, num_tokens: int) -> int:
        """Return an upper bound on the rows of a prompt, whatever its tokens are."""
        if self.kind == "all":
            return num_tokens
        if self.kind == "every":
            return -(-num_tokens // self.count)
        return min(num_tokens, self.count)


class RowSelection:
    """Chooses the rows of a prompt; made of settings that it checks."""

    def __init__(self, settings: RowSettings) -> None:
        self.reduction = Reduction.parse(settings.reduction)
        self._where = _checked(settings.where)
        self._seed = settings.seed

    @property
    def is_mean(self) -> bool:
        return self.reduction.kind == "mean"

    def positions(self, prompt: int, tokens: Tokens) -> Tokens:
        """Return the positions of a prompt's rows, in order; with a mean those that it is over."""
        matched = np.flatnonzero(_matches(self._where, tokens)).astype(np.int32)
        kind, count = self.reduction.kind, self.reduction.count
        if kind == "last":
            return matched[-1:]
        if kind == "every":
            return matched[::count]
        if kind == "random" and len(matched) > count:
            order = np.argsort(_hashes(self._seed, prompt, matched), kind="stable")
            return np.sort(matched[order[:count]])
        return matched

    def index(self, positions: Tokens, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """Return the positions and tokens that the index has for these rows."""
        if not self.is_mean:
            return positions, tokens[positions]
        none = np.full(min(1, len(positions)), NO_POSITION, np.int32)
        return none, none


def _checked(where: dict[str, Any]) -> Where:
    try:
        parsed = Where.model_validate(where)
    except ValidationError as error:
        raise SettingsError(f"`where` has no valid conditions: {error}") from error
    for clause in (parsed, parsed.exclude or WhereClause()):
        if clause.phase == "generated" or clause.scope is not None or clause.images is not None:
            raise SettingsError(
                "the rows of a dataset are those of prompts: `where` takes positions, range, tokens and "
                "exclude, not images, scope or the phase generated"
            )
        if any(isinstance(token, str) for token in clause.tokens or ()):
            raise SettingsError("`where.tokens` are ids here; harvest() turns texts into ids")
    return parsed


def _matches(where: WhereClause, tokens: Tokens) -> npt.NDArray[np.bool_]:
    num_tokens = len(tokens)
    mask = np.ones(num_tokens, np.bool_)
    if where.positions is not None:
        named = [p + num_tokens if p < 0 else p for p in where.positions]
        mask &= np.isin(np.arange(num_tokens), named)
    if where.range is not None:
        start, stop = where.range
        mask[: max(0, start + num_tokens if start < 0 else start)] = False
        if stop is not None:
            mask[max(0, stop + num_tokens if stop < 0 else stop) :] = False
    if where.tokens is not None:
        mask &= np.isin(tokens, where.tokens)
    if isinstance(where, Where) and where.exclude is not None:
        mask &= ~_matches(where.exclude, tokens)
    return mask


def _hashes(seed: int, prompt: int, positions: Tokens) -> npt.NDArray[np.uint64]:
    """Mix by SplitMix64 (Steele et al., 2014); numpy's generators may change with its version."""
    mixed = np.zeros(len(positions), np.uint64)
    for part in (np.uint64(seed % 2**64), np.uint64(prompt), positions.astype(np.uint64)):
        mixed = (mixed ^ part) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


class Lookahead(Generic[Item]):
    """An iterator whose next item can be seen before it is taken."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._seen: collections.deque[Item] = collections.deque()

    @property
    def is_ahead(self) -> bool:
        """Whether an item was seen and not taken."""
        return bool(self._seen)

    def has_next(self) -> bool:
        if not self._seen:
            self._seen.extend(itertools.islice(self._items, 1))
        return bool(self._seen)

    def peek(self) -> Item:
        """Return the next item, of which ``has_next`` has said that there is one."""
        return self._seen[0]

    def take(self) -> Item:
        return self._seen.popleft()


class Planner:
    """Divides prompts into packs and shards, by their numbers of tokens alone."""

    def __init__(self, plan: PlanSettings, rows: RowSettings) -> None:
        self._plan = plan
        self._reduction = Reduction.parse(rows.reduction)
        self._row_bytes = rows.row_bytes

    def take_shard(self, prompts: Lookahead[Item], num_tokens: Callable[[Item], int]) -> list[list[Item]]:
        """Take the packs of the next shard; none at the end of the prompts.

        A shard ends with the pack that reaches one of its limits.
        """
        packs: list[list[Item]] = []
        tokens = rows = 0
        while (
            prompts.has_next()
            and tokens < self._plan.shard_tokens
            and rows * self._row_bytes < self._plan.shard_bytes
        ):
            pack = self._take_pack(prompts, num_tokens)
            packs.append(pack)
            tokens += sum(map(num_tokens, pack))
            rows += sum(self._reduction.max_rows(num_tokens(prompt)) for prompt in pack)
        return packs

    def _take_pack(self, prompts: Lookahead[Item], num_tokens: Callable[[Item], int]) -> list[Item]:
        pack = [prompts.take()]
        left = self._plan.pack_tokens - num_tokens(pack[0])
        while (
            len(pack) < self._plan.pack_prompts and prompts.has_next() and num_tokens(prompts.peek()) <= left
        ):
            pack.append(prompts.take())
            left -= num_tokens(pack[-1])
        return pack

    def shards(self, counts: Iterable[int]) -> Iterator[list[list[int]]]:
        """Yield the shards of prompts with these numbers of tokens, as lists of packs."""
        prompts = Lookahead(counts)
        while packs := self.take_shard(prompts, int):
            yield packs


@dataclasses.dataclass(frozen=True, slots=True)
class ShardPlan:
    """A shard that is going to be computed; ``digest`` is that of its prompts."""

    number: int
    first_prompt: int
    num_prompts: int
    digest: str

    @property
    def end(self) -> int:
        return self.first_prompt + self.num_prompts


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedShard(ShardPlan):
    """``packs`` has the tokens of its prompts, whose numbers follow each other from ``first_prompt``."""

    packs: list[list[Tokens]]


def remaining_shards(
    prompts: Iterable[Prompt],
    planner: Planner,
    *,
    completed: Callable[[int], ShardRecord | None],
    encode: Callable[[Prompt], Tokens],
) -> Iterator[PlannedShard]:
    """Yield the shards that are not complete; prompts of the others are read, and not tokenized.

    Raises:
        PromptsChangedError: A complete shard was made of other prompts, or of more than there are.
    """
    raw = Lookahead(prompts)
    encoded = Lookahead((prompt, encode(prompt)) for prompt in _taken(raw))
    number = first = 0
    while encoded.is_ahead or raw.has_next():
        record = completed(number)
        if record is None:
            shard = _planned(number, first, planner.take_shard(encoded, lambda one: len(one[1])))
            yield shard
            first = shard.end
        else:
            _skip(record, first, encoded, raw)
            first += record.num_prompts
        number += 1
    if completed(number) is not None:
        raise PromptsChangedError(
            f"an earlier run had more than the {first} prompts of this one: write to another folder, or give "
            "the prompts of the first run"
        )


def check_prompts(prompts: Iterable[Prompt], records: Sequence[ShardRecord]) -> None:
    """Raise PromptsChangedError unless a dataset's shards were made of these prompts, and of no others."""

    num_prompts = sum(record.num_prompts for record in records)

    def completed(number: int) -> ShardRecord | None:
        return records[number] if number < len(records) else None

    def is_surplus(_: Prompt) -> Tokens:
        raise PromptsChangedError(
            f"the dataset is complete with {num_prompts} prompts, and there are more now: write to another "
            "folder"
        )

    planner = Planner(PlanSettings(), RowSettings([Point("none", 1)]))
    for _ in remaining_shards(prompts, planner, completed=completed, encode=is_surplus):
        raise AssertionError


def _taken(items: Lookahead[Item]) -> Iterator[Item]:
    while items.has_next():
        yield items.take()


def _planned(number: int, first: int, packs: list[list[tuple[Prompt, Tokens]]]) -> PlannedShard:
    digest = PromptDigest()
    for prompt, _ in itertools.chain.from_iterable(packs):
        digest.add(prompt)
    tokens = [[one for _, one in pack] for pack in packs]
    return PlannedShard(number, first, sum(map(len, packs)), digest.hexdigest(), tokens)


def _skip(
    record: ShardRecord,
    first: int,
    encoded: Lookahead[tuple[Prompt, Tokens]],
    raw: Lookahead[Prompt],
) -> None:
    digest, left = PromptDigest(), record.num_prompts
    while left and (encoded.is_ahead or raw.has_next()):
        digest.add(encoded.take()[0] if encoded.is_ahead else raw.take())
        left -= 1
    if left or record.first_prompt != first or record.digest != digest.hexdigest():
        raise PromptsChangedError(
            f"shard {record.number} was made of other prompts than the {record.num_prompts} from number "
            f"{first}: write to another folder, or give the prompts of the first run in their order"
        )
