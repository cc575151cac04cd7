"""Engine time used by each tenant (*sender*), and the maximum length of a step while several are active.

A step's seconds are charged in proportion to tokens. With n senders, a level falls by 1/n of the time that
passes, 1/2 at most. At ``_HEAVY_S`` a sender is *heavy*: one that keeps the engine busy for less than its
share is not.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Final

SENDER_KEY: Final = "nnsight_engine_sender"
"""Key of ``extra_args`` in which the server passes the request's tenant."""

_HEAVY_S: Final = 0.5
_LIGHT_S: Final = 0.1
"""Hysteresis: a heavy sender becomes light below this level, so that long and short steps don't alternate."""

_MAX_S: Final = 1.0
"""Upper limit of a level: a sender that stops flooding an engine is light again soon."""

_FEW_TOKENS: Final = 4
"""Lower limit of a short step: a step of so few tokens counts as short, however long it takes."""
_DEFAULT_TOKENS: Final = 8
_MAX_SHORTEST_TOKENS: Final = 16
"""The shortest step's duration is measured only on steps of at most this many tokens."""
_MAX_SAMPLES: Final = 9
_MIN_SAMPLES: Final = 3
_STEPS_PER_ESTIMATE: Final = 32


class StepTimes:
    """Recent durations of steps, in size classes that are powers of two of their numbers of tokens."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._seen: dict[int, deque[tuple[float, int]]] = {}
        self._short = _DEFAULT_TOKENS
        self._steps_until_estimate = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        size = num_tokens.bit_length()
        if size not in self._seen:
            self._seen[size] = deque(maxlen=_MAX_SAMPLES)
        self._seen[size].append((seconds, num_tokens))
        self._steps_until_estimate -= 1

    @property
    def short(self) -> int:
        if self._steps_until_estimate <= 0:
            self._short, self._steps_until_estimate = self._estimate(), _STEPS_PER_ESTIMATE
        return self._short

    def _estimate(self) -> int:
        known = [
            # The second-shortest time: other load on the machine makes steps longer, never shorter.
            (statistics.median(num for _, num in seen), sorted(took for took, _ in seen)[1])
            for _, seen in sorted(self._seen.items())
            if len(seen) >= _MIN_SAMPLES
        ]
        if not known or known[0][0] > _MAX_SHORTEST_TOKENS:
            return _DEFAULT_TOKENS
        limit = known[0][1] * self._factor
        fits = bisect.bisect_left(known, 1, key=lambda one: int(one[1] > limit))
        if fits == len(known):
            return max(_DEFAULT_TOKENS, int(2 * known[-1][0]))  # no step was too long: try a larger one
        (before, quick), (after, slow) = known[max(fits - 1, 0)], known[fits]
        between = before + (after - before) * (limit - quick) / (slow - quick) if slow > quick else before
        return max(_FEW_TOKENS, int(between))


class _Sender:
    """A tenant that sends requests; ``level_s`` is engine time beyond its share, as of ``counted_at``."""

    __slots__ = ("counted_at", "is_heavy", "level_s", "seen_at")

    def __init__(self, moment: float) -> None:
        self.level_s, self.counted_at, self.seen_at = 0.0, moment, moment
        self.is_heavy = False


class SenderUsage:
    """The senders of one engine, for ``window_s`` seconds after their last request; 0 turns sharing off."""

    def __init__(
        self, window_s: float, step_factor: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._window_s = window_s
        self._clock = clock
        self._senders: dict[str, _Sender] = {}
        self.times = StepTimes(step_factor)

    def __len__(self) -> int:
        return len(self._senders)

    def arrive(self, sender: str) -> None:
        """Record a request; a request without a sender (on a server without tenants) is ignored."""
        if not sender or not self._window_s:
            return
        known = self._senders.get(sender)
        if known is None:
            self._senders[sender] = _Sender(self._clock())
        else:
            known.seen_at = self._clock()

    def keep(self, busy: Set[str]) -> None:
        """Remove senders that have had no request for ``window_s``; those in ``busy`` have some now."""
        moment = self._clock()
        for name, sender in list(self._senders.items()):
            if name in busy:
                sender.seen_at = moment
            elif moment - sender.seen_at > self._window_s:
                del self._senders[name]

    def light_senders(self) -> frozenset[str]:
        moment = self._clock()
        for sender in self._senders.values():
            enough = _LIGHT_S if sender.is_heavy else _HEAVY_S
            sender.is_heavy = self._level_s(sender, moment) >= enough
        return frozenset(name for name, sender in self._senders.items() if not sender.is_heavy)

    def charge(self, tokens: Mapping[str, int], seconds: float) -> None:
        moment, total = self._clock(), sum(tokens.values())
        for name, num_tokens in tokens.items():
            if name in self._senders:
                self._add(self._senders[name], moment, seconds * num_tokens / total)

    def all_to_one(self) -> dict[str, int]:
        return dict.fromkeys(self._senders, 1)

    def _add(self, sender: _Sender, moment: float, seconds: float) -> None:
        sender.level_s = min(_MAX_S, self._level_s(sender, moment) + seconds)
        sender.counted_at = moment

    def _level_s(self, sender: _Sender, moment: float) -> float:
        passed_s = max(0.0, moment - sender.counted_at)
        return max(0.0, sender.level_s - passed_s / max(2, len(self._senders)))


__all__ = ["SENDER_KEY", "SenderUsage", "StepTimes"]
