"""vLLM's refusals of OpenAI's fields, as errors of this server.

vLLM reports a refusal as an exception, as pydantic's list of problems, or as an answer whose ``code`` is the
HTTP status. Each becomes a ``RefusedError`` where it occurs, and an ``ApiError`` where the body is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import types
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from pydantic_core import ErrorDetails
from vllm import SamplingParams
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from api_schemas.errors import ApiError, ErrorCode, excerpt
from api_schemas.interventions import path_in
from app.http.errors import internal_error

_MAX_TEXT: Final = 400
_MAX_PROBLEMS: Final = 3
_MANY: Final = 256

_EXTRAS: Final = re.compile(r" \((?:parameter|value)=.*\)$|: \{'json':.*$", re.DOTALL)
"""What vLLM's errors append to their text: their arguments, or all fields of an object."""

ADVICE: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        r"If you want to load the adapter in place, set 'load_inplace' to True": "Unload it first",
        r"Send a plugin request with a 'data' field, or select": "Its operator can select",
        r"use 'prompt_token_ids' for token ID inputs": "send token ids as a list of numbers",
        r"Start the engine with enable_mixed_moe_lora_format=True .* on the LoRA request": (
            "Merge the adapter into the checkpoint"
        ),
    }
)
"""Advice of vLLM's that names options or fields which this server refuses, and the one that holds here."""

_FRACTION: Final = (", got a number with a fractional part", " without a fraction")
"""A phrase of pydantic's and its replacement."""

TOO_LARGE: Final = "A number of this request is too large, or too small, to compute with"
"""The message for a number that cannot be sent to the engine, wherever in the body it is."""

_BITS: Final = 63
_WORD: Final = re.compile(r"`?\w[\w.]*`?")
_INPUT: Final = ("messages", "prompt", "tokens")
_GRAMMAR: Final = ("structured_outputs", "response_format")
_EXTRA: Final = ("vllm_xargs", "kv_transfer_params", "ec_transfer_params")
_INSTEAD: Final = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
"""Maps a sampling parameter to the field of chat completions that sets it, if the body has that field."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of refusal: facts that the general rule cannot derive.

    ``params`` are candidates where vLLM names no field; ``step`` is None for the general one, empty where the
    text contains it.
    """

    pattern: str
    params: tuple[str, ...] = ()
    step: str | None = None
    code: ErrorCode = ErrorCode.INVALID_VALUE


_BOTH: Final = ErrorCode.UNSUPPORTED_COMBINATION
_KINDS: Final = (
    _Kind(
        r"^The model `.*` does not exist",
        ("model",),
        "GET /v1/models lists the names",
        ErrorCode.MODEL_NOT_FOUND,
    ),
    _Kind(r"one kind of|either use constraints", _GRAMMAR, "keep one of them", _BOTH),
    _Kind(r"none are specified", _GRAMMAR, "set one of its fields, such as `choice`"),
    _Kind(r"^extra_args", _EXTRA),
    _Kind(r"^Chat template is passed", ("chat_template", "chat_template_kwargs"), "omit it"),
    _Kind(r"^max_pattern_size|^min_count", ("repetition_detection",), ""),
    _Kind(
        r"^Cannot set both `continue_final", ("continue_final_message",), "set one of them to false", _BOTH
    ),
    _Kind(r"only be defined when `stream=True`", step="set `stream` to true, or omit `stream_options`"),
    _Kind(r"`logprobs` must be set", step="set `logprobs`, or omit this field"),
    _Kind(r"not available when `stream=True`", step="set `stream` to false, or omit this field", code=_BOTH),
    _Kind(r"greedy sampling", ("n",), "set `temperature` above 0, or `n` to 1", _BOTH),
    _Kind(r"^min_tokens must be less", ("min_tokens",), "lower `min_tokens`, or raise `max_tokens`"),
    _Kind(r"beam search", step="set `use_beam_search` to false, or omit this field", code=_BOTH),
    _Kind(r"maximum (context|model) length|maximum input length|longer than|context length is", _INPUT, ""),
    _Kind(r"suffix", ("suffix",), "omit `suffix`"),
    _Kind(r"`tools` must be set", step="send `tools`, or omit `tool_choice`"),
    _Kind(r"at least one (prompt|character|token)|[Pp]rompt .*empty|[Ee]mpty prompt", _INPUT),
    _Kind(r"[Tt]oken id .* out of vocab", _INPUT, "GET /v1/capabilities has the model's sizes"),
    _Kind(r"grammar|structured output|structural_tag|json_schema", _GRAMMAR),
    _Kind(r"[Tt]emplate|[Cc]onversation roles|\b[Mm]essages?\b", _INPUT),
)
"""In order of precedence: the first whose pattern matches applies."""

_OTHER: Final = _Kind("")


class RefusedError(Exception):
    """A refusal that is not yet related to a body; ``param`` may be no field, ``status`` is vLLM's own."""

    def __init__(self, text: str, param: str | None = None, status: int = 400) -> None:
        text = corrected(text)
        super().__init__(text)
        self.text = text
        self.param = param
        self.status = status

    @classmethod
    def of_answer(cls, answer: ErrorResponse) -> RefusedError:
        return cls(answer.error.message, answer.error.param, int(answer.error.code))

    @classmethod
    def of(cls, error: Exception) -> RefusedError:
        """Return the error that vLLM's own server would answer for an exception."""
        return cls.of_answer(create_error_response(error))


def corrected(text: str) -> str:
    """Return a message of vLLM's with advice that holds for this server."""
    for advice, instead in ADVICE.items():
        text = re.sub(advice, instead, text)
    return text


class Refusals:
    """Converts vLLM's refusals of one body: raises ApiError for a ``RefusedError`` of its block."""

    __slots__ = ("_body", "_fields")

    def __init__(self, body: Mapping[str, Any], fields: Collection[str]) -> None:
        self._body = body
        self._fields = fields

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RefusedError):
            raise self.refused(error) from error

    def refused(self, error: RefusedError) -> ApiError:
        """Return vLLM's refusal as this server's error, with the field that it is about."""
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return ApiError(ErrorCode.QUEUE_FULL, f"{_sentence(error.text)}; send this again later.")
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and error.status != HTTPStatus.NOT_IMPLEMENTED:
            return internal_error()
        text = _sentence(error.text)
        kind = _kind(text)
        return self._as_sentence(text, self._param(kind, error.param, text), kind)

    def invalid(self, problems: Sequence[ErrorDetails]) -> ApiError:
        """Return pydantic's problems with the body as one error, about the first invalid field.

        For a field of a union type the message lists the problem of each type, at the deepest path.
        """
        with_paths = [(self._path(problem), problem["msg"]) for problem in problems[:_MANY]]
        first_path, _ = with_paths[0]
        field = first_path[:1]
        deepest = max((path for path, _ in with_paths if path[:1] == field), key=len)
        messages = dict.fromkeys(
            message.removeprefix("Value error, ").replace(*_FRACTION)
            for path, message in with_paths
            if path == deepest
        )
        text = _sentence("; or ".join([*messages][:_MAX_PROBLEMS]))
        kind = _kind(text)
        param = ".".join(deepest) or self._param(kind, None, text)
        return self._as_sentence(
            text if param is None else f"`{param}`: {text}", param, _Kind("", step=kind.step)
        )

    def _path(self, problem: ErrorDetails) -> list[str]:
        return path_in(self._body, problem["loc"], keep_last=problem["type"] == "missing")

    def _as_sentence(self, text: str, param: str | None, kind: _Kind) -> ApiError:
        """Return the error: vLLM's text, the value that the client sent, and what to do next."""
        sent_values = () if param is None else _values_at(self._body, param)
        value = "".join(
            f", got {excerpt(sent_value)}"
            for sent_value in sent_values
            if "got" not in text and excerpt(sent_value) not in text
        )
        step = _next_step(param, is_given=bool(sent_values)) if kind.step is None else kind.step
        return ApiError(kind.code, f"{text}{value}{f'; {step}' if step else ''}.", param)

    def _param(self, kind: _Kind, named: str | None, text: str) -> str | None:
        """Return the field that a refusal is about, None if unknown; ``named`` is the one that vLLM names."""
        fields = self._fields
        if named is not None and named.partition(".")[0] in fields:
            param: str | None = named
        elif text.startswith(TOO_LARGE):
            param = next((name for name in fields if _is_huge(self._body.get(name))), None)
        elif kind.params:
            param = self._first_sent(kind.params)
        elif named is not None:  # a part of the prompt: an image, a text, its token ids
            param = self._first_sent(_INPUT)
        else:
            param = _mentioned(text, fields)
        instead = _INSTEAD.get(param or "")
        return (
            instead
            if instead is not None and instead in fields and _has_value(self._body.get(instead))
            else param
        )

    def _first_sent(self, names: Sequence[str]) -> str | None:
        known = [name for name in names if name in self._fields]
        return next((name for name in known if self._body.get(name) is not None), next(iter(known), None))


def _kind(text: str) -> _Kind:
    return next((kind for kind in _KINDS if re.search(kind.pattern, text)), _OTHER)


def _next_step(param: str | None, *, is_given: bool) -> str:
    if param is None:
        return "compare the request's fields with /docs"
    if not is_given:
        return f"send `{param}`, which /docs describes"
    return f"send another `{param}`" if param in _INPUT else f"change `{param}`, or omit it; see /docs"


def _is_huge(value: object) -> bool:
    """Return whether a JSON value has an integer that does not fit into 64 bits with a sign."""
    if isinstance(value, int):
        return value.bit_length() > _BITS
    if isinstance(value, Mapping):
        return any(map(_is_huge, value.values()))
    return isinstance(value, list) and any(map(_is_huge, value))


def _mentioned(text: str, fields: Collection[str]) -> str | None:
    """Return the first field in backquotes, else one that begins the text or has an underscore."""
    words = [word[0] for word in _WORD.finditer(text)]
    quoted = (word.strip("`").partition(".")[0] for word in words if word.startswith("`"))
    plain = (word for index, word in enumerate(words) if not index or "_" in word)
    return next((word for word in (*quoted, *plain) if word in fields), None)


def _has_value(value: object) -> bool:
    return value is not None and not isinstance(value, bool)


def _values_at(body: Mapping[str, Any], param: str) -> tuple[Any, ...]:
    """Return the value at a dotted path of the body, in a tuple; an empty tuple if there is none."""
    value: Any = body
    for part in param.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return ()
    return (value,)


def _sentence(text: str) -> str:
    plain = " ".join(_EXTRAS.sub("", text).split()).rstrip(".!;, ")
    return plain[:_MAX_TEXT]


logger = logging.getLogger(__name__)

_CLIENTS: Final = (VLLMClientError, ValueError, TypeError)
"""Exceptions that mean a wrong request, also to vLLM."""

_PROMPT: Final = "prompt"


def engine_dead() -> ApiError:
    return ApiError(
        ErrorCode.ENGINE_DEAD,
        "The engine has stopped while it worked on this; GET /health/ready turns 200 when one serves again.",
    )


def cause_of(error: Exception) -> Exception:
    """Return the cause of an error in which vLLM says only that it could not generate.

    Numbers or texts that cannot be serialized for the engine's process arrive this way, and so do arithmetic
    overflows in computations with the request's own numbers.
    """
    reason = error.__cause__ if isinstance(error, EngineGenerateError) else error
    if isinstance(reason, ArithmeticError):
        refusal: Exception = VLLMValidationError(f"{TOO_LARGE} ({reason})")
        return refusal
    return reason if isinstance(reason, _CLIENTS) else error


@contextlib.contextmanager
def translating_engine_death() -> Iterator[None]:
    """Raise ``engine_dead`` where vLLM raises ``EngineDeadError`` in the block."""
    try:
        yield
    except EngineDeadError as error:
        raise engine_dead() from error


def raise_stream_errors(serving: Any) -> None:
    """Make the streams of a vLLM serving class raise the errors that vLLM would send as an event."""

    def create(message: str | Exception, *_args: Any, **_kwargs: Any) -> str:
        if isinstance(message, str):
            raise RefusedError(message)
        raise refusal_of(message) from message

    serving.create_streaming_error_response = create


def raise_message_errors(serving: Any) -> None:
    """Have a vLLM serving class of Anthropic's messages name the errors that are not the server's own.

    vLLM answers an error of the engine's checks with status 500, and one in a stream as ``internal_error``.
    """
    raise_stream_errors(serving)
    create, convert = serving.create_messages, serving.message_stream_converter

    async def create_messages(request: Any, raw_request: Any = None) -> Any:
        try:
            return await create(request, raw_request)
        except Exception as error:  # noqa: BLE001 - vLLM's route answers all of them
            return answer_of(error)

    async def message_stream_converter(frames: AsyncIterator[str]) -> AsyncIterator[str]:
        failures: list[Exception] = []

        async def watched() -> AsyncIterator[str]:
            try:
                async for frame in frames:
                    yield frame
            except Exception as error:
                failures.append(error)
                raise

        async for event in convert(watched()):
            if failures:  # the event is the converter's form of it
                (failure,) = failures
                raise Refusals({}, ()).refused(failure) if isinstance(failure, RefusedError) else failure
            yield event

    serving.create_messages = create_messages
    serving.message_stream_converter = message_stream_converter


def answer_of(error: Exception) -> ErrorResponse:
    """Return an error as an answer of vLLM's, from which its route makes the response."""
    refusal = refusal_of(error)
    if isinstance(refusal, RefusedError):
        refused: ErrorResponse = create_error_response(cause_of(error))
        return refused
    info = refusal.body().error
    return ErrorResponse(
        error=ErrorInfo(message=info.message, type=info.type, param=info.param, code=refusal.status)
    )


def refusal_of(error: Exception) -> ApiError | RefusedError:
    """Return an exception that vLLM raised while it served a request, as an error of ours or as a refusal."""
    for cause in (error, error.__cause__):
        if isinstance(cause, ApiError):
            return cause
        if isinstance(cause, EngineDeadError):
            return engine_dead()
    refusal = RefusedError.of(cause_of(error))
    # Only the type is logged: the message may quote the request.
    log = logger.error if refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR else logger.info
    log("vLLM refused a request with %s", type(error).__name__)
    return refusal


def trace_refusal(error: Exception, field: str, params: Mapping[str, Any]) -> ApiError | None:
    """Return vLLM's error about a request of a trace as ours; None if it is a fault, not a refusal."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return engine_dead()
    if isinstance(error, GracefulHTTPError):
        return ApiError(ErrorCode.QUEUE_FULL, str(error), field)
    if isinstance(error, VLLMClientError):
        names = SamplingParams.__struct_fields__
        refusal = Refusals(params, (*names, _PROMPT)).refused(RefusedError.of(error))
        top = (refusal.param or "").partition(".")[0]
        field_path = ""
        if top in names:
            field_path = f".sampling.{refusal.param}"
        elif top == _PROMPT:
            field_path = f".{_PROMPT}"
        return ApiError(refusal.code, refusal.message, f"{field}{field_path}")
    return None
