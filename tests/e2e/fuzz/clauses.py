"""Random where-clauses, most of which name something."""

from __future__ import annotations

import random

from tests.e2e.fuzz import wording
from tests.e2e.fuzz.world import Json, World


class Clauses:
    """Draws clauses for requests."""

    def __init__(self, world: World, pick: random.Random) -> None:
        self._world, self._random = world, pick

    def spelled(self, token: int) -> int | str:
        """Return a token as its id, or as a string that says it."""
        return self._world.texts.get(token, token) if self._random.random() < 0.5 else token

    def where(self, request: Json) -> Json:
        pick = self._random
        clause = self._clause(request)
        if pick.random() < 0.3:
            exclude = self._clause(request)
            clause |= {"exclude": exclude} if exclude else {}
        return clause

    def _clause(self, request: Json) -> Json:
        pick = self._random
        clause: Json = {}
        if pick.random() < 0.4:
            clause["phase"] = pick.choice(["prompt", "generated", "all"])
        if pick.random() < 0.3:
            clause["positions"] = self.positions(request)
        if pick.random() < 0.35:
            clause["range"] = self._range(request)
        if pick.random() < 0.2:
            tokens = pick.sample(request["ids"], min(3, len(request["ids"]))) + pick.sample(
                self._world.vocab, 20
            )
            clause["tokens"] = [self.spelled(token) for token in tokens]
        if self._world.markers.begun_by and pick.random() < 0.25:
            clause["scope"] = pick.choice(wording.PARTS)
        return clause

    def _num_positions(self, request: Json) -> int:
        total: int = len(request["ids"]) + request["max_tokens"] - 1
        return total

    def _either(self, position: int, prompt_len: int) -> int:
        """Return a position as it is or counted from the prompt's end."""
        return position - prompt_len if position < prompt_len and self._random.random() < 0.5 else position

    def positions(self, request: Json) -> list[int]:
        """Return positions of a request, each once."""
        total, prompt_len = self._num_positions(request), len(request["ids"])
        positions = self._random.sample(range(total), min(self._random.randint(1, 5), total))
        if self._random.random() < 0.4 and prompt_len - 1 not in positions:
            positions.append(prompt_len - 1)
        return [self._either(position, prompt_len) for position in positions]

    def _range(self, request: Json) -> list[int | None]:
        total, prompt_len = self._num_positions(request), len(request["ids"])
        start, stop = sorted(self._random.sample(range(total + 1), 2))
        end = None if self._random.random() < 0.4 else self._either(stop, prompt_len)
        return [self._either(start, prompt_len), end]
