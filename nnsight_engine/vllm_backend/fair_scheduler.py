"""vLLM's scheduler with fair sharing: one tenant's flood of requests does not delay others' first tokens.

While some tenants are *heavy* (above their share, see ``SenderUsage``) and others *light*, prompts of light
tenants are computed in steps of their own, ahead of all others, even by preemption of the last heavy
requests. All other steps are short. With one tenant, or none, steps are exactly vLLM's, but for requests with
much work (``StepWork``). Requests whose operations take longer than the model are *costly*: beside other
tenants they never run ahead of others, and rest after each of their steps for as long as it took.

Engine time used by each tenant (*sender*), and the maximum length of a step while several are active.

A step's seconds are charged in proportion to tokens. With n senders, a level falls by 1/n of the time that
passes, 1/2 at most. At ``_HEAVY_S`` a sender is *heavy*: one that keeps the engine busy for less than its
share is not.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from nnsight_engine.plans.request_plan import RequestPlan
from nnsight_engine.plans.work import MAX_WEIGHTS, WorkByPosition
from nnsight_engine.vllm_backend.compat import EngineLimits, entry_of, params_of

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


class _SizeClass(NamedTuple):
    """Recent steps of similar size: their median number of tokens, and nearly the shortest duration."""

    num_tokens: float
    seconds: float


class StepTimes:
    """Recent durations of steps, in size classes that are powers of two of their numbers of tokens.

    A *short* step takes at most ``factor`` times as long as the shortest steps.
    """

    def __init__(self, factor: float) -> None:
        """Begin without steps; a short step may take ``factor`` times as long as the shortest ones."""
        self._factor = factor
        self._seen: dict[int, deque[tuple[float, int]]] = {}  # seconds and tokens, by size class
        self._short = _DEFAULT_TOKENS
        self._steps_until_estimate = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record a step in its size class, a power of two of its number of tokens."""
        size = num_tokens.bit_length()
        if size not in self._seen:
            self._seen[size] = deque(maxlen=_MAX_SAMPLES)
        self._seen[size].append((seconds, num_tokens))
        self._steps_until_estimate -= 1

    @property
    def short(self) -> int:
        """The number of tokens of a short step."""
        if self._steps_until_estimate <= 0:
            self._short, self._steps_until_estimate = self._estimate(), _STEPS_PER_ESTIMATE
        return self._short

    def _estimate(self) -> int:
        """Return how many tokens a step may have to take ``factor`` times as long as the shortest steps."""
        classes = [
            # The second-shortest time: other load on the machine makes steps longer, never shorter.
            _SizeClass(statistics.median(num for _, num in seen), sorted(took for took, _ in seen)[1])
            for _, seen in sorted(self._seen.items())
            if len(seen) >= _MIN_SAMPLES
        ]
        if not classes or classes[0].num_tokens > _MAX_SHORTEST_TOKENS:
            return _DEFAULT_TOKENS
        limit = classes[0].seconds * self._factor
        too_long = bisect.bisect_left(classes, 1, key=lambda size: int(size.seconds > limit))
        if too_long == len(classes):
            # No step was too long: try a larger one.
            return max(_DEFAULT_TOKENS, int(2 * classes[-1].num_tokens))
        (before, quick), (after, slow) = classes[max(too_long - 1, 0)], classes[too_long]
        # Interpolated between the last class that is short enough and the first that is not.
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
        """Begin without senders; one is kept for ``window_s`` after its last request, 0 turns sharing off."""
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
        """Return the senders that are not heavy now; a heavy one stays so until it is below ``_LIGHT_S``."""
        moment = self._clock()
        for sender in self._senders.values():
            enough = _LIGHT_S if sender.is_heavy else _HEAVY_S
            sender.is_heavy = self._level_s(sender, moment) >= enough
        return frozenset(name for name, sender in self._senders.items() if not sender.is_heavy)

    def charge(self, tokens: Mapping[str, int], seconds: float) -> None:
        """Add a step's ``seconds`` to its senders' levels, in proportion to their ``tokens``."""
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


class StepWork:
    """Bounds the work of operations in a step; requests that it skips come first in the next one.

    Work at a position is a multiple of the model's own.
    """

    def __init__(self) -> None:
        self.limit = 0.0
        self._of: dict[str, WorkByPosition] = {}
        self._used: dict[str, float] = {}  # work in this step, by request
        self._weights = 0.0  # that this step reads, as a multiple of the model's own
        self._skipped: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    def add(self, request_id: str, plan: RequestPlan, prompt_ids: Iterable[int]) -> None:
        """Add a request; one without much work is ignored."""
        if plan.works:
            self._of[request_id] = WorkByPosition(plan, prompt_ids)

    def is_costly(self, request_id: str) -> bool:
        """Return whether a request's operations take longer than the model at some position."""
        return request_id in self._of and self._of[request_id].most > 1

    def discard(self, request_id: str) -> None:
        self._of.pop(request_id, None)
        self._skipped.discard(request_id)

    def begin_step(self, limit: float) -> None:
        self.limit = limit
        self._used.clear()
        self._weights = 0.0
        self._skipped.clear()

    def was_skipped(self, request_id: str) -> bool:
        return request_id in self._skipped

    def fit(self, request_id: str, start: int, num_tokens: int, *, is_whole: bool) -> int:
        """Return how many of a request's next positions this step computes, and count their work.

        With ``is_whole`` all or none. The step's first request with work gets at least one in any case.
        """
        work = self._of.get(request_id)
        if work is None or not num_tokens:
            return num_tokens
        free = self.limit - self.used
        stop = start + num_tokens
        if self._used and self._weights + work.weights > MAX_WEIGHTS:
            stop = start
        elif not is_whole:
            stop = work.stop_within(start, stop, max(free, 0.0))
        elif self._used and work.between(start, stop) > free:
            stop = start
        if stop == start and not self._used:
            stop = start + 1
        if stop == start:
            self._skipped.add(request_id)
        else:
            self._used[request_id] = work.between(start, stop)
            self._weights += work.weights
        return stop - start

    def used_by(self, request_id: str) -> float:
        return self._used.get(request_id, 0.0)

    @property
    def used(self) -> float:
        return sum(self._used.values())

    @property
    def has_costly(self) -> bool:
        return any(map(self.is_costly, self._used))

    def without_room(self, chunks: Iterable[tuple[str, int, int]], waiting: Iterable[str]) -> set[str]:
        """Return the waiting requests with much work that have no room beside the running ``chunks``.

        A chunk is a request's id, its next position, and the end of the positions that it may compute.
        """
        planned = [(self._of[name], start, stop) for name, start, stop in chunks if name in self._of]
        works = (work.between(start, stop) for work, start, stop in planned)
        is_full = any(total >= self.limit for total in itertools.accumulate(works))
        weights = sum(work.weights for work, _, _ in planned)
        return {
            name
            for name in waiting
            if name in self._of and (is_full or weights + self._of[name].weights > MAX_WEIGHTS)
        }


_STARTABLE: Final = {RequestStatus.WAITING, RequestStatus.PREEMPTED}
_SENDER_CHECK_S: Final = 0.5


class _StartedStep(NamedTuple):
    """A step under way; ``num_tokens`` includes operations' work, ``shares`` is None if nobody is charged."""

    moment: float
    num_tokens: int
    shares: Mapping[str, int] | None
    is_costly: bool


class FairScheduler(Scheduler):
    """vLLM's scheduler with fair sharing; ``whole_step_tokens`` is the limit of a step that is not short."""

    running: list[Request]
    max_num_active_reqs: int
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    num_spec_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        limits = EngineLimits.read(self.vllm_config)
        self.sharing = SenderUsage(limits.fair_window_s, limits.fair_step)
        self.work = StepWork()
        self._max_work = limits.max_step_work
        self.whole_step_tokens: int = self.max_num_scheduled_tokens
        self._checked_at = 0.0
        # Whether the step is for light tenants only, and whether the last such step had no tokens.
        self._is_exclusive = self._was_empty = False
        self._in_flight: deque[_StartedStep] = deque()
        self._busy_since: float | None = None
        self._work_rests_until = 0.0
        self.is_step_of_pack = False

    def add_request(self, request: Request) -> None:
        self.sharing.arrive(_sender(request))
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step as vLLM does; with several tenants, from limited queues (``_limited_queues``)."""
        began = time.perf_counter()
        self._begin_work()
        if not self.sharing:
            output = self.schedule_all(*args, **kwargs)
            self._in_flight.append(self._started(began, output, None))
            return output
        self._is_exclusive = False
        if len(self.sharing) == 1 or self.is_step_of_pack:
            output = self.schedule_all(*args, **kwargs)
        else:
            with self._limited_queues():
                output = self.schedule_all(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        # If light requests could not start for lack of blocks, the next step is for all again.
        self._was_empty = self._is_exclusive and not scheduled
        # The tenants are recorded now: a request that is aborted while the step runs is still charged for it.
        shares = self._shares(scheduled) if scheduled else None
        self._in_flight.append(self._started(began, output, shares))
        return output

    @property
    def is_busy_elsewhere(self) -> bool:
        """Whether a step with tokens is under way beside the one that was scheduled last."""
        return any(step.num_tokens for step in itertools.islice(self._in_flight, len(self._in_flight) - 1))

    def schedule_all(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule from the queues, without waiting requests whose operations have no room in this step."""
        if not (self.work and self.waiting):
            return super().schedule(*args, **kwargs)
        # vLLM does not look behind a waiting request that gets no position.
        waiting = [request.request_id for request in self.waiting]
        held = self.work.without_room(map(_next_chunk, self.running), waiting)
        with self.held_back(lambda request: request.request_id in held):
            return super().schedule(*args, **kwargs)

    def _begin_work(self) -> None:
        if self.work:
            self.running.sort(key=lambda request: not self.work.was_skipped(request.request_id))
        self.work.begin_step(self._max_work)

    def _started(
        self, began: float, output: SchedulerOutput, shares: Mapping[str, int] | None
    ) -> _StartedStep:
        """Return a record of the step that begins; its time is charged by ``shares`` when it ends."""
        num_tokens = int(output.total_num_scheduled_tokens) + round(self.work.used)
        return _StartedStep(began, num_tokens, shares, self.work.has_costly)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Reduce the tokens that vLLM schedules for a request to those whose operations have room."""
        num_tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if request.request_id not in self.work:
            return num_tokens
        return self.work.fit(
            request.request_id,
            num_computed_tokens,
            num_tokens,
            is_whole=self.need_mamba_block_aligned_split or self.needs_single_step(request),
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step's output as vLLM does, and charge the step's time to its tenants."""
        started = self._in_flight.popleft()
        if started.shares is not None:
            moment = time.perf_counter()
            busy_since = started.moment if self._busy_since is None else self._busy_since
            # A step that was scheduled while another was under way has begun when that one ended.
            self.sharing.times.add(started.num_tokens, moment - max(started.moment, busy_since))
            # Time between steps is charged as well, since other tenants lose it too, unless the engine was
            # idle.
            self.sharing.charge(started.shares, moment - busy_since)
            if started.is_costly and len(self.sharing) > 1:
                self._work_rests_until = moment + moment - busy_since  # for as long as the step took
            self._busy_since = moment
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if not (self.requests or self._in_flight):
            self._busy_since = None
        return outputs

    def needs_single_step(self, request: Request) -> bool:
        return not self.scheduler_config.enable_chunked_prefill or bool(request.has_encoder_inputs)

    def group_members(self, request: Request) -> Collection[str]:
        """Return the ids of the requests that must run for this one to make progress."""
        del request
        return ()

    def may_be_preempted(self, request: Request) -> bool:
        del request
        return True

    def _shares(self, scheduled: Mapping[str, int]) -> Mapping[str, int]:
        """Return the tokens by which each tenant is charged for a step, its operations' work included."""
        if len(self.sharing) == 1:
            return self.sharing.all_to_one()
        tokens: Counter[str] = Counter()
        for request_id, num_tokens in scheduled.items():
            tokens[_sender(self.requests[request_id])] += num_tokens + round(self.work.used_by(request_id))
        return tokens

    @contextlib.contextmanager
    def _limited_queues(self) -> Iterator[None]:
        """Let light senders' requests go first, in their own steps, or short ones beside heavy ones."""
        self._drop_idle_senders()
        # While the engine is paused nothing new starts, so nobody makes room for it.
        light_senders = frozenset() if self.pause_state else self.sharing.light_senders()

        def goes_first(request: Request) -> bool:
            return _sender(request) in light_senders and not self.work.is_costly(request.request_id)

        light_running = [request for request in self.running if goes_first(request)]
        other_running = [request for request in self.running if not goes_first(request)]
        light_waiting = [request for request in self.waiting if goes_first(request)] if light_senders else []
        if self._is_for_light(light_running, light_waiting):
            self._is_exclusive = True
            self._make_room(light_waiting, other_running)
            with self.without_running(other_running), self.held_back(lambda request: not goes_first(request)):
                yield
            return
        limit = self.max_num_scheduled_tokens
        resting = self._resting()
        self.running = [*light_running, *other_running]
        resting_running = [request for request in other_running if request.request_id in resting]
        with self.without_running(resting_running):
            if light_senders and (other_running or self.work) and not self.need_mamba_block_aligned_split:
                limit = min(limit, self._short_step(light_running))
            self.max_num_scheduled_tokens, whole_limit = limit, self.max_num_scheduled_tokens
            try:
                with self.held_back(lambda request: request.request_id in resting):
                    yield
            finally:
                self.max_num_scheduled_tokens = whole_limit

    def _resting(self) -> set[str]:
        """Return the costly requests that rest in this step; none if all requests are costly."""
        if not self.work or time.perf_counter() >= self._work_rests_until:
            return set()
        ids = {request.request_id for request in itertools.chain(self.running, self.waiting)}
        costly = set(filter(self.work.is_costly, ids))
        return costly if costly != ids else set()

    def _drop_idle_senders(self) -> None:
        moment = time.monotonic()
        if moment - self._checked_at > _SENDER_CHECK_S:
            self._checked_at = moment
            self.sharing.keep({_sender(request) for request in self.requests.values()})

    def _is_for_light(self, light_running: list[Request], light_waiting: list[Request]) -> bool:
        """Return whether the step is for light requests alone: one is about to start, or in its prefill."""
        if self._was_empty:  # such a step has just found no free blocks
            return False
        return any(request.status in _STARTABLE for request in light_waiting) or any(
            request.is_prefill_chunk for request in light_running
        )

    @contextlib.contextmanager
    def without_running(self, held: Sequence[Request]) -> Iterator[None]:
        """Remove running requests for one step; they keep their slots and their KV cache blocks."""
        ids = {request.request_id for request in held}
        self.running = [request for request in self.running if request.request_id not in ids]
        limits_before = self.max_num_running_reqs, self.max_num_active_reqs
        self.max_num_running_reqs, self.max_num_active_reqs = (limit - len(held) for limit in limits_before)
        try:
            yield
        finally:
            self.max_num_running_reqs, self.max_num_active_reqs = limits_before
            self.running = [*self.running, *held]

    @contextlib.contextmanager
    def held_back(self, is_held: Callable[[Request], bool]) -> Iterator[None]:
        """Remove requests from the queue for one step; they keep their places in it."""
        before = list(self.waiting)
        held = {request for request in before if is_held(request)}
        self.waiting.remove_requests(held)
        try:
            yield
        finally:
            if held:
                self.put_back(before, held)

    def _make_room(self, light_waiting: list[Request], heavy: list[Request]) -> None:
        """Preempt the last of the heavy requests until all that wait have slots, and the first its blocks."""
        pool = self.kv_cache_manager.block_pool
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        needed_by_first = light_waiting[0].num_tokens // self.block_size + 2 if light_waiting else 0
        # Besides, one block for each light request that runs.
        needed = num_groups * (needed_by_first + len(self.running) - len(heavy))
        max_running = self.max_num_active_reqs - len(light_waiting)
        preemptible = [request for request in heavy if self.may_be_preempted(request)]
        while preemptible and (len(self.running) > max_running or pool.get_num_free_blocks() < needed):
            request = preemptible.pop()
            heavy.remove(request)
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())

    def _short_step(self, light_running: list[Request]) -> int:
        """Return a short step's token limit; reorders running requests so that companions run together."""
        # Each light request can go on, with its drafts.
        limit = free = max(self.sharing.times.short, len(light_running) * (1 + self.num_spec_tokens) + 1)
        num_going = 0
        while free > 0 and num_going < len(self.running):
            free -= missing(self.running[num_going])
            num_going += 1
        going, paused = self.running[:num_going], self.running[num_going:]
        wanted = {member for request in going for member in self.group_members(request)}
        beside = [request for request in paused if request.request_id in wanted]
        if beside:
            self.running = [*going, *beside, *(request for request in paused if request not in beside)]
            limit += sum(map(missing, beside))
        following = next(iter(self.waiting), None)
        if free > 0 and following is not None and self.needs_single_step(following):
            limit = limit - free + max(free, missing(following))
        return limit

    def put_back(self, before: list[Request], held: set[Request]) -> None:
        """Restore the queue; a request that was not in it ``before`` was preempted, and goes to the front."""
        waiting = list(self.waiting)
        known, still = set(before), {*waiting, *held}
        self.waiting.remove_requests(waiting)
        preempted = [request for request in waiting if request not in known]
        for request in preempted + [request for request in before if request in still]:
            self.waiting.add_request(request)


def _sender(request: Request) -> str:
    sender = entry_of(params_of(request), SENDER_KEY)
    return sender if isinstance(sender, str) else ""


def _next_chunk(request: Request) -> tuple[str, int, int]:
    """Return a request's id, its first position that is not computed, and the one after the last."""
    start = request.num_computed_tokens
    return request.request_id, start, start + missing(request)


def missing(request: Request) -> int:
    """Return how many tokens of a request can be computed, including drafts and one that is being sampled."""
    return int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)
