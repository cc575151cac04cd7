"""Traces that the local engine runs: names, errors, and what is refused."""

from __future__ import annotations

import traceback
from typing import Any, cast

import msgspec
import pytest
import torch

from nnsight_engine.core.saves import save
from nnsight_engine.interleaving.events import MissedProviderError
from nnsight_engine.local_engine.runner import TraceableModel, TraceRunner
from nnsight_engine.local_engine.serving import _print_warning
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.errors import LocalBlockError, RemoteError
from nnsight_engine.remote_backend.messages import TraceHead, TraceRequest
from nnsight_engine.remote_backend.sending.outgoing_trace import Inputs, TransformersDialect
from nnsight_engine.serialization import DecodeError, EncodeError, encode, encode_trace
from nnsight_engine.vllm_backend.traces.context import BlockTracer
from tests.transports import InProcess
from tests.unit.local_engine.bench import OTHER, TEXT, Bench


def test_further_names(bench: Bench) -> None:
    names = {"mlp": "feedforward", ".model.layers": "blocks"}
    client = LanguageModel(bench.path, rename=names)
    with client.trace(TEXT, backend=bench.elsewhere()):
        named = client.blocks[1].feedforward.output.save()
        standard = client.layers[1].output.save()
    with bench.local.trace(TEXT):
        plain = bench.local.model.layers[1].mlp.output.save()
    assert torch.equal(named, plain)
    assert standard.shape == plain.shape
    with pytest.raises(AttributeError, match="blocks"):
        _ = bench.engine.blocks


def test_a_part_of_the_model_is_traced(bench: Bench) -> None:
    found, value = [], torch.ones(1, 2, 128)
    for model, how in bench.ways:
        with model.model.layers[0].mlp.trace(value, **how):
            inner = model.model.layers[0].mlp.output.save()
        found.append(inner)
    assert torch.equal(*found)


def test_validation_runs_the_blocks_on_fakes_first(bench: Bench) -> None:
    model = bench.client
    ran: list[str] = []
    with pytest.raises(RuntimeError, match="reduction dim"):
        with model.trace(TEXT, validate=True, backend=bench.elsewhere()):
            ran.append("before")
            model.model.layers[0].output @ torch.ones(3, 3)
    with model.trace(validate=True, backend=bench.elsewhere()) as tracer:
        for text in (TEXT, OTHER):
            with tracer.invoke(text):
                shared = model.model.layers[0].output.sum()
        with tracer.invoke(OTHER):
            total = (model.model.layers[2].output.sum() + shared).save()
    assert total.ndim == 0


def test_errors_are_the_users_own(bench: Bench) -> None:
    model = bench.client
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(TEXT, backend=bench.elsewhere()):
            before = model.model.layers[0].output.sum().save()
            _ = 1 / 0  # the line
    assert before.ndim == 0
    entries = traceback.extract_tb(caught.value.__traceback__)
    assert any("_ = 1 / 0  # the line" in (entry.line or "") for entry in entries)
    assert not any("nnsight_engine" in entry.filename for entry in entries)
    with pytest.raises(MissedProviderError, match="out of order"):
        with model.trace(TEXT, backend=bench.elsewhere()):
            _ = model.model.layers[2].output
            model.model.layers[0].output.save()


def test_what_would_end_a_process_is_an_error(bench: Bench) -> None:
    model = bench.client
    with pytest.raises(Exception, match="3") as caught:
        with model.trace(TEXT, backend=bench.elsewhere()):
            raise SystemExit(3)
    assert type(caught.value).__name__ == "SystemExit"


def test_containers_saved_before_are_filled(bench: Bench) -> None:
    model = bench.client
    with model.session():
        kept: dict[str, Any] = save({})
        with model.trace(TEXT, backend=bench.elsewhere()):
            kept["mean"] = model.lm_head.output.mean().item()
        assert set(kept) == {"mean"}


def test_what_cannot_travel_fails_by_name(bench: Bench) -> None:
    model = bench.client
    with pytest.raises(EncodeError, match=r"bad.*generator"):
        with model.trace(TEXT, backend=bench.elsewhere()):
            model.lm_head.output.save()
            bad = save(number for number in range(3))
            assert bad is not None


def test_an_error_in_a_session_has_the_line_of_its_trace(bench: Bench) -> None:
    model = bench.client
    with pytest.raises(ValueError, match="in the second") as caught:
        with model.session(backend=bench.elsewhere()):
            with model.trace(TEXT):
                total = model.lm_head.output.sum()
            with model.trace(TEXT):
                raise ValueError(f"in the second {total.ndim}")
    lines = [entry.line for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert any(line and "in the second" in line for line in lines)


def test_wanted_names_come_home_unsaved(bench: Bench) -> None:
    model = bench.client
    with model.session():
        with model.trace(TEXT, backend=bench.elsewhere()):
            hidden = model.model.layers[0].output
        shape = save(tuple(hidden.shape))
    assert shape[-1] == 128
    with pytest.raises(NameError):
        _ = hidden


def test_random_numbers_are_each_traces_own(bench: Bench) -> None:
    model = bench.client
    drawn = []
    for _ in range(2):
        with model.trace(TEXT, backend=bench.elsewhere()):
            drawn.append(torch.rand(1).item())
            torch.manual_seed(0)
            kept = save(list(drawn))
        drawn = list(kept)
    with model.trace(TEXT, backend=bench.elsewhere()):
        after = torch.rand(1).item()
        after = save(float(after))
    seeded = torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert after != seeded


@pytest.mark.parametrize(
    "inputs", [None, [1], [((), {}), ((), {})], [((), 3)], [[(), {}]]], ids=repr
)  # fmt: skip
def test_wrong_inputs_are_refused(bench: Bench, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.client
    monkeypatch.setattr(TransformersDialect, "inputs", lambda *_: Inputs(shared={"inputs": inputs}))
    with pytest.raises(DecodeError, match="needs inputs"):
        with model.trace(TEXT, backend=bench.elsewhere()):
            model.lm_head.output.save()


@pytest.mark.parametrize(
    "head", [{"groups": []}, {"num_edits": 1}, {"num_edits": 9}, {"num_edits": 1, "kind": "session"}]
)
def test_heads_that_do_not_fit_are_refused(bench: Bench, head: dict[str, Any]) -> None:
    model = bench.client

    def send(request: TraceRequest) -> bytes:
        changed = msgspec.structs.replace(request.head, **head)
        return bench.runner.run(TraceRequest(changed, request.parts))

    with pytest.raises(DecodeError, match="blocks"):
        with model.trace(TEXT, backend=RemoteBackend(transport=InProcess(send))):
            model.lm_head.output.save()


def test_bytes_that_are_no_blocks_are_refused(bench: Bench) -> None:
    for blocks in (b"", b"NNSW", encode_trace([]), encode({"a": 1})):
        with pytest.raises(DecodeError):
            bench.runner.run(TraceRequest(TraceHead(model="", dialect="transformers"), [blocks]))


def test_sessions_bring_edits_and_names(bench: Bench) -> None:
    names = {"mlp": "feedforward"}
    client = LanguageModel(bench.path, rename=names)
    with client.edit() as edited:
        client.layers[0].output[:] *= 0.5
    with edited.session(backend=bench.elsewhere()):
        with edited.trace(TEXT):
            there = edited.layers[1].feedforward.output.save()
    with bench.local.trace(TEXT):
        bench.local.layers[0].output[:] *= 0.5
        here = bench.local.layers[1].mlp.output.save()
    assert torch.equal(here, there)
    assert not bench.engine._default_mediators


def test_a_custom_function_is_traced(bench: Bench) -> None:
    def twice(input_ids: Any, **_: Any) -> Any:
        return (input_ids, input_ids)

    model = bench.client
    with model.trace(TEXT, fn=twice, backend=bench.elsewhere()) as tracer:
        result = tracer.result.save()
    assert len(result) == 2


def test_parts_that_run_where_they_were_written_are_for_traces_here(bench: Bench) -> None:
    seen: list[float] = []
    local = bench.local
    with local.trace(TEXT) as tracer:
        hidden = local.layers[0].output
        with tracer.local():
            seen.append(hidden.sum().item())
            factor = 2.0
        local.layers[1].output[:] = hidden * factor
        changed = local.layers[1].output.sum().save()
    assert torch.isclose(changed, torch.tensor(2 * seen[0]), rtol=1e-3)
    model = bench.client
    with pytest.raises(RemoteError, match="jobs are for servers over HTTP"):
        with model.trace(TEXT, backend=bench.elsewhere()) as tracer:
            with tracer.local():
                model.layers[0].output.sum().save()
    with pytest.raises(LocalBlockError, match="none is connected"):
        with model.trace(TEXT, backend=bench.elsewhere()) as tracer:
            with (lambda: tracer)().local():
                model.layers[0].output.sum().save()
    with pytest.raises(LocalBlockError, match="inside vLLM"):
        BlockTracer.local(cast("Any", None))


def test_a_session_s_traces_run_where_it_does_whatever_they_say(bench: Bench) -> None:
    model = bench.client
    runner = TraceRunner(TraceableModel(bench.path, dispatch=True))
    with model.session(backend=RemoteBackend(transport=InProcess(runner.run))):
        with model.trace(TEXT, remote="http://127.0.0.1:9"):
            hidden = model.layers[0].output.save()
    with bench.local.trace(TEXT):
        expected = bench.local.layers[0].output.save()
    assert torch.equal(hidden, expected)


def test_warnings_of_blocks_go_where_their_prints_go(capsys: pytest.CaptureFixture[str]) -> None:
    _print_warning(UserWarning("no further step comes"), UserWarning, "script.py", 7)
    assert capsys.readouterr().out == "script.py:7: UserWarning: no further step comes\n"
