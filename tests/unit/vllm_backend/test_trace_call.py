"""Chunks of a stream with a trace: every print, and lists whose items are complete; hostile data."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput
from vllm import SamplingParams

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.plans.collect.results import CollectedTrace
from nnsight_engine.remote_backend.unread_output import Backpressure
from nnsight_engine.sandbox.errors import SandboxUnavailableError
from nnsight_engine.serialization import encode
from nnsight_engine.serialization.failures import encode_error
from nnsight_engine.vllm_backend.running_trace import FinishedTrace, TraceRouter
from nnsight_engine.vllm_backend.trace_call import TraceCall, TracedPrompt
from nnsight_engine.vllm_backend.trace_results import BlockError
from tests.unit.vllm_backend.scripted_engine import Engine


def new_call(*, streams: bool = False, max_requests: int = 1, max_bytes: int = 2**30) -> TraceCall:
    return TraceCall(
        b"", name="t", param="p", filename="f", streams=streams, max_requests=max_requests,
        max_bytes=max_bytes, sandbox_of=None,
    )  # fmt: skip


def begun(call: TraceCall, request_id: str = "request") -> TracedPrompt:
    """Return a prompt of a call; no engine runs it."""
    engine: Any = None
    return call.begin(engine, {"prompt_token_ids": [1]}, SamplingParams(), request_id)


def finished(data: bytes) -> FinishedTrace:
    return FinishedTrace(data, "", "", "tap", has_begun=True, results={})


class Stream:
    """A streamed call whose block tells what a test says."""

    def __init__(self, max_bytes: int = 2**20) -> None:
        self.call = new_call(streams=True)
        self.unread = Backpressure(max_bytes)
        self.router = TraceRouter(self.unread)
        self.traced = begun(self.call)
        self.key = self.traced.requests.key
        self.traced.share = self.router.open(self.key, self.traced, max_bytes=max_bytes)

    def tell_bytes(self, news: bytes) -> None:
        self.router.deliver([(self.key, 0, news, "")], 0)

    def report(self, printed: str = "", whole: dict[str, Any] | None = None, **grown: list[Any]) -> None:
        news = encode({"whole": whole or {}, "grown": grown}) if whole or grown else None
        self.router.deliver([(self.key, 0, news, printed)], 0)

    async def chunk(self) -> tuple[dict[str, Any], dict[str, Any], str]:
        collected = await self.call.take_part(0, 1)
        if collected is None:
            return {}, {}, ""
        (result,) = collected.results
        assert isinstance(result, CollectedTrace)
        return result.saves, result.grown, result.printed


async def test_prints_and_other_values_come_beside_what_json_has_no_place_for() -> None:
    stream = Stream()
    stream.report("one\n", {"raw": b"bytes", "rows": [1]})
    assert await stream.chunk() == ({"rows": [1]}, {}, "one\n")
    stream.report("two\n", {"raw": b"bytes"})
    assert await stream.chunk() == ({}, {}, "two\n")
    stream.report("", rows=[2])
    assert await stream.chunk() == ({}, {"rows": [2]}, "")
    assert await stream.chunk() == ({}, {}, "")


async def test_items_never_follow_ones_that_could_not_be_sent() -> None:
    stream = Stream()
    stream.report("", {"rows": [1]})
    await stream.chunk()
    stream.report("", rows=[b"bytes"])
    stream.report("", rows=[3])
    await stream.chunk()
    stream.report("later", rows=[4])
    assert await stream.chunk() == ({}, {}, "later")
    stream.report("", {"rows": [5]})
    stream.report("", rows=[6])
    assert await stream.chunk() == ({"rows": [5, 6]}, {}, "")


async def test_after_too_much_waited_only_whole_values_come() -> None:
    stream = Stream(max_bytes=2000)
    stream.report("", {"rows": [1], "other": [1]})
    await stream.chunk()
    stream.report("first ", rows=["x" * 1700])
    stream.report("second", rows=["x" * 1700])
    stream.report("", rows=[4], other=[4])
    stream.report("", {"other": [1, 2]})
    stream.report("", rows=[5], other=[5])
    assert await stream.chunk() == ({"other": [1, 2, 5]}, {}, "first second")
    stream.report("", rows=[6], other=[6])
    assert await stream.chunk() == ({}, {"other": [6]}, "")
    stream.router.close(stream.key)
    assert stream.unread.num_bytes == 0


async def test_large_deltas_are_read_beside_later_events() -> None:
    stream = Stream(max_bytes=2**24)
    stream.report("", {"rows": [torch.zeros(2**20)]})
    reading = asyncio.create_task(stream.chunk())
    await asyncio.sleep(0)
    stream.report("", rows=[2])
    saves, grown, _ = await reading
    assert (len(saves["rows"]), grown) == (1, {})
    assert await stream.chunk() == ({}, {"rows": [2]}, "")
    assert stream.unread.num_bytes == 0


_DEEP: list[Any] = []
for _ in range(10_000):
    _DEEP = [_DEEP]
HOSTILE: Final[dict[str, Callable[[], bytes]]] = {
    "compressed": lambda: encode({"whole": {"a": torch.zeros(2**22)}, "grown": {}}, compress=True),
    "nothing": lambda: b"",
    "noise": lambda: b"NNSW" + bytes(range(200)),
    "a list": lambda: encode([1, 2]),
    "no dicts": lambda: encode({"whole": [1], "grown": 7}),
    "names that are none": lambda: encode({"whole": {("a", 1): 1}, "grown": {}}),
    "items that are none": lambda: encode({"whole": {"a": 1}, "grown": {"a": [1]}}),
    "a class": lambda: encode({"whole": {"a": SimpleNamespace(b=1)}, "grown": {}}),
    "an import": lambda: encode({"whole": {"a": BaseModelOutput()}, "grown": {}}),
    "more objects than a block saves": lambda: encode(
        {"whole": {"a": [float(n) for n in range(1_000_001)]}, "grown": {}}
    ),
}
"""Made when a test asks for them: some take seconds."""


@pytest.mark.parametrize("case", HOSTILE)
async def test_news_that_cannot_be_read_fail_their_own_request(case: str) -> None:
    stream, other = Stream(max_bytes=2**26), Stream()
    stream.tell_bytes(HOSTILE[case]())
    other.report("", {"a": 1})
    with pytest.raises(ApiError) as caught:
        await stream.chunk()
    assert (caught.value.code, caught.value.status, caught.value.param) == ("trace_failed", 400, "p")
    assert stream.unread.num_bytes == 0
    assert await other.chunk() == ({"a": 1}, {}, "")


_SHARED: list[Any] = ["ab"]
for _ in range(60):  # its text has 2^60 parts
    _SHARED = [_SHARED, _SHARED]
GOOD: Final[dict[str, Any]] = {"error": None, "choice": 0, "saves": {"a": 1}}
ERROR: Final[dict[str, Any]] = {"name": "n", "message": "m", "module": "", "notes": [], "entries": []}
EVIL: Final[list[Any]] = [
    _DEEP, _SHARED, [_SHARED], [{"file": _SHARED, "line": 1, "source": ""}], range(10**12)
]  # fmt: skip
WRONG_BLOCKS: Final[list[list[Any]]] = [
    [{**GOOD, "saves": {1: 1}}],
    [{**GOOD, "choice": 9}],
    [{**GOOD, "error": 5}],
    [{**GOOD, "warnings": [1]}],
    [{**GOOD, "warnings": "said"}],
    [GOOD, GOOD],
    *([{**GOOD, "error": {**ERROR, part: evil}}] for part in ERROR for evil in EVIL),
]


@pytest.mark.parametrize(
    "made",
    [
        *HOSTILE.values(),
        *(functools.partial(encode, {"blocks": blocks}) for blocks in WRONG_BLOCKS),
        lambda: encode({"blocks": [GOOD]}, compress=True),
    ],
)
async def test_results_that_cannot_be_read_fail_their_own_request(made: Callable[[], bytes]) -> None:
    data = made()
    with pytest.raises(ApiError) as caught:
        Stream().traced.read_results(finished(data))
    assert (caught.value.code, caught.value.status) == ("trace_failed", 400)
    assert len(caught.value.message) < 1000
    traced = Stream().traced
    traced.read_results(finished(encode({"blocks": [GOOD]})))
    assert traced.choices[0].saves == {"a": 1}


async def test_a_long_error_is_cut() -> None:
    error = {"name": "n" * 10**6, "message": "m" * 10**6, "module": "", "notes": ["o" * 10**6] * 1000}
    assert len(Stream().call.failed(BlockError.of(error), has_begun=True).message) < 200_000


@pytest.mark.parametrize("evil", [range(10**12), "a" * 100, {"a": 1}, b"bytes", 3])
async def test_a_list_grows_by_the_items_of_a_list(evil: Any) -> None:
    for whole in ({"rows": [1]}, {}):
        stream = Stream()
        stream.report("", {"rows": [0]})
        await stream.chunk()
        stream.tell_bytes(encode({"whole": whole, "grown": {"rows": evil}}))
        with pytest.raises(ApiError, match="cannot be read"):
            await stream.chunk()
    stream = Stream()
    stream.tell_bytes(encode({"whole": {"rows": evil}, "grown": {"rows": [1]}}))
    with pytest.raises(ApiError, match="cannot be read"):
        await stream.chunk()


async def test_what_is_saved_many_times_is_not_made_many_times() -> None:
    traced = begun(new_call(max_bytes=2**20))
    saves = {"x": [torch.zeros(2**10)] * 1000}
    data = encode({"blocks": [{**GOOD, "saves": saves}]})
    with pytest.raises(ApiError, match="counting an object each time") as caught:
        traced.read_results(finished(data))
    assert caught.value.code == "trace_failed"


def test_a_block_for_which_there_was_no_process_may_be_sent_again() -> None:
    call = Stream().call
    error = BlockError.of(encode_error(SandboxUnavailableError("16 sandboxes are at work")))
    refused = call.failed(error, has_begun=False)
    assert (refused.code, refused.status) == (ErrorCode.QUEUE_FULL, 429)
    assert "16 sandboxes" in refused.message
    # A block that raises such an error itself has begun.
    assert call.failed(error, has_begun=True).code is ErrorCode.TRACE_FAILED


def test_clients_do_not_choose_the_names_by_which_requests_are_ended() -> None:
    call = new_call(max_requests=2)
    ids = [begun(call, "cmpl-7-0").requests.ids[0] for _ in range(2)]
    assert len({"cmpl-7-0", *ids}) == 3
    assert all(one.startswith("cmpl-7-0-") for one in ids)


class Slot:
    """A slot that is granted at once."""

    is_released = False

    async def wait_granted(self) -> None:
        pass

    def release(self) -> None:
        self.is_released = True


def prompt_of(
    call: TraceCall, engine: Engine, steps: Sequence[Any], **sampling: Any
) -> tuple[TracedPrompt, Slot]:
    """Return the call's next prompt, and the slot that it waits for."""
    slot = Slot()
    call.slot = lambda: slot
    return call.begin(engine, {"steps": steps}, SamplingParams(**sampling), "request"), slot


async def test_the_slot_of_an_abandoned_prompt_is_released_when_the_engine_has_dropped_it() -> None:
    engine, call = Engine(), new_call(max_requests=2)
    prompt, slot = prompt_of(call, engine, range(1, 1000))
    unstarted, free = prompt_of(call, engine, [1])
    outputs = prompt.outputs()
    await anext(outputs)
    await outputs.aclose()
    ends: list[Any] = []
    call.close(ends.append)
    assert (len(ends), slot.is_released, free.is_released) == (1, False, True)
    await ends[0]
    assert slot.is_released
    assert (engine.forgotten, engine.aborted) == ([prompt.requests.key], prompt.requests.ids)
    assert (engine.num_running, len(engine.traces), unstarted.is_running) == (0, 0, False)
