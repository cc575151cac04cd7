"""Passes a request on to another ASGI application in this process, with this server's limits on clients.

The application is told that the client has left also at the request's deadline, and for a client that reads
nothing; messages that it sends after that are dropped. Bodies that vLLM's handlers read are checked for parts
that would cost too much, or run without limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD
from app.formats.json_bodies import num_media_characters
from app.http.contexts import KEY, context_of, disconnected, note_error
from app.http.errors import internal_error
from app.http.vllm_routes import RESPONSES, VLLMRoute
from app.services.operations import check_spelling
from app.services.streaming import Sending, send_final

logger = logging.getLogger(__name__)

_DISCONNECT: Final[Message] = {"type": "http.disconnect"}
_HIDDEN: Final = {b"authorization", b"x-api-key", b"content-length"}
_KEPT: Final = (
    "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client",
    "server", "extensions", KEY,
)  # fmt: skip


class PassedOn(Response):
    """A response by another application, which gets the request with this body.

    ``final_event`` returns the last bytes of an answer that an error ends, given the last ones sent.
    """

    def __init__(
        self,
        app: ASGIApp,
        body: bytes,
        *,
        stall_s: float,
        final_event: Callable[[ApiError, bytes], bytes],
        keep_alive_s: float = 0.0,
    ) -> None:
        super().__init__()
        self._app = app
        self._content = body
        self._stall_s = stall_s
        self._final_event = final_event
        self._keep_alive_s = keep_alive_s
        self._is_whole = False
        self._last_sent = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the application's answer; an error before it is raised, a later one becomes its end."""
        deadline = context_of(scope).deadline
        sending = Sending(send, deadline, self._stall_s, self._keep_alive_s)
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            error = await self._run_app(scope, sending, gone, deadline.reached)
            error = deadline.error or error
            if self._is_whole:
                return
            if sending.is_stalled or (error is None and gone.done()):
                raise ClientDisconnect
            if error is None:
                error = internal_error()  # the application has ended without an answer
            if not sending.has_started:
                raise error
            note_error(scope, error.code)
            sending.close()
            await send_final(self._final_event(error, self._last_sent), send)
        finally:
            sending.close()
            gone.cancel()

    async def _run_app(
        self, scope: Scope, sending: Sending, gone: asyncio.Future[Any], reached: asyncio.Future[Any]
    ) -> ApiError | None:
        """Run the application, and send its answer; return the error that it has failed with."""
        unread = [{"type": "http.request", "body": self._content, "more_body": False}]

        async def received() -> Message:
            """Return the body, and then wait until the application is to be told that the client has left."""
            if unread:
                return unread.pop()
            await asyncio.wait({gone, reached}, return_when=asyncio.FIRST_COMPLETED)
            return _DISCONNECT

        async def sent(message: Message) -> None:
            if not (gone.done() or reached.done()):
                await sending.send(message)
                is_body = message["type"] == "http.response.body"
                self._last_sent = message.get("body", b"") or self._last_sent
                self._is_whole = is_body and not message.get("more_body", False)

        try:
            await self._app(_inner_scope(scope), received, sent)
        except Exception as error:
            # Starlette raises again what it has answered.
            refusal = next((cause for cause in _causes(error) if isinstance(cause, ApiError)), None)
            if refusal is None:
                logger.exception("a route of vLLM failed: %s", scope["path"])
            return refusal or internal_error()
        return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that have caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _inner_scope(scope: Scope) -> Scope:
    """Return the connection as the application sees it: without the caller's key and this server's route."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _HIDDEN]
    # With a newer version of ASGI, starlette notices a client that has left only when it sends.
    asgi = {"version": "3.0", "spec_version": "2.3"}
    return {name: scope[name] for name in _KEPT if name in scope} | {"asgi": asgi, "headers": headers}


MAX_OBJECTS: Final = 1000
"""Objects in the items, parts and tools of one response. vLLM's model tries some sixty classes for each."""
_MAX_PARTS: Final = 100
"""Objects in one item."""
_MAX_NAME: Final = 512
_MAX_CHARS_PER_TOKEN: Final = 32
_MAX_STORED: Final = 64 * 1024
_MAX_TEXTS: Final = 64
_LISTS: Final = (
    "input", "messages", "documents", "items", "text_1", "text_2", "data_1", "data_2", "queries",
)  # fmt: skip
"""Fields with several texts, each of which is a prompt or a part of one."""
_TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")


def check_body(
    route: VLLMRoute, fields: MutableMapping[str, Any], max_model_len: int, max_texts: int
) -> None:
    """Raise ApiError for a body that is not accepted; large responses are marked not to be stored."""
    if fields.get(FIELD) and not route.intervenes:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION, f"{route.path} takes no `{FIELD}`; leave it out.", FIELD
        )
    check_spelling(fields)
    other_fields = [value for name, value in fields.items() if name != FIELD]
    num_characters = sum(map(len, _texts(other_fields))) - num_media_characters(fields)
    num_prompts = 1
    if route.has_many:
        _check_texts(fields, max_model_len, max_texts)
        num_prompts = min(num_texts(fields), _MAX_TEXTS)
    max_characters = max_model_len * _MAX_CHARS_PER_TOKEN * num_prompts
    if num_characters > max_characters:  # vLLM tokenizes texts whole, on a thread that all requests share
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"The texts of this request to {route.path} may have {max_characters} characters together, got "
            f"{num_characters}: the model's context has {max_model_len} tokens.",
        )
    extra = fields.get("vllm_xargs")
    for name in _TRANSFERS:
        if isinstance(extra, dict) and name in extra:
            raise _invalid(f"vllm_xargs.{name}", "is an object: send it as a field of its own")
    if route.path == RESPONSES:
        _check_response(fields)
        if sum(map(len, _texts(other_fields, with_names=True))) > _MAX_STORED:
            fields["store"] = False


def is_in_background(route: VLLMRoute, fields: Mapping[str, Any]) -> bool:
    return route.path == RESPONSES and bool(fields.get("background"))


def check_in_background(fields: Mapping[str, Any], *, has_operations: bool) -> None:
    """Raise ApiError for a response in the background that streams, has operations, or is not stored."""
    rules = {
        FIELD: (has_operations, "a stored response has no results"),
        "request_id": ("request_id" in fields, "its id is chosen by the server"),
        "stream": (bool(fields.get("stream")), "the events of one that is cancelled would never end"),
        "store": (
            fields.get("store", True) is not True,
            f"it is read later; texts, images and names in it may have {_MAX_STORED} characters together",
        ),
    }
    for name, (is_refused, reason) in rules.items():
        if is_refused:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"`background` cannot be combined with this `{name}`: {reason}. Leave one of them out.",
                name,
            )


def num_texts(fields: Mapping[str, Any]) -> int:
    """Return the number of texts of a body that are prompts of their own, at least 1."""
    lists = [fields[name] for name in _LISTS if _kind_of(fields.get(name)) in {str, list}]
    return max([1, *map(len, lists)])


def _kind_of(texts: Any) -> type | None:
    """Return the type of a list's items: int for the ids of one prompt, dict for one conversation."""
    kinds = set(map(type, texts)) if isinstance(texts, list) else set()
    return kinds.pop() if len(kinds) == 1 else None


def _check_texts(fields: Mapping[str, Any], max_model_len: int, max_texts: int) -> None:
    """Raise ApiError for texts of a wrong form, too many of them, or too many ids."""
    for name in _LISTS:
        texts = fields.get(name)
        if not isinstance(texts, list) or not texts:
            continue
        kind = _kind_of(texts)
        item_kinds = set(map(type, chain.from_iterable(texts))) if kind is list else set()
        if kind not in {str, int, dict, list} or not (item_kinds <= {int} or item_kinds == {dict}):
            raise _invalid(name, "must be a text, texts, ids, lists of ids, or messages")
        if kind is not int and len(texts) > max_texts:
            raise _invalid(name, f"may have {max_texts} items, got {len(texts)}; send several requests")
        longest = 0  # of ids; the characters of texts are counted together
        if kind is int:
            longest = len(texts)
        elif item_kinds == {int}:
            longest = max(map(len, texts))
        if longest > max_model_len and fields.get("truncate_prompt_tokens") is None:
            raise _invalid(name, f"may have {max_model_len} ids for each text, got {longest}")


def _check_response(fields: Mapping[str, Any]) -> None:
    """Raise ApiError for a body of ``/v1/responses`` whose validation by vLLM would cost too much."""
    if not isinstance(fields.get("background", False), bool | None):
        raise _invalid("background", "must be true or false")
    for name in ("user", "request_id", "prompt_cache_key", "previous_response_id"):
        value = fields.get(name)
        if isinstance(value, str) and len(value) > _MAX_NAME:
            raise _invalid(name, f"may have {_MAX_NAME} characters, got {len(value)}")
    nested = [fields.get(name) for name in ("input", "tools", "previous_input_messages", "include")]
    num_objects = sum(1 for _ in _objects(nested))
    if num_objects > MAX_OBJECTS:
        raise _invalid(
            "input", f"and `tools` may have {MAX_OBJECTS} objects together, got {num_objects}: join texts"
        )
    items = fields.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if sum(1 for _ in _objects(item)) > _MAX_PARTS:
            raise _invalid(f"input.{index}", f"may have {_MAX_PARTS} objects")


def _objects(value: Any) -> Iterator[Any]:
    """Yield the objects in a value at any depth, and the items of lists."""
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _objects(item)
    elif isinstance(value, list):
        for item in value:
            if not isinstance(item, dict | list):
                yield item
            yield from _objects(item)


def _texts(value: Any, *, with_names: bool = False) -> Iterator[str]:
    """Yield the texts in a value at any depth, and with ``with_names`` the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        if with_names:
            yield from value
        yield from _texts(list(value.values()), with_names=with_names)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, with_names=with_names)


def _invalid(name: str, text: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_VALUE, f"`{name}` {text}.", name)
