"""Load tests against a server over sockets: every kind of request comes through, and thresholds decide."""

from __future__ import annotations

import os
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.machine import Machine
from benchmarks.servers import created_key, own_folders
from loadtests.run_process import run_in_process
from loadtests.run_spec import HOSTILE, SCENARIOS, LoadPhase, Model, RunSpec
from loadtests.summary import Summary, read

pytestmark = pytest.mark.heavy

MACHINE = Machine("2026-11-23", "abc", "a processor", 2, 0.0, {"python": "3.11"})
MODEL = Model(name="m", num_layers=2, width=4, vocab_size=99, max_model_len=99, max_body_bytes=9)
SENDS_TOKENS = set(SCENARIOS["mixed"]) - set(HOSTILE) - {"trace-message", "jobs"}


class Target:
    """A server with keys, and what load tests of it need."""

    def __init__(self, url: str, key_file: Path) -> None:
        self.url = url
        self.key_file = key_file

    def load(self, output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "loadtests", *arguments, "--url", self.url, "--output", str(output)]
        return subprocess.run(
            [*command, "--admin-key-file", str(self.key_file)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("load")
    key_file = folder / "key"
    key_file.write_text(
        created_key("operator", own_folders(str(folder)), "--scopes", "admin"), encoding="utf-8"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.load_server", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Target(f"http://127.0.0.1:{int(process.stdout.readline())}", key_file)
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=30)


def test_a_mixed_run_sends_and_reports_every_kind(target: Target, tmp_path: Path) -> None:
    thresholds = tmp_path / "thresholds.toml"
    thresholds.write_text('[[threshold]]\nmeasure = "error_share"\nmost = 0.0\n', encoding="utf-8")
    done = target.load(tmp_path, "mixed", "--time", "4", "--thresholds", str(thresholds))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = read(tmp_path / "summary.json", Summary)
    assert summary.errors == {}
    assert {row.kind for row in summary.rows} == set(SCENARIOS["mixed"])
    assert {row.phase for row in summary.rows} == {"calm", "flood"}
    for kind in SCENARIOS["mixed"]:
        row = summary.row(kind, "flood")
        assert row is not None
        assert row.num_requests, kind
    for row in (row for row in summary.rows if row.kind in SENDS_TOKENS):
        assert row.num_tokens > row.num_requests, row.kind
        assert row.ttft_ms is not None
        assert row.itl_ms is not None
        assert row.e2e_ms is not None
        assert 0 < row.ttft_ms.p50 < row.e2e_ms.p50
    assert {row.kind for row in summary.rows if row.num_left} == {"break-off"}
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    for told in ("TTFT", "ITL", "E2E"):
        assert told in report
    assert "steered-same (flood)" in report
    headers = {"authorization": f"Bearer {target.key_file.read_text(encoding='utf-8')}"}
    keys = httpx.get(f"{target.url}/v1/admin/keys", headers=headers).json()["data"]
    made = [key for key in keys if key["tenant"].startswith("loadtest-")]
    assert made
    assert all(key["revoked_at"] and key["expires_at"] for key in made)


def test_a_threshold_that_is_missed_fails_the_command(target: Target, tmp_path: Path) -> None:
    thresholds = tmp_path / "thresholds.toml"
    thresholds.write_text(
        '[[threshold]]\nkind = "plain"\nmeasure = "ttft_p50"\nmost = 0.001\n', encoding="utf-8"
    )
    done = target.load(tmp_path, "plain", "--shape", "spike", "--time", "3", "--thresholds", str(thresholds))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MISSED plain, spike: ttft_p50 ≤ 0.001" in done.stdout
    summary = read(tmp_path / "summary.json", Summary)
    assert [row.phase for row in summary.rows] == ["before", "spike", "after"]
    assert not any(verdict.is_kept for verdict in summary.verdicts)


def test_a_stream_that_stalls_is_a_failed_request_of_its_row(tmp_path: Path) -> None:
    event = b'data: {"choices": [{"index": 0, "text": " word"}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n"

    class Stalling(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(2**16)
            self.request.sendall(head + event)
            self.request.recv(1)  # until the client leaves

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Stalling) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            spec = RunSpec(
                scenario="plain", shape="steady", url=f"http://127.0.0.1:{server.server_address[1]}",
                model=MODEL, counts={"plain": 1}, phases=[LoadPhase(name="steady", share=1.0)], seconds=1.5,
                silence_s=0.3,
            )  # fmt: skip
            summary = run_in_process(spec, tmp_path, MACHINE)
        finally:
            server.shutdown()
            serving.join()
    (row,) = summary.rows
    assert row.num_failed == row.num_requests > 0
    assert (row.error_share, row.num_tokens, row.ttft_ms) == (1.0, 0, None)
    assert all("timed out" in error for error in summary.errors), summary.errors


def test_a_run_that_cannot_begin_says_why(target: Target, tmp_path: Path) -> None:
    wrong = tmp_path / "key"
    wrong.write_text("nns_nothing", encoding="utf-8")
    refused = Target(target.url, wrong).load(tmp_path, "plain", "--time", "1")
    assert refused.returncode == 2
    assert "invalid_api_key" in refused.stderr
