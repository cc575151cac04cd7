"""Every request has one context, and code finds it in one place."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

import app
import nnsight_engine
from api_schemas.errors import ApiError, ErrorCode
from app.auth.principal import ANONYMOUS
from app.errors import error_response
from app.request_context import RequestContext, RequestContextMiddleware, begin_context, context_of
from nnsight_engine.core.work_context import current_work, tenant_served, working_for

PACKAGES = [Path(str(package.__file__)).parent for package in (app, nnsight_engine)]


async def never() -> Message:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def unsent(_message: Message) -> None:
    pass


def sources() -> dict[str, str]:
    return {str(path): path.read_text() for folder in PACKAGES for path in folder.rglob("*.py")}


def test_context_variables_are_the_work_and_the_call_and_scopes_have_one_key() -> None:
    variables = [path for path, text in sources().items() if re.search(r"\bContextVar(\[.*\])?\(", text)]
    assert [Path(path).name for path in variables] == ["async_engine.py", "work_context.py"]
    keys = [path for path, text in sources().items() if re.search(r'"nnsight_engine\.\w+"$', text, re.M)]
    assert [Path(path).name for path in keys if "/app/" in path] == ["request_context.py"]


async def test_the_outermost_layer_makes_a_context_for_each_request() -> None:
    seen: list[RequestContext] = []

    async def inner(scope: Scope, _receive: Receive, _send: Send) -> None:
        await asyncio.sleep(0)
        found = context_of({**scope})  # layers below may copy the scope
        seen.append(found)
        assert current_work() is found
        assert await asyncio.create_task(_current()) is found

    served = RequestContextMiddleware(inner)
    await asyncio.gather(
        *(served({"type": kind, "method": "GET"}, never, unsent) for kind in ("http", "http", "websocket"))
    )
    assert len({id(one) for one in seen}) == len({one.record.request_id for one in seen}) == 3
    assert current_work() is None
    await RequestContextMiddleware(_lifespan)({"type": "lifespan"}, never, unsent)


async def _current() -> object:
    return current_work()


async def _lifespan(scope: Scope, _receive: Receive, _send: Send) -> None:
    assert scope == {"type": "lifespan"}
    assert current_work() is None


async def test_nothing_is_served_before_the_caller_is_known() -> None:
    context = begin_context({"type": "http", "method": "POST"})
    with pytest.raises(RuntimeError, match="authenticated"):
        _ = context.caller
    context.principal = ANONYMOUS
    assert context.caller is ANONYMOUS


async def test_a_tenant_is_that_of_the_work_at_hand() -> None:
    context = begin_context({"type": "http", "method": "POST"})
    context.tenant = "acme"
    assert tenant_served() == ""
    with working_for(context):
        assert tenant_served() == "acme"
    assert tenant_served() == ""


async def test_an_error_is_recorded_when_it_is_sent() -> None:
    scope: Scope = {"type": "http", "method": "POST"}
    context = begin_context(scope)
    answer = error_response(ApiError(ErrorCode.DRAINING, "The server goes."))
    assert context.record.error == ""
    await answer(scope, never, unsent)
    assert context.record.error == ErrorCode.DRAINING
    await answer({"type": "http"}, never, unsent)  # on the thread of probes


async def test_eager_steps_are_not_forgotten() -> None:
    context = begin_context({"type": "http", "method": "POST"})
    for tier in ("tap", "eager", "tap"):
        context.note_tier(tier)
    assert context.tier == "eager"
