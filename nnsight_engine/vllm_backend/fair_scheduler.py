"""vLLM's scheduler with turns for several senders: nobody's first token waits for the flood of another.

vLLM's queue is one for all: behind who sends thousands of requests, everybody waits, and beside them each
step is as long as their batch. Here, while some have had more than their share (``sender_usage``) and others
not:

- The others' prompts are computed in steps of their own, ahead of everybody's, also where no place or no
  block of the cache is left: places are lent, and blocks taken from the last request of the heavy, which
  computes them again.
- All other steps are short, so that the next prompt need not wait for a long one: requests of the heavy go on
  in the order in which they came, as many as fit.

Nobody pauses where all are heavy, or all light, and with one sender, or none, a step is vLLM's and nothing
else. ``InterventionScheduler`` is made of this.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.sender_usage import SENDER_KEY, SenderUsage

_MAY_BEGIN: Final = {RequestStatus.WAITING, RequestStatus.PREEMPTED}
_LOOK_S: Final = 0.5


class _Begun(NamedTuple):
    """A step that runs.

    Attributes:
        moment: When it was begun to be put together.
        num_tokens: How many it computes.
        shares: Whose it is, see ``SenderUsage.charge``.
    """

    moment: float
    num_tokens: int
    shares: Mapping[str, int]


class FairScheduler(Scheduler):
    """vLLM's scheduler, sharing between senders.

    Attributes:
        sharing: Says who is light, and how long short steps are.
        whole_step_tokens: Most tokens of a step that is not short.
    """

    running: list[Request]
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Know no sender yet."""
        super().__init__(*args, **kwargs)
        limits = EngineLimits.read(self.vllm_config)
        self.sharing = SenderUsage(limits.fair_window_s, limits.fair_step)
        self.whole_step_tokens: int = self.max_num_scheduled_tokens
        self._looked_at = 0.0
        self._came_to_nothing = False
        self._began: _Begun | None = None
        self._busy_since: float | None = None

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.sharing.arrive(_sender(request))
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step: for all, or for those whose turn it is."""
        if not self.sharing:
            return self.schedule_all(*args, **kwargs)
        began = time.perf_counter()
        if len(self.sharing) == 1 and len(self.running) <= self.max_num_running_reqs:
            output = self.schedule_all(*args, **kwargs)
        else:
            with self._turn():
                output = self.schedule_all(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        # Whose they are is noted now: who ends a request while its step runs has had the step all the same.
        self._began = _Begun(began, sum(scheduled.values()), self._shares(scheduled)) if scheduled else None
        return output

    def schedule_all(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step for whoever is in the queues."""
        return super().schedule(*args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a step's results, and charge for it."""
        if self._began is not None:
            began, num_tokens, shares = self._began
            self._began = None
            moment = time.perf_counter()
            self.sharing.times.add(num_tokens, moment - began)
            # What passes between steps is taken from others too, unless there was nothing to do.
            seconds = moment - (began if self._busy_since is None else self._busy_since)
            self.sharing.charge(shares, seconds)
            self._busy_since = moment
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if not self.requests:
            self._busy_since = None
        return outputs

    def comes_whole(self, request: Request) -> bool:
        """Tell whether a prompt cannot be split over steps as one likes."""
        return not self.scheduler_config.enable_chunked_prefill or bool(request.has_encoder_inputs)

    def companions(self, request: Request) -> Collection[str]:
        """Return the ids of the requests without which one does not go on."""
        del request
        return ()

    def _shares(self, scheduled: Mapping[str, int]) -> Mapping[str, int]:
        """Return whose step one is, by tokens."""
        if len(self.sharing) == 1:
            return self.sharing.all_to_one()
        tokens: Counter[str] = Counter()
        for request_id, num_tokens in scheduled.items():
            tokens[_sender(self.requests[request_id])] += num_tokens
        return tokens

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Leave in the queues, for the length of one step, those whose turn it is."""
        self._look()
        light = self.sharing.light()
        first = [request for request in self.running if _sender(request) in light]
        rest = [request for request in self.running if _sender(request) not in light]
        waiting = [request for request in self.waiting if _sender(request) in light] if light else []
        if self._is_exclusive(first, waiting):
            self._make_room(waiting, rest)
            with self._alone(first, rest, light):
                yield
                # Whoever could not begin after all, for want of blocks, is not to keep the others waiting.
                self._came_to_nothing = not any(one.num_in_flight_tokens for one in self.running)
            return
        self._came_to_nothing = False
        limit = self.max_num_scheduled_tokens
        self.running = [*first, *rest]
        if light and rest and not self.need_mamba_block_aligned_split:
            limit = min(limit, self._short_step(first))
        held, self.running = self._beyond_places()
        self.max_num_scheduled_tokens, before = limit, self.max_num_scheduled_tokens
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = before
            self.running = [*self.running, *held]

    def _look(self) -> None:
        moment = time.monotonic()
        if moment - self._looked_at > _LOOK_S:
            self._looked_at = moment
            self.sharing.keep({_sender(request) for request in self.requests.values()})

    def _is_exclusive(self, running: list[Request], waiting: list[Request]) -> bool:
        """Tell whether a step is for these alone: one of them is to begin, or has begun its prompt."""
        if self._came_to_nothing:
            return False
        return any(request.status in _MAY_BEGIN for request in waiting) or any(
            request.is_prefill_chunk for request in running
        )

    @contextlib.contextmanager
    def _alone(self, first: list[Request], rest: list[Request], light: frozenset[str]) -> Iterator[None]:
        before = list(self.waiting)
        held = {request for request in before if _sender(request) not in light}
        self.running = first
        self.waiting.remove_requests(held)
        try:
            yield
        finally:
            self.running = [*self.running, *rest]
            if held:
                self.put_back(before, held)

    def _make_room(self, waiting: list[Request], rest: list[Request]) -> None:
        """Take blocks of the cache from the last of the rest, as far as the first to begin needs them."""
        pool = self.kv_cache_manager.block_pool
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        coming = waiting[0].num_tokens // self.block_size + 2 if waiting else 0
        needed = num_groups * (coming + len(self.running) - len(rest))
        while rest and pool.get_num_free_blocks() < needed:
            request = rest.pop()
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())

    def _short_step(self, first: list[Request]) -> int:
        """Return how many tokens a step has that the next prompt may have to wait for.

        Puts into front those of the running who do not go on without each other.
        """
        limit = left = max(self.sharing.times.short, len(first) + 1)
        num_going = 0
        while left > 0 and num_going < len(self.running):
            left -= _missing(self.running[num_going])
            num_going += 1
        going, paused = self.running[:num_going], self.running[num_going:]
        wanted = {one for request in going for one in self.companions(request)}
        beside = [request for request in paused if request.request_id in wanted]
        if beside:
            self.running = [*going, *beside, *(request for request in paused if request not in beside)]
            limit += sum(map(_missing, beside))
        following = next(iter(self.waiting), None)
        if left > 0 and following is not None and self.comes_whole(following):
            limit = limit - left + max(left, _missing(following))
        return limit

    def _beyond_places(self) -> tuple[list[Request], list[Request]]:
        """Return those of the running for whom a step has no places, since some were lent, and the others."""
        most = self.max_num_running_reqs
        return self.running[most:], self.running[:most]

    def put_back(self, before: list[Request], held: set[Request]) -> None:
        """Let those who were held have the places in the queue that they had before the step.

        Args:
            before: The queue then. Whoever is in it now and was not was preempted, and is the first.
            held: Those taken out of it.
        """
        left = list(self.waiting)
        known, still = set(before), {*left, *held}
        self.waiting.remove_requests(left)
        for request in [one for one in left if one not in known] + [one for one in before if one in still]:
            self.waiting.add_request(request)


def _sender(request: Request) -> str:
    params = request.sampling_params
    sender = (params.extra_args or {}).get(SENDER_KEY, "") if params is not None else ""
    return sender if isinstance(sender, str) else ""


def _missing(request: Request) -> int:
    return int(request.num_tokens - request.num_computed_tokens)


__all__ = ["FairScheduler"]
