"""Admission of grammars before they reach the engine: bounded, and compiled first in a disposable process.

vLLM validates grammars on the event loop and compiles them in the engine, both without effective limits; that
can take minutes and gigabytes. Here the text is bounded first, in time linear in it; counts may be
approximate. Then the grammar waits until a separate process has compiled it within limits of CPU time and
memory. Verdicts are cached by content. A compiling process is killed when no request waits for it any more.

Grammars that vLLM compiles while it validates a request (structural tags, and any beside tools) are admitted
before that; all others in the engine's client, see ``Grammars.accept``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.request import get_structured_output_key

from api_schemas.errors import ApiError, ErrorCode
from app.engine.client import JsonObject
from app.engine.vllm_requests import read_request
from app.http.errors import internal_error
from app.limits.slots import Slot, Slots
from app.limits.tenant_budget import TenantBudget
from app.settings import KIB, MIB, Settings
from nnsight_engine.vllm_backend import grammar_process
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM
from nnsight_engine.vllm_backend.grammar_process import (
    FORK,
    PID,
    READY,
    GrammarJob,
    GrammarSetup,
    GrammarVerdict,
)

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

FIELD: Final = "structured_outputs"

_LISTS: Final = frozenset({"allOf", "anyOf", "enum", "oneOf"})
_PATTERNS: Final = frozenset({"ebnf", "grammar", "pattern", "regex"})
_VALUES: Final = frozenset({"const", "default", "examples"})
"""Keywords of JSON Schema whose values are not schemas."""
_MAX_DIGITS: Final = 9

# An escape, a character class or a quoted string is one token; an unterminated one extends to the end of the
# text, so that no character is scanned twice.
_REGEX: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|\{(\d*+),?(\d*+)\}|[|()]", re.DOTALL)
_GRAMMAR: Final = re.compile(
    r'"(?:\\.|[^"\\])*"?|\\.|\[(?:\\.|[^\]\\])*\]?|\{(\d*+),?(\d*+)\}|~\s*(\d+)(?:\.\.(\d+))?|[|()]',
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarBounds:
    """The limits of one grammar; ``max_alternatives`` is that of one list, or of one pattern as a whole."""

    max_bytes: int = 64 * KIB
    max_repeats: int = 1000
    max_alternatives: int = 1000
    max_nesting: int = 32

    def check(self, kind: str, text: str) -> None:
        """Raise ApiError ``invalid_value`` for a grammar that exceeds a bound.

        ``kind`` is a field of vLLM's; the text of ``json``, ``choice`` and ``structural_tag`` is JSON.
        """
        # A character has at least one byte: a text that is far too long need not be encoded.
        num_bytes = len(text) if len(text) > self.max_bytes else len(text.encode("utf-8", "surrogatepass"))
        self._check_limit(kind, "bytes of text", num_bytes, self.max_bytes)
        if kind in {"regex", "grammar"}:
            self._check_pattern(kind, text, _REGEX if kind == "regex" else _GRAMMAR)
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return  # the compiler reports the syntax error
        if kind == "choice" and isinstance(value, list):
            self._check_limit(kind, "alternatives", len(value), self.max_alternatives)
            return
        for depth, key, part in _schema_parts(value):
            if isinstance(part, dict | list):
                self._check_limit(kind, "levels of nesting", depth, self.max_nesting)
            if key in _LISTS and isinstance(part, list):
                self._check_limit(kind, "alternatives", len(part), self.max_alternatives)
            elif key == "patternProperties" and isinstance(part, dict):
                for pattern in part:
                    self._check_pattern(kind, pattern, _REGEX)
            elif key in _PATTERNS and isinstance(part, str):
                self._check_pattern(kind, part, _GRAMMAR if key in {"ebnf", "grammar"} else _REGEX)

    def _check_pattern(self, kind: str, text: str, tokens: re.Pattern[str]) -> None:
        """Check the nesting, repetitions and alternatives of a regex or an EBNF grammar, unparsed."""
        depth = num_alternatives = 1
        for token in tokens.finditer(text):
            if token[0] == "|":
                num_alternatives += 1
            elif token[0] in {"(", ")"}:
                depth += 1 if token[0] == "(" else -1
                self._check_limit(kind, "levels of nesting", depth, self.max_nesting)
            else:
                for count in filter(None, token.groups()):
                    # Python itself refuses integers of thousands of digits.
                    repeats = int(count) if len(count) <= _MAX_DIGITS else 10**_MAX_DIGITS
                    self._check_limit(kind, "repetitions", repeats, self.max_repeats)
        self._check_limit(kind, "alternatives", num_alternatives, self.max_alternatives)

    def _check_limit(self, kind: str, unit: str, got: int, limit: int) -> None:
        if got > limit:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A grammar may have {limit} {unit}, this {kind} has {got} or more; make it "
                "simpler, or check the answer afterwards.",
                FIELD,
            )


def _schema_parts(value: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield each value in a JSON schema with its depth and its key, empty in lists; not the ``_VALUES``."""
    pending: list[tuple[int, str, Any]] = [(1, "", value)]
    while pending:
        depth, key, part = entry = pending.pop()
        yield entry
        if isinstance(part, dict):
            pending += [(depth + 1, name, inner) for name, inner in part.items() if name not in _VALUES]
        elif isinstance(part, list) and key != "enum":
            pending += [(depth + 1, "", inner) for inner in part if isinstance(inner, dict | list)]


logger = logging.getLogger(__name__)

_START_S: Final = 180.0
_WALL: Final = 10
"""Factor from the CPU time limit to the wall-clock limit, for a machine that is busy with other work."""
_MAX_VERDICTS: Final = 1024


class Grammars:
    """Accepts grammars that a process could compile; ``cpu_s`` and ``memory_bytes`` limit each."""

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        *,
        cpu_s: int = 3,
        memory_bytes: int = 512 * MIB,
    ) -> None:
        self._bounds = GrammarBounds()
        self._cpu_s = cpu_s
        self._memory = memory_bytes
        # vLLM's own limit counts wall-clock time; ours counts CPU time.
        self._environment = {**environment, "MALLOC_ARENA_MAX": "2", "VLLM_REGEX_COMPILATION_TIMEOUT_S": "0"}
        budget = TenantBudget.of(settings)
        self._slots = Slots(budget.grammar_processes, budget.waiting_grammars)
        self._setup: GrammarSetup | None = None
        self._backend = ""
        self._forking = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._orders: socket.socket | None = None
        self._verdicts: collections.OrderedDict[bytes, GrammarVerdict] = collections.OrderedDict()
        self._compiling: dict[bytes, _Compiling] = {}

    @property
    def num_waiting(self) -> int:
        return self._slots.num_waiting

    def use(self, setup: GrammarSetup) -> None:
        self._setup, self._backend = setup, ""

    async def close(self) -> None:
        process, self._process = self._process, None
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def accept(self, structured: StructuredOutputsParams, sender: str) -> None:
        """Wait until a grammar was compiled; sets its fields that vLLM's own validation would set.

        Raises ApiError: ``invalid_value`` for one that exceeds a bound, takes too long or is malformed;
        ``queue_full``, ``starting``.
        """
        if structured.all_constraints_none():
            return
        try:
            kind, text = get_structured_output_key(structured)
            self._bounds.check(kind.name.lower(), text)
            fields = {
                field.name: getattr(structured, field.name)
                for field in dataclasses.fields(structured)
                if field.init and getattr(structured, field.name) is not None
            }
            if "json" in fields:
                fields["json"] = text  # as text, since msgpack cannot encode integers of any size
            msgspec.msgpack.encode(fields)
        except (ValueError, TypeError, RecursionError) as error:  # such as a lone surrogate
            raise ApiError(ErrorCode.INVALID_VALUE, f"The grammar cannot be used: {error}", FIELD) from error
        verdict = await self._verdict(fields, sender)
        if verdict.backend not in {"", self._backend}:  # the engine keeps the backend of its first grammar
            self._backend = self._backend or verdict.backend
            verdict = await self._verdict(fields, sender)
        if verdict.error:
            raise ApiError(ErrorCode.INVALID_VALUE, f"The grammar cannot be used: {verdict.error}", FIELD)
        structured._backend = verdict.backend  # noqa: SLF001 - vLLM's own check would set it
        structured._backend_was_auto = verdict.was_auto  # noqa: SLF001 - likewise
        if verdict.grammar is not None:
            structured.choice, structured.grammar = None, verdict.grammar

    async def _verdict(self, fields: dict[str, Any], sender: str) -> GrammarVerdict:
        """Return a grammar's cached verdict, or that of its compilation, which all who wait for it share."""
        key = hashlib.sha256(msgspec.msgpack.encode([self._backend, fields])).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            return verdict
        compiling = self._compiling.get(key)
        if compiling is None:
            job = GrammarJob(fields, self._backend, self._cpu_s, self._memory)
            slot = self._slots.request(sender, key)  # refused by this tenant's share only
            task = asyncio.create_task(self._compile_and_cache(job, key, slot), name="grammar")
            task.add_done_callback(lambda _: slot.release())  # also if the task never started
            compiling = self._compiling[key] = _Compiling(task)
        compiling.num_waiting += 1
        try:
            return await asyncio.shield(compiling.task)
        finally:
            compiling.num_waiting -= 1
            if not compiling.num_waiting:  # the last waiter has left, or the task is done
                compiling.task.cancel()
                del self._compiling[key]

    async def _compile_and_cache(self, job: GrammarJob, key: bytes, slot: Slot) -> GrammarVerdict:
        """Compile a grammar once its slot is granted; a process that has ended is replaced once."""
        await slot.wait_granted()
        try:
            verdict = await self._compile(job)
        except OSError:
            await self.close()  # a new process is started for the second attempt
            try:
                verdict = await self._compile(job)
            except OSError as error:
                logger.exception("grammars cannot be compiled")
                raise internal_error() from error
        self._verdicts[key] = verdict
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _compile(self, job: GrammarJob) -> GrammarVerdict:
        """Return a forked process's verdict on a grammar.

        Raises ApiError ``queue_full`` if the machine is too busy, OSError if no process can be started.
        """
        async with await self._fork_child() as child:
            try:
                answer = await child.answer(msgspec.msgpack.encode(job), job.max_cpu_s * _WALL)
            except TimeoutError as error:
                raise ApiError(
                    ErrorCode.QUEUE_FULL,
                    "The machine is too busy to compile the grammar; send it again later.",
                ) from error
        if answer:
            return msgspec.msgpack.decode(answer, type=GrammarVerdict)
        return GrammarVerdict(
            error=f"it takes more than {job.max_cpu_s} s or {job.max_bytes} bytes to compile; "
            "make it simpler, or check the answer afterwards"
        )

    async def _fork_child(self) -> _Child:
        """Have the process fork one that compiles one grammar, connected by a socket of its own."""
        async with self._forking:
            orders = self._orders or await self._start_process()
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(orders, [FORK], [theirs.fileno()])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            (pid,) = PID.unpack(await reader.readexactly(PID.size))
            return _Child(pid, reader, writer)
        except (asyncio.IncompleteReadError, ProcessLookupError) as error:
            writer.close()
            raise ConnectionResetError("the process that compiles grammars has ended") from error
        except BaseException:
            writer.close()  # closing the socket ends the child
            raise

    async def _start_process(self) -> socket.socket:
        """Start the process that forks, wait until it has loaded vLLM, and return the socket for orders."""
        if self._setup is None:
            raise ApiError(ErrorCode.STARTING, "The engine is loading the model; try again shortly.")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", grammar_process.__name__, str(theirs.fileno()),
                msgspec.json.encode(self._setup).decode(), pass_fds=[theirs.fileno()],
                env=self._environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        ours.setblocking(False)  # noqa: FBT003 - the library's
        ready = b""
        try:
            async with asyncio.timeout(_START_S):
                ready = await asyncio.get_running_loop().sock_recv(ours, len(READY))
        finally:
            if ready != READY:
                ours.close()
                await self.close()
        if ready != READY:
            raise ConnectionResetError("the process that compiles grammars did not start; its error is above")
        self._orders = ours
        return ours


@dataclasses.dataclass(slots=True)
class _Compiling:
    task: asyncio.Task[GrammarVerdict]
    num_waiting: int = 0


class _Child:
    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._descriptor = os.pidfd_open(pid)
        self._reader = reader
        self._writer = writer

    async def answer(self, job: bytes, timeout_s: float) -> bytes:
        """Return the complete answer; empty if the process exceeded its limits; raises TimeoutError."""
        self._writer.write(job)
        self._writer.write_eof()
        async with asyncio.timeout(timeout_s):
            try:
                return await self._reader.read()
            except ConnectionError:
                return b""

    async def __aenter__(self) -> _Child:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        os.close(self._descriptor)


Accept = Callable[[StructuredOutputsParams, str], Awaitable[None]]


async def read_accepted(model: type[Any], body: JsonObject, accept: Accept, tenant: str) -> Any:
    """Return a body as vLLM's request; raises ApiError.

    Grammars that vLLM compiles while it validates the request are accepted first.
    """
    tags = _structural_tags(body)
    for tag in tags:
        await accept(StructuredOutputsParams(structural_tag=tag), tenant)
    request = await read_request(model, body, in_thread=bool(tags))
    structured = _compiled_first(request) if body.get("tools") else None
    if structured is not None:
        await accept(dataclasses.replace(structured), tenant)
    return request


def _structural_tags(body: Mapping[str, Any]) -> list[str]:
    structured, response_format = body.get("structured_outputs"), body.get("response_format")
    tags = [structured.get("structural_tag")] if isinstance(structured, dict) else []
    if isinstance(response_format, dict) and response_format.get("type") == "structural_tag":
        tags.append(json.dumps(response_format))
    return [tag for tag in tags if isinstance(tag, str)]


def _compiled_first(request: Any) -> StructuredOutputsParams | None:
    """Return the grammar of a request with tools, which vLLM compiles early; None if none, or invalid."""
    with contextlib.suppress(ValueError, TypeError, AssertionError, VLLMClientError):
        structured: StructuredOutputsParams | None = request.extract_structured_outputs()
        return structured
    return None


def setup_of(engine: InterventionAsyncLLM) -> GrammarSetup:
    """Return what the process that compiles grammars needs to know of an engine."""
    model, config = engine.vllm_config.model_config, engine.vllm_config.structured_outputs_config
    return GrammarSetup(
        tokenizer=str(model.tokenizer),
        tokenizer_mode=str(model.tokenizer_mode),
        revision=model.tokenizer_revision or "",
        trust_remote_code=bool(model.trust_remote_code),
        vocab_size=model.get_vocab_size(),
        model_type=str(model.hf_config.model_type),
        is_diffusion=bool(model.is_diffusion),
        config=dataclasses.asdict(config),
    )
