"""Grammars in processes of their own, without an engine: which are accepted, which are ended, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from vllm.sampling_params import StructuredOutputsParams

from api_schemas.errors import ApiError, ErrorCode
from app.engine.grammars import Grammars
from app.process_environment import environment_for_traces
from app.settings import Settings
from nnsight_engine.modeling.bundled import bundled_model_path
from nnsight_engine.vllm_backend import grammar_process
from nnsight_engine.vllm_backend.grammar_process import GrammarJob, GrammarSetup, GrammarVerdict
from tests.child_processes import children_running
from tests.waiting import wait_for_async

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
COSTLY = "(" + "|".join(f"(.*[{letter}-z]){{1,1000}}" for letter in "abcdefghijklmnopqrstuvwxy" * 3) + ")"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Grammars]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("data"))
    made = Grammars(settings, environment_for_traces(), cpu_s=2)
    model = str(bundled_model_path())
    config = {"backend": "auto"}
    made.use(GrammarSetup(model, "auto", "", False, 49152, "llama", False, config))
    await made.accept(StructuredOutputsParams(choice=["yes", "no"]), "")
    yield made
    await made.close()


def costly(name: str) -> StructuredOutputsParams:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": f"{name}{COSTLY}"}}}
    return StructuredOutputsParams(json=schema)


def forking_process() -> psutil.Process:
    """Return the process that forks one process for each grammar."""
    (found,) = children_running(grammar_process.__name__)
    return found


def compiling() -> list[psutil.Process]:
    found: list[psutil.Process] = forking_process().children()
    return found


async def ended() -> None:
    """Wait until nothing is compiled."""
    await wait_for_async(lambda: not compiling())


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"type": "object"}},
        {"json": '{"enum": [1, 2]}'},
        {"json_object": True},
        {"regex": "[a-z]{2,5}"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a" | "b"'},
        {
            "structural_tag": json.dumps(
                {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
            )
        },
    ],
)
async def test_what_vllm_takes_is_accepted_with_what_vllm_would_have_set(
    grammars: Grammars, given: dict[str, Any]
) -> None:
    structured = StructuredOutputsParams(**given)
    await grammars.accept(structured, "")
    assert structured._backend == "xgrammar"  # noqa: SLF001 - vLLM has no public name for it
    assert structured.choice is None
    assert (structured.grammar is not None) == bool({"choice", "grammar"} & given.keys())


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "(a"},
        {"json_object": False},
        {"json": {"type": "integer", "maximum": 10**30}},
        {"choice": ["\ud800"]},
        {"regex": "\ud800"},
        {"grammar": "root ::= ::="},
        {"json": "{"},
        {"structural_tag": "{}"},
        {"json": {"type": 5}},
    ],
)
async def test_an_invalid_grammar_is_refused(grammars: Grammars, given: dict[str, Any]) -> None:
    for _ in range(2):
        with pytest.raises(ApiError) as raised:
            await grammars.accept(StructuredOutputsParams(**given), "")
        assert raised.value.code == "invalid_value"


async def test_a_slow_compilation_is_ended_for_all_waiting_requests_and_remembered(
    grammars: Grammars,
) -> None:
    num_beats = 0

    async def beat() -> None:
        nonlocal num_beats
        while True:
            num_beats += 1
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat())
    answers = await asyncio.gather(
        *(grammars.accept(costly("long"), "") for _ in range(3)), return_exceptions=True
    )
    beating.cancel()
    assert ["s or 536870912 bytes to compile" in str(answer) for answer in answers] == [True] * 3
    assert num_beats > 10  # of about two hundred; a loop that waited for the compiler had a few
    await ended()
    forking_process().suspend()
    try:
        with pytest.raises(ApiError):
            await grammars.accept(costly("long"), "")  # without the process
    finally:
        forking_process().resume()


async def test_another_process_forks_where_one_has_ended(grammars: Grammars) -> None:
    first = forking_process()
    first.kill()
    await grammars.accept(StructuredOutputsParams(regex="another"), "")
    assert forking_process() != first


async def test_a_request_that_joins_another_tenants_compilation_learns_nothing_of_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path, max_queued_traces=2, tenant_share=0.5)
    made = Grammars(settings, {})
    go = asyncio.Event()

    async def compile_grammar(_job: GrammarJob) -> GrammarVerdict:
        await go.wait()
        return GrammarVerdict(backend="xgrammar")

    monkeypatch.setattr(made, "_compile", compile_grammar)

    def accepted(name: str, tenant: str) -> asyncio.Task[None]:
        return asyncio.create_task(made.accept(StructuredOutputsParams(regex=name), tenant))

    first = [accepted(name, "a") for name in ("runs", "waits")]
    await asyncio.sleep(0)
    refused, joined = accepted("same", "a"), accepted("same", "b")  # in one iteration of the loop
    with pytest.raises(ApiError, match="The tenant 'a' may have") as caught:
        await refused
    assert caught.value.code is ErrorCode.QUEUE_FULL
    go.set()
    await asyncio.gather(*first, joined)
    assert made.num_waiting == 0


async def test_a_compilation_whose_client_left_at_the_start_frees_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Grammars(Settings(data_dir=tmp_path), {})

    async def compile_grammar(_job: GrammarJob) -> GrammarVerdict:
        return GrammarVerdict(backend="xgrammar")

    monkeypatch.setattr(made, "_compile", compile_grammar)
    for number in range(5):
        accepting = asyncio.create_task(made.accept(StructuredOutputsParams(regex=f"a{number}"), "a"))
        await asyncio.sleep(0)  # its compilation has not had its first step
        accepting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await accepting
    async with asyncio.timeout(60):
        await made.accept(StructuredOutputsParams(regex="b"), "a")
