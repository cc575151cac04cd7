"""The clients of the benchmark, each in a process of its own.

``probe`` sends small requests one after another; ``flood`` keeps many of them running from ``start`` to
``stop``. Both read one JSON object per line from standard input and answer each with a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import random
import sys
import time
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

_NUM_IDS: Final = 40_000
_PROBE_TOKENS: Final = 16
_PROBE_MAX_TOKENS: Final = 4
_PAUSES_S: Final = (0.05, 0.25)


@dataclasses.dataclass(frozen=True, slots=True)
class Flood:
    """What a tenant floods the server with.

    Attributes:
        name: How tables call it.
        concurrent: How many requests run at once.
        prompt_tokens: Tokens of each prompt, no two alike.
        max_tokens: Tokens of each answer, from and to.
    """

    name: str
    concurrent: int
    prompt_tokens: int
    max_tokens: tuple[int, int]


FLOODS: Final = (
    Flood("64 requests of 32 tokens, answers of 32 to 96", 64, 32, (32, 96)),
    Flood("64 requests of 600 tokens, answers of 8 to 32", 64, 600, (8, 32)),
)


def _prompt(num_tokens: int) -> list[int]:
    return [random.randrange(100, _NUM_IDS) for _ in range(num_tokens)]  # noqa: S311 - no secret


def first_token_s(connection: http.client.HTTPConnection, key: str, model: str) -> float:
    """Send one small request, and return how long its first token took."""
    body = {
        "model": model,
        "prompt": _prompt(_PROBE_TOKENS),
        "max_tokens": _PROBE_MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    first = response.readline()
    took_s = time.perf_counter() - start
    if response.status != http.HTTPStatus.OK or not first.startswith(b"data: {"):
        raise RuntimeError(f"a probe was answered with {response.status}: {first!r}")
    response.read()
    return took_s


def probe(url: str, key: str, model: str) -> None:
    """Send as many requests as a line asks for, each a moment after the one before."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    for line in sys.stdin:
        seconds = []
        for _ in range(json.loads(line)["count"]):
            time.sleep(random.uniform(*_PAUSES_S))  # noqa: S311 - no secret
            seconds.append(first_token_s(connection, key, model))
        _answer(seconds)


class _Flooder:
    """Keeps requests of one flood running, and counts tokens: of prompts that are done, and of answers."""

    def __init__(self, client: httpx.AsyncClient, model: str, flood: Flood) -> None:
        self.num_tokens = 0
        self._client, self._model, self._flood = client, model, flood
        self._tasks = [asyncio.create_task(self._one_after_another()) for _ in range(flood.concurrent)]

    async def _one_after_another(self) -> None:
        while True:
            most = random.randint(*self._flood.max_tokens)  # noqa: S311 - no secret
            body = {
                "model": self._model,
                "prompt": _prompt(self._flood.prompt_tokens),
                "max_tokens": most,
                "ignore_eos": True,
                "stream": True,
            }
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                has_begun = False
                async for data in response.aiter_raw():
                    self.num_tokens += data.count(b"data: {")
                    if not has_begun:
                        has_begun = True
                        self.num_tokens += self._flood.prompt_tokens

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise RuntimeError("a flood's request failed") from result  # noqa: TRY004 - it is no type that is wrong


async def flood(url: str, key: str, model: str) -> None:
    """Begin and end floods as lines ask for, and tell of how many tokens there were."""
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None) as client:  # noqa: S113 - it waits as long as it has to
        running: _Flooder | None = None
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            if "start" in command:
                running = _Flooder(client, model, FLOODS[command["start"]])
            if running is not None and "stop" in command:
                await running.stop()
            _answer(0 if running is None else running.num_tokens)


def _answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer until standard input ends."""
    kind, *arguments = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        if kind == "probe":
            probe(*arguments)
        else:
            asyncio.run(flood(*arguments))


if __name__ == "__main__":
    main()
