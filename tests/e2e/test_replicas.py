"""Two real replicas on a local Ray cluster: requests find theirs, and one that is killed loses no job."""

from __future__ import annotations

import collections
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from nnsight_engine.remote_backend.messages import MEDIA_TYPE
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.faults import kill
from tests.e2e.server import Server
from tests.e2e.test_traces_http import endless
from tests.families.checkpoints import WORDS, write_checkpoint
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.timeout(300)]

REPLICA: Final = "x-nnsight-replica"
TOKENS: Final = 900
JOB_TOKENS: Final = 200
CONTEXT: Final = 1024
NUM_STREAMS: Final = 12
NUM_JOBS: Final = 8
BEGINNINGS: Final = ["".join(WORDS[number:] + WORDS[:number]) * 3 for number in range(12)]
"""Texts of some seventy tokens, and more than 256 bytes."""


class Replicated:
    def __init__(self, server: Server, checkpoint: Path) -> None:
        self.server = server
        self.checkpoint = checkpoint
        self.client = httpx.Client(base_url=server.base_url, timeout=60)

    def complete(self, prompt: str, **body: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **body}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    def names(self) -> set[str]:
        """Return the replicas that answer, each of which is asked for its metrics."""
        return set(re.findall(r'replica="([^"]+)"', self.client.get("/metrics").text))

    def server_of(self, name: str) -> psutil.Process:
        [found] = [one for one in self.servers() if one.environ()["NNSIGHT_ENGINE_REPLICA"] == name]
        return found

    def servers(self) -> list[psutil.Process]:
        """Return the processes of all replicas' servers."""
        below = psutil.Process(self.server.process.pid).children(recursive=True)
        return [one for one in below if "app.replicas.process_guard" in one.cmdline()]

    def job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = self.client.get(f"/v1/jobs/{job_id}").json()
        return job


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint = write_checkpoint("llama", folder, max_position_embeddings=CONTEXT)
    arguments = ("--replicas", "2", "--served-model-name", "tiny", "--max-model-len", str(CONTEXT))
    environment = {
        "NNSIGHT_ENGINE_INLINE_TENSOR_BYTES": "0",
        "NNSIGHT_ENGINE_DRAIN_TIMEOUT_S": "5",
        "RAY_ADDRESS": "",
    }
    with Server(
        str(checkpoint),
        arguments=arguments,
        environment=environment,
        ready_timeout_s=240,
        stop_timeout_s=90,
    ) as server:
        replicated = Replicated(server, checkpoint)
        processes = [*replicated.servers(), psutil.Process(server.process.pid)]
        below = psutil.Process(server.process.pid).children(recursive=True)
        yield replicated
        replicated.client.close()
        server.stop()
        # What it started has ended with it, engines and Ray's own processes alike.
        _, left = psutil.wait_procs([*processes, *below], timeout=20)
        assert left == []


def test_one_address_serves_all_replicas(replicated: Replicated) -> None:
    client = replicated.client
    [card] = client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny"
    assert len(replicated.names()) == 2
    # They compute on cores of their own.
    bound = {one.environ().get("VLLM_CPU_OMP_THREADS_BIND") for one in replicated.servers()}
    assert len(bound) == min(2, psutil.cpu_count() or 1)
    page = client.get("/metrics").text
    assert all(f'replica="{name}"' in page for name in replicated.names())
    assert client.get("/health/ready").status_code == 200


def test_prompts_that_begin_alike_go_to_the_replica_that_has_them(replicated: Replicated) -> None:
    found = {
        beginning: {replicated.complete(f"{beginning} dogs{tail}").headers[REPLICA] for tail in WORDS[:4]}
        for beginning in BEGINNINGS
    }
    assert all(len(names) == 1 for names in found.values())
    assert len({name for names in found.values() for name in names}) == 2
    answer = replicated.complete(f"{BEGINNINGS[0]} cats")
    assert answer.json()["usage"]["prompt_tokens"] > 60


def test_a_result_is_fetched_from_the_replica_that_has_it(replicated: Replicated) -> None:
    capture = [{"op": "capture", "at": ["layers.1.output"], "name": "c"}]
    for beginning in BEGINNINGS[:4]:
        answer = replicated.complete(beginning, interventions=capture)
        [tensor] = answer.json()["choices"][0]["interventions"]["results"]["c"]["points"].values()
        fetched = replicated.client.get(tensor["url"])
        assert fetched.status_code == 200
        assert fetched.headers[REPLICA] == answer.headers[REPLICA]


class Load:
    def __init__(self, replicated: Replicated) -> None:
        self._replicated = replicated
        self._begun = threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._streams = [self._pool.submit(self._stream, number) for number in range(NUM_STREAMS)]

    def until_begun(self) -> None:
        for _ in range(NUM_STREAMS):
            assert self._begun.acquire(timeout=60)

    def ends(self) -> collections.Counter[tuple[str, str]]:
        """Count streams by their replica and how they ended."""
        return collections.Counter(one.result(120) for one in self._streams)

    def _stream(self, number: int) -> tuple[str, str]:
        prompt = BEGINNINGS[number % len(BEGINNINGS)]
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        address = self._replicated.server.base_url
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            events = []
            for line in answer.iter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    if len(events) == 2:
                        self._begun.release()
        assert events[-1] == "[DONE]"
        return answer.headers[REPLICA], json.loads(events[-2]).get("error", {}).get("code", "")


def test_a_replica_killed_under_load_costs_its_streams_and_no_job(replicated: Replicated) -> None:
    client = replicated.client
    outline = client.get("/v1/traces/outline").json()
    sampling = {"max_tokens": JOB_TOKENS, "min_tokens": JOB_TOKENS}
    trace = endless(VLLM(str(replicated.checkpoint)), outline, **sampling).to_bytes()
    before = replicated.names()
    jobs = []
    for _ in range(NUM_JOBS):
        headers = {"content-type": MEDIA_TYPE}
        answer = client.post("/v1/jobs", content=trace, params={"rerun": "true"}, headers=headers)
        assert answer.status_code in {200, 202}, answer.text
        jobs.append(answer.json()["id"])
    load = Load(replicated)
    load.until_begun()
    victim = sorted(before)[0]
    server = replicated.server_of(victim)
    engines = server.children(recursive=True)
    kill(server.parent() or server)  # the actor; the server and its engine end by themselves
    ends = load.ends()
    # Streams that had ended before the kill may be the victim's.
    assert {name for name, code in ends if code == ""} >= before - {victim}
    assert {(name, code) for name, code in ends if code} == {(victim, "replica_lost")}
    assert psutil.wait_procs([server, *engines], timeout=60)[1] == []
    # Requests that arrive meanwhile are served by another replica.
    for beginning in BEGINNINGS:
        assert replicated.complete(beginning).headers[REPLICA] in before - {victim}
        assert client.get("/health/ready").status_code == 200
    wait_for(lambda: len(replicated.names()) == 2, 90)
    assert victim not in replicated.names()
    wait_for(
        lambda: all(replicated.job(one)["status"] in {"COMPLETED", "ERROR"} for one in jobs), timeout_s=90
    )
    assert [replicated.job(one)["status"] for one in jobs] == ["COMPLETED"] * NUM_JOBS


def test_a_guard_that_is_killed_alone_leaves_nothing_behind(replicated: Replicated) -> None:
    guard = replicated.server_of(sorted(replicated.names())[0])
    below = guard.children(recursive=True)
    assert below
    kill(guard)
    assert psutil.wait_procs([guard, *below], timeout=60)[1] == []
