"""Who has had how much of an engine, and how long a step may take while others are there: numbers alone.

A sender, which is a tenant, counts from a request of theirs until none is left and a while after. The seconds
of a step are charged to those whose tokens it computed; of what is charged, each one's share of the time is
forgiven as it passes. Whoever has ``_HEAVY_S`` left to answer for has kept the engine busy beyond
their share just now and is *heavy*; the others are *light*, which all are whose engine is half idle.
``FairScheduler`` asks this at each step, and does nothing of it while there is one sender.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Final

SENDER_KEY: Final = "nnsight_engine_sender"
"""Key of a request's extra arguments under which the server says whose it is."""

_HEAVY_S: Final = 0.5
_LIGHT_S: Final = 0.1
"""Who is heavy stays so until no more is left than this, lest long steps come by turns with short ones."""

_MOST_S: Final = 1.0
"""Nobody has to answer for more: who stops to flood an engine is light again soon."""

_FEW_TOKENS: Final = 4
"""A step of so many is short whatever it takes."""
_FIRST_GUESS: Final = 8
_KNOWN_FROM: Final = 16
"""The shortest step is known from steps of no more tokens than these."""
_KEPT: Final = 9
_ENOUGH: Final = 3
_LOOK_AGAIN: Final = 32


class StepTimes:
    """How long steps of how many tokens took lately, in classes of powers of two.

    Args:
        factor: How much longer than the shortest a step may take that is still short.
    """

    def __init__(self, factor: float) -> None:
        """Know nothing yet."""
        self._factor = factor
        self._seen: dict[int, deque[tuple[float, int]]] = {}
        self._short = _FIRST_GUESS
        self._left = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step."""
        size = num_tokens.bit_length()
        if size not in self._seen:
            self._seen[size] = deque(maxlen=_KEPT)
        self._seen[size].append((seconds, num_tokens))
        self._left -= 1

    @property
    def short(self) -> int:
        """How many tokens a short step has."""
        if self._left <= 0:
            self._short, self._left = self._estimate(), _LOOK_AGAIN
        return self._short

    def _estimate(self) -> int:
        known = [
            # The second-best time: what else the machine does makes steps longer, and none shorter.
            (statistics.median(num for _, num in seen), sorted(took for took, _ in seen)[1])
            for _, seen in sorted(self._seen.items())
            if len(seen) >= _ENOUGH
        ]
        if not known or known[0][0] > _KNOWN_FROM:
            return _FIRST_GUESS
        limit = known[0][1] * self._factor
        fits = bisect.bisect_left(known, 1, key=lambda one: int(one[1] > limit))
        if fits == len(known):
            return max(_FIRST_GUESS, int(2 * known[-1][0]))  # nothing was too long: try more
        (before, quick), (after, slow) = known[max(fits - 1, 0)], known[fits]
        between = before + (after - before) * (limit - quick) / (slow - quick) if slow > quick else before
        return max(_FEW_TOKENS, int(between))


class _Sender:
    """Somebody who sends requests.

    Attributes:
        level_s: Seconds of the engine that they had beyond their share, at ``counted_at``.
        counted_at: When that was.
        is_heavy: Whether they were heavy when that was asked last.
        seen_at: When they had something to do last.
    """

    __slots__ = ("counted_at", "is_heavy", "level_s", "seen_at")

    def __init__(self, moment: float) -> None:
        self.level_s, self.counted_at, self.seen_at = 0.0, moment, moment
        self.is_heavy = False


class SenderUsage:
    """The senders of one engine.

    Args:
        window_s: How long one without requests still counts; 0 if nothing is shared.
        step_factor: See ``StepTimes``.
        clock: Tells seconds.
    """

    def __init__(
        self, window_s: float, step_factor: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Know nobody."""
        self._window_s = window_s
        self._clock = clock
        self._senders: dict[str, _Sender] = {}
        self.times = StepTimes(step_factor)

    def __len__(self) -> int:
        """Return how many senders there are."""
        return len(self._senders)

    def arrive(self, sender: str) -> None:
        """Take note of a request; one of nobody's, on a server without tenants, is not looked at."""
        if not sender or not self._window_s:
            return
        known = self._senders.get(sender)
        if known is None:
            self._senders[sender] = _Sender(self._clock())
        else:
            known.seen_at = self._clock()

    def keep(self, busy: Set[str]) -> None:
        """Forget who has been away for long.

        Args:
            busy: Those who have requests.
        """
        moment = self._clock()
        for name, sender in list(self._senders.items()):
            if name in busy:
                sender.seen_at = moment
            elif moment - sender.seen_at > self._window_s:
                del self._senders[name]

    def light(self) -> frozenset[str]:
        """Return who has not had more than their share."""
        moment = self._clock()
        for sender in self._senders.values():
            enough = _LIGHT_S if sender.is_heavy else _HEAVY_S
            sender.is_heavy = self._level_s(sender, moment) >= enough
        return frozenset(name for name, sender in self._senders.items() if not sender.is_heavy)

    def charge(self, tokens: Mapping[str, int], seconds: float) -> None:
        """Charge a step that has just ended to those whose tokens it computed, by their number."""
        moment, total = self._clock(), sum(tokens.values())
        for name, num_tokens in tokens.items():
            if name in self._senders:
                self._add(self._senders[name], moment, seconds * num_tokens / total)

    def all_to_one(self) -> dict[str, int]:
        """Return, as ``charge`` takes it, a step of the only sender that there is."""
        return dict.fromkeys(self._senders, 1)

    def _add(self, sender: _Sender, moment: float, seconds: float) -> None:
        sender.level_s = min(_MOST_S, self._level_s(sender, moment) + seconds)
        sender.counted_at = moment

    def _level_s(self, sender: _Sender, moment: float) -> float:
        """Return a level now; where the engine is idle or another's, it falls."""
        passed_s = max(0.0, moment - sender.counted_at)
        return max(0.0, sender.level_s - passed_s / max(2, len(self._senders)))


__all__ = ["SENDER_KEY", "SenderUsage", "StepTimes"]
