"""The client of the benchmark, in a process of its own: rounds of completions, each to the server it names.

Reads one ``Round`` as JSON per line from standard input and answers each with the JSON of an ``Outcome``. It
is as light as may be, since it shares the machine's cores with the server, and the same for both of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

import aiohttp

_NUM_IDS: Final = 40_000
_PROMPT_TOKENS: Final = 32
_MAX_TOKENS: Final = (16, 48)
_LIMIT_S: Final = 300.0
_EVENT: Final = b"data: {"
_DONE: Final = b"data: [DONE]"


class LoadError(Exception):
    """An answer that is not what was asked for, so that its time means nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """What is sent.

    Attributes:
        url: The server.
        model: What it calls its model.
        key: Bearer token, or nothing.
        streams: Whether answers are streamed.
        concurrency: Requests that run at once; the next one begins where one ends.
        num_requests: Requests altogether.
        seed: Of the prompts; equal seeds ask for the same.
    """

    url: str
    model: str
    key: str
    streams: bool
    concurrency: int
    num_requests: int
    seed: int

    def bodies(self) -> Iterator[dict[str, Any]]:
        """Yield the requests: prompts no two alike; answers of many lengths, lest they end all at once."""
        chance = random.Random(self.seed)  # noqa: S311 - no secret
        lengths = random.Random(0)  # noqa: S311 - every round has the same, so that rounds compare
        for _ in range(self.num_requests):
            yield {
                "model": self.model,
                "prompt": [chance.randrange(100, _NUM_IDS) for _ in range(_PROMPT_TOKENS)],
                "max_tokens": lengths.randint(*_MAX_TOKENS),
                "temperature": 0,
                "ignore_eos": True,
                "stream": self.streams,
            }


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How long a round took.

    Attributes:
        request_s: Seconds of the whole round for each request of it.
        first_s: Seconds to the first token, median; to the whole answer where nothing is streamed.
        gap_s: Seconds between two tokens of one answer, median over answers; 0 where nothing is streamed.
    """

    request_s: float
    first_s: float
    gap_s: float


async def run(session: aiohttp.ClientSession, asked: Round) -> Outcome:
    """Send a round and return how long it took.

    Raises:
        LoadError: An answer was not what was asked for.
    """
    bodies = asked.bodies()
    times: list[tuple[float, float]] = []

    async def one_after_another() -> None:
        times.extend([await _answered(session, asked, body) for body in bodies])

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(asked.concurrency):
            group.create_task(one_after_another())
    whole_s = time.perf_counter() - start
    first, gaps = zip(*times, strict=True)
    return Outcome(whole_s / asked.num_requests, statistics.median(first), statistics.median(gaps))


async def _answered(
    session: aiohttp.ClientSession, asked: Round, body: dict[str, Any]
) -> tuple[float, float]:
    """Send one request; return the seconds to its first token and between two tokens."""
    headers = {"Authorization": f"Bearer {asked.key}"} if asked.key else {}
    start = time.perf_counter()
    async with session.post(f"{asked.url}/v1/completions", json=body, headers=headers) as response:
        if response.status != HTTPStatus.OK:
            raise LoadError(f"a request was answered with {response.status}: {await response.text()}")
        if not asked.streams:
            answer = await response.json()
            _check(answer["usage"]["completion_tokens"], body)
            return time.perf_counter() - start, 0.0
        first = last = 0.0
        num_events, tail = 0, b""
        async for data in response.content.iter_any():
            last = time.perf_counter()
            first = first or last
            num_events += data.count(_EVENT)
            tail = (tail + data)[-2 * len(_DONE) :]
    # Tokens that were ready at once come in one event, so there may be fewer events than tokens.
    if _DONE not in tail or not 0 < num_events <= body["max_tokens"]:
        raise LoadError(f"a stream of {num_events} events ended with {tail!r}")
    return first - start, (last - first) / (body["max_tokens"] - 1)


def _check(num_tokens: int, body: dict[str, Any]) -> None:
    if num_tokens != body["max_tokens"]:
        raise LoadError(f"an answer must have {body['max_tokens']} tokens, got {num_tokens}")


async def _serve() -> None:
    timeout = aiohttp.ClientTimeout(total=_LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        while line := await asyncio.to_thread(sys.stdin.readline):
            outcome = await run(session, Round(**json.loads(line)))
            sys.stdout.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve())
