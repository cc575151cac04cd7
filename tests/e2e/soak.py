"""Faults under load for as long as one likes: ``make soak``, or ``python -m tests.e2e.soak --minutes 2``.

Clients of several kinds ask without pause; every so often the engine is killed. Each answer must be whole or
have one of the codes that this may have, each job must end, and the server must hold no more at the end than
after the first time. Prints what became of all requests, and ends with status 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx

from nnsight_engine.modeling.bundled import bundled_model_path
from nnsight_engine.remote_backend.messages import MEDIA_TYPE
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.faults import Shared, engine_processes, held, kill
from tests.e2e.server import Server
from tests.e2e.test_traces_http import endless
from tests.waiting import wait_for

_PROMPT: Final = "The Eiffel Tower is in the city of"
_CAPTURE: Final = {"op": "capture", "at": ["layers.3.output"], "name": "c"}
_STEER: Final = {"op": "steer", "at": "layers.5.output", "vector": [0.01] * 576}
_FAULT_CODES: Final = frozenset({"engine_dead", "engine_restarting"})
_FINAL: Final = frozenset({"COMPLETED", "ERROR"})
_NUM_CLIENTS: Final = 4
_READY_S: Final = 180.0
_MAX_MORE: Final = {"processes": 0, "descriptors": 16, "shared memory": 4, "temporary files": 2}


class Soak:
    """The load on one server, and what became of it."""

    def __init__(self, server: Server, trace: bytes, seed: int) -> None:
        self.server, self.trace = server, trace
        self.outcomes: Counter[str] = Counter()
        self.shared = Shared(server.process.pid)
        self.wrong: list[str] = []
        self.jobs: list[str] = []
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._stopping.clear()
        self._threads = [
            threading.Thread(target=self._ask, args=(self._random.randrange(2**30),))
            for _ in range(_NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def is_ready(self) -> bool:
        return httpx.get(f"{self.server.base_url}/health/ready", timeout=10).status_code == 200

    def _ask(self, seed: int) -> None:
        chosen = random.Random(seed)
        kinds: list[Callable[[httpx.Client, random.Random], str]] = [
            self._stream, self._stream, self._whole, self._leave, self._job,
        ]  # fmt: skip
        with httpx.Client(base_url=self.server.base_url, timeout=120) as client:
            while not self._stopping.is_set():
                kind = chosen.choice(kinds)
                try:
                    outcome = kind(client, chosen)
                except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                    outcome = f"{type(error).__name__}: {error}"
                    self.wrong.append(f"{kind.__name__}: {outcome}")
                self.outcomes[f"{kind.__name__.lstrip('_')}: {outcome}"] += 1
                if outcome in _FAULT_CODES:
                    time.sleep(0.5)

    def _body(self, chosen: random.Random, **more: Any) -> dict[str, Any]:
        body = {"prompt": _PROMPT, "max_tokens": chosen.randint(4, 120), "temperature": 0, **more}
        interventions = chosen.choice([[], [_STEER], [_CAPTURE]])
        return {**body, "interventions": interventions} if interventions else body

    def _whole(self, client: httpx.Client, chosen: random.Random) -> str:
        answer = client.post("/v1/completions", json=self._body(chosen))
        if answer.status_code == 200:
            return "whole"
        return self._expected(answer.json()["error"]["code"])

    def _stream(self, client: httpx.Client, chosen: random.Random) -> str:
        body = self._body(chosen, stream=True)
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        if response.status_code != 200:
            return self._expected(json.loads(lines[0])["error"]["code"])
        *_, before, last = lines
        if last != "data: [DONE]":
            raise ValueError(f"a stream ended with {last[:100]!r}")
        error = json.loads(before.removeprefix("data: ")).get("error")
        return "whole" if error is None else self._expected(error["code"])

    def _leave(self, client: httpx.Client, chosen: random.Random) -> str:
        """Ask, read a little or nothing, and hang up, or only stop to read."""
        del client
        body = json.dumps(self._body(chosen, stream=True, max_tokens=400))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as connection:
            whole = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
            connection.sendall(whole[: chosen.choice([len(whole), len(whole) // 2, 20])])
            time.sleep(chosen.uniform(0, 2))
        return "left"

    def _job(self, client: httpx.Client, chosen: random.Random) -> str:
        params = {"rerun": "true"} if chosen.random() < 0.5 else {}
        answer = client.post(
            "/v1/jobs", content=self.trace, params=params, headers={"content-type": MEDIA_TYPE}
        )
        if answer.status_code not in {200, 202}:
            return self._expected(answer.json()["error"]["code"])
        self.jobs.append(answer.json()["id"])
        return "accepted"

    def _expected(self, code: str) -> str:
        if code not in _FAULT_CODES:
            self.wrong.append(f"an answer has the code {code!r}")
        return code

    def settle_jobs(self) -> None:
        """Wait for all jobs that were accepted, and count how they ended."""
        with httpx.Client(base_url=self.server.base_url, timeout=30) as client:
            for job_id in self.jobs:
                wait_for(lambda: client.get(f"/v1/jobs/{job_id}").json()["status"] in _FINAL, _READY_S)  # noqa: B023
                job = client.get(f"/v1/jobs/{job_id}").json()
                code = (job.get("error") or {}).get("code", "")
                self.outcomes[f"job {job['status']} {code}"] += 1
                if job["status"] == "ERROR" and code not in {"engine_dead", "interrupted"}:
                    self.wrong.append(f"a job ended with {code!r}")
        self.jobs.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=90.0, help="seconds between faults, about")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    chosen = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        os.chmod(temporary, 0o711)
        environment = {
            "TMPDIR": temporary,
            "NNSIGHT_ENGINE_MAX_ENGINE_RESTARTS": "1000",
            "NNSIGHT_ENGINE_ENGINE_RESTART_WINDOW_S": "1",
            "NNSIGHT_ENGINE_CLIENT_STALL_TIMEOUT_S": "5",
            "NNSIGHT_ENGINE_UPLOAD_IDLE_TIMEOUT_S": "5",
            "NNSIGHT_ENGINE_RESULT_DIR": f"{temporary}/results",
        }
        with Server(arguments=["--max-model-len", "1024"], environment=environment) as server:
            return _soak(server, Path(temporary), end, given.pause, chosen)


def _soak(server: Server, temporary: Path, end: float, pause_s: float, chosen: random.Random) -> int:
    outline = httpx.get(f"{server.base_url}/v1/traces/outline", timeout=60).json()
    trace = endless(VLLM(str(bundled_model_path())), outline, max_tokens=40).to_bytes()
    soak = Soak(server, trace, chosen.randrange(2**30))
    num_kills, warm = 0, dict[str, int]()
    soak.start()
    try:
        while time.monotonic() < end:
            time.sleep(min(chosen.uniform(0.5, 1.5) * pause_s, max(0.0, end - time.monotonic())))
            soak.shared.look()
            kill(*engine_processes(server.process.pid))
            num_kills += 1
            wait_for(lambda: not soak.is_ready(), 10)
            wait_for(soak.is_ready, _READY_S)
            soak.outcomes["engine killed"] += 1
            if not warm:
                warm = _idle(soak, temporary)
                soak.start()
    finally:
        soak.stop()
    soak.settle_jobs()
    cold = _idle(soak, temporary)
    for name, most in _MAX_MORE.items():
        if cold[name] > warm[name] + most:
            soak.wrong.append(f"{name}: {warm[name]} when warm, {cold[name]} in the end")
    server.process.send_signal(signal.SIGTERM)
    if server.process.wait(60) != -signal.SIGTERM:
        soak.wrong.append(f"the server ended with {server.process.returncode}")
    for outcome, number in sorted(soak.outcomes.items()):
        sys.stdout.write(f"{number:8} {outcome}\n")
    sys.stdout.write(f"held: {warm} after the first fault, {cold} after the last\n")
    for problem, number in Counter(soak.wrong).items():
        sys.stdout.write(f"WRONG {number}x: {problem}\n")
    return 1 if soak.wrong else 0


def _idle(soak: Soak, temporary: Path) -> dict[str, int]:
    """Return what the server holds when it is idle."""
    soak.stop()
    soak.settle_jobs()
    time.sleep(12)  # what was half sent, or is not read, is given up
    return held(soak.server.process.pid, temporary, soak.shared)


if __name__ == "__main__":
    sys.exit(main())
