"""``tracer.local()``: blocks on a server's local engine, parts of which run where they were written."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from nnsight_engine.core.saves import save
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.errors import LocalBlockError, RemoteError
from nnsight_engine.remote_backend.frames import Frame, FrameKind, called, calling
from nnsight_engine.serialization import DecodeError, EncodeError, decode, encode
from tests.integration.local_server import TEXT, LocalServer, serving_locally
from tests.shared_names import Program
from tests.waiting import wait_for

GLOBAL_LOCK = threading.Lock()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with serving_locally(tmp_path_factory.mktemp("parts")) as served:
        yield served


def test_a_part_runs_here_with_what_never_leaves(
    served: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for model, how in served.ways:
        lock = threading.Lock()  # nothing that could be sent
        local_bias = torch.linspace(-1, 1, model.config.hidden_size)
        seen: list[torch.Size] = []
        with model.trace(TEXT, **how) as tracer:
            hidden = model.layers[0].output
            with tracer.local(), torch.no_grad():
                with lock, GLOBAL_LOCK:
                    modified = hidden + local_bias
                seen.append(hidden.shape)
                print("here", tuple(hidden.shape))  # noqa: T201 - it is what is tested
            model.layers[0].output = modified
            output = model.lm_head.output.save()
        found.append((output, seen))
        assert "here (1, " in capsys.readouterr().out
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert len(found[1][1]) == 1


def test_an_error_in_a_part_is_raised_here_and_ends_the_trace(served: LocalServer) -> None:
    model, later = served.model, None

    class OwnError(Exception):
        pass

    raised = OwnError("no")
    with pytest.raises(OwnError) as caught:
        with model.trace(TEXT, backend=served.remote()) as tracer:
            hidden = model.layers[0].output.save()
            with tracer.local():
                if hidden.shape[0]:
                    raise raised
            later = save(1)
    assert caught.value is raised
    assert hidden.shape[0] == 1
    assert later is None
    with model.trace(TEXT, backend=served.remote()) as tracer:
        try:
            with tracer.local():
                raise ValueError("caught there")
        except ValueError as error:
            said = save(str(error))
    assert said == "caught there"
    served.check()


def test_what_would_be_silently_wrong_is_refused(served: LocalServer) -> None:
    model, remote = served.model, served.remote
    with pytest.raises(LocalBlockError, match="`hidden` was changed in place"):
        with model.trace(TEXT, backend=remote()) as tracer:
            hidden = model.layers[0].output
            with tracer.local(), torch.no_grad():
                hidden[:] = 0
    with pytest.raises(LocalBlockError, match="`found` was changed in place"):
        with model.trace(TEXT, backend=remote()) as tracer:
            found = save(list[int]())
            with tracer.local():
                found.append(1)
    with pytest.raises(LocalBlockError, match="gradients do not pass"):
        with model.trace(TEXT, backend=remote()) as tracer:
            hidden = model.layers[0].output
            hidden.requires_grad_()
            with tracer.local():
                modified = hidden * 2
            model.layers[0].output = modified
            with model.lm_head.output.sum().backward():
                grad = hidden.grad.save()
    with pytest.raises(LocalBlockError, match="meta tensor"):
        with model.trace(TEXT, backend=remote()) as tracer:
            hidden = model.layers[0].output
            with tracer.local():
                modified = hidden @ model.layers[0].self_attn.q_proj.weight
            model.layers[0].output = modified
    with pytest.raises(EncodeError, match="lock"):
        with model.trace(TEXT, backend=remote()) as tracer:
            with tracer.local():
                kept = threading.Lock()
            kept.acquire()
    with pytest.raises(LocalBlockError, match="session"):
        with model.session(backend=remote()):
            with model.trace(TEXT) as tracer:
                with tracer.local():
                    here = save(1)
    with pytest.raises(NameError):
        _ = grad, here
    served.check()


def test_one_that_is_not_waited_for_runs_its_parts_in_wait(served: LocalServer) -> None:
    model, seen = served.model, list[int]()
    with model.trace(TEXT, backend=served.remote(blocking=False)) as tracer:
        hidden = model.layers[0].output
        with tracer.local():
            seen.append(hidden.shape[0])
            size = save(tuple(hidden.shape))  # noqa: F841 - it is in the result
        doubled = (hidden * 2).save()  # noqa: F841 - the same
    wait_for(lambda: len(served.calls.pending) == 1)
    assert not seen
    result = tracer.backend.wait()
    assert seen == [1]
    assert result["size"] == tuple(result["doubled"].shape)
    assert set(result) == {"id", "size", "doubled"}


def test_a_client_that_does_not_answer_ends_its_trace(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.calls, "_timeout_s", 0.3)
    model = served.model
    with model.trace(TEXT, backend=served.remote(blocking=False)) as tracer:
        with tracer.local():
            nothing = 1
        kept = save(nothing)
    backend = tracer.backend
    wait_for(lambda: is_over(served, backend))
    with pytest.raises(LocalBlockError, match="no client answered"):
        backend.wait()
    with pytest.raises(NameError):
        _ = kept
    served.check()


def is_over(served: LocalServer, backend: RemoteBackend) -> bool:
    status = httpx.get(f"{served.url}/v1/jobs/{backend.job_id}").json()["status"]
    return status in {"COMPLETED", "ERROR", "CANCELLED"}


def waiting(served: LocalServer) -> RemoteBackend:
    """Begin a trace that waits for its client."""
    model = served.model
    with model.trace(TEXT, backend=served.remote(blocking=False)) as tracer:
        hidden = model.layers[0].output
        with tracer.local():
            size = hidden.shape[0]
        kept = save(size)
    wait_for(lambda: len(served.calls.pending) == 1)
    backend = tracer.backend
    assert isinstance(backend, RemoteBackend)
    with pytest.raises(NameError):
        _ = kept
    return backend


def test_a_job_that_waits_for_its_client_can_be_cancelled(served: LocalServer) -> None:
    backend = waiting(served)
    backend.cancel()
    wait_for(lambda: not served.calls.pending)
    with pytest.raises(RemoteError, match="cancel"):
        backend.wait()
    served.check()


@contextlib.contextmanager
def socket_of(
    served: LocalServer, job_id: str | None, query: str = "?local=true"
) -> Iterator[ClientConnection]:
    address = f"ws{served.url.removeprefix('http')}/v1/jobs/{job_id}/events{query}"
    with connect(address, max_size=None) as socket:
        yield socket


def asked(socket: ClientConnection) -> int:
    """Wait for a call; returns its number."""
    return call_from(socket)[0]


def call_from(socket: ClientConnection) -> tuple[int, memoryview]:
    """Wait for a call; returns its number and what is asked."""
    data = b""
    while len(data) < 9 or len(data) < 9 + struct.unpack_from("<Q", data, 1)[0]:
        message = socket.recv()
        data += message if isinstance(message, bytes) else b""
    return called(Frame(FrameKind(data[0]), data[9:]))


def send(socket: ClientConnection, number: int, data: bytes) -> None:
    for piece in calling(number, data).pieces():
        socket.send(piece)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"noise", "message"),
        (encode([1]), "tracer.local"),
        (encode({"values": {"hidden": 1}}), "assigns 'hidden'"),
        (encode({"values": {"size": 1}, "error": {"no": "error"}}), "no error"),
    ],
)
def test_a_broken_answer_is_an_error_in_the_block(served: LocalServer, answer: bytes, match: str) -> None:
    backend = waiting(served)
    with socket_of(served, backend.job_id) as socket:
        number = asked(socket)
        send(socket, number + 1, encode({"values": {"size": 7}}))  # a call that there is not
        send(socket, number, answer)
        wait_for(lambda: is_over(served, backend))
    with pytest.raises(DecodeError, match=match):
        backend.wait()
    served.check()


def test_bytes_that_are_no_answer_end_the_socket_alone(served: LocalServer) -> None:
    backend = waiting(served)
    for noise in (b"\x09" * 20, b"\x06\x04" + bytes(11), b"\x01\x02" + bytes(7) + b"{}"):
        with socket_of(served, backend.job_id) as socket:
            asked(socket)
            socket.send(noise)
            with pytest.raises(WebSocketException):
                while True:
                    socket.recv()
            assert socket.close_code == 1003
    with socket_of(served, backend.job_id, "") as socket:  # it did not say that it answers
        socket.send(b"\x06\x08" + bytes(15))
        with pytest.raises(WebSocketException):
            while True:
                assert isinstance(socket.recv(), str)
        assert socket.close_code == 1003
    with pytest.raises(InvalidStatus, match="404"), socket_of(served, "somebody-else-s"):
        pass
    assert backend.wait()["kept"] == 1


def test_an_answer_that_was_lost_is_given_again_and_nothing_runs_twice(served: LocalServer) -> None:
    model, seen = served.model, list[int]()
    with model.trace(TEXT, backend=served.remote(blocking=False)) as tracer:
        hidden = model.layers[0].output
        with tracer.local():
            seen.append(hidden.shape[0])
            size = hidden.shape[0]
        kept = save(size)  # noqa: F841 - it is in the result
    backend = tracer.backend
    assert isinstance(backend, RemoteBackend)
    wait_for(lambda: len(served.calls.pending) == 1)
    with socket_of(served, backend.job_id) as socket:
        _, data = call_from(socket)
        run = backend._part_runner()  # noqa: SLF001 - a job has no other way to answer one call
        assert run is not None
        run(data)  # and the connection breaks
    assert backend.wait()["kept"] == 1
    assert seen == [1]
    message = decode(data)
    error = decode(run(memoryview(encode({**message, "attempt": "another", "turn": 0}))))["error"]
    assert "would run twice" in error["message"]


def test_a_local_part_without_a_connected_client_is_an_error(served: LocalServer) -> None:
    model = served.model

    def elsewhere(tracer: Any) -> None:
        with tracer.local():
            pass

    with pytest.raises(LocalBlockError, match="needs its client"):
        with model.trace(TEXT, backend=served.remote()) as tracer:
            elsewhere(tracer)
    part = model
    with pytest.raises(LocalBlockError, match="own block"):
        with model.trace(TEXT, backend=served.remote()) as tracer:
            with tracer.local():
                _ = part
            elsewhere(tracer)
    with pytest.raises(LocalBlockError, match="validate=True"):
        with model.trace(TEXT, validate=True, backend=served.remote()) as tracer:
            with tracer.local():
                time.time()
    served.check()


def test_random_programs_with_parts_here_read_what_they_would_one_by_one(served: LocalServer) -> None:
    num_layers = len(served.model.model.layers)
    places = [f"model.model.layers[{n}].{part}" for n in range(num_layers) for part in ("self_attn", "mlp")]
    for seed in range(12):
        program = Program(2000 + seed, places, sent=True, local=True)
        program.check(program.traced(served.here, TEXT))
        program.check(program.traced(served.model, TEXT, backend=served.remote()))


def test_a_part_that_assigns_nothing_changes_nothing(served: LocalServer) -> None:
    """What stands in a branch that is not taken is no assignment, nor is it a deletion."""
    for model, how in served.ways:
        kept, made = "before", False
        with model.trace(TEXT, **how) as tracer:
            kept = "in the block"
            fresh = "in the block"
            with tracer.local():
                if made:
                    kept = fresh = "in the part"
            seen = save([kept, fresh])
        assert seen == ["in the block", "in the block"]
