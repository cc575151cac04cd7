"""Encoding of ``VLLM``'s traces for a server: each invoke is a request of the server's engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from transformers import AutoTokenizer

from nnsight_engine.interleaving.shared_variables import Barrier
from nnsight_engine.remote_backend.messages import SentEdit, SentInvoke, fingerprint_of_folder, name_of
from nnsight_engine.remote_backend.sending.outgoing_trace import Dialect, Inputs
from nnsight_engine.serialization import DATA_ONLY, EncodeError, Resolve
from nnsight_engine.vllm_backend.traces.caches import HOME_CLASSES
from nnsight_engine.vllm_backend.traces.points import place_named, reference_of

if TYPE_CHECKING:
    from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
    from nnsight_engine.vllm_backend.prompts import Request
    from nnsight_engine.vllm_backend.vllm import VLLM


@dataclasses.dataclass(frozen=True)
class RemoteChoice:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class RemoteOutput:
    """A request's output, as ``tracer.result`` returns it, with fields of vLLM's ``RequestOutput``.

    Attributes:
        prompt: The prompt's text, if it was given as text.
        prompt_token_ids: The prompt's tokens.
        outputs: The completions.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[RemoteChoice]


class VLLMDialect(Dialect):
    name = "vllm"
    policy = DATA_ONLY.allowing((*HOME_CLASSES, RemoteChoice, RemoteOutput))

    def __init__(self, model: VLLM, name: str, revision: str = "") -> None:
        self.model = name_of(name)
        self.revision = revision
        self._envoy = model
        self.fingerprint = _fingerprint(name)

    def inputs(self, tracer: InterleavingTracer) -> Inputs:
        """Return the trace's requests, and the code of their edits, each once, as parts of the message."""
        if tracer.validate:
            raise EncodeError("validate=True is not for traces of VLLM on a server: leave it out")
        traced: VLLM = tracer.model  # type: ignore[assignment] # or a copy with its own edits
        inputs = tracer.batcher.inputs
        assert inputs is not None  # noqa: S101 - there is at least one request
        requests: tuple[Request, ...] = inputs[0]
        shared = {**tracer.batcher.shared_kwargs}
        if shared.pop("lora_request", None) or any(request.lora_request for request in requests):
            raise EncodeError(
                "lora_request= is not for a server, whose adapters have names of their own: trace "
                "VLLM(name, remote=...) with the adapter's name"
            )
        edits = shared.pop("edits", None)
        parts: dict[str, bytes] = {}
        invokes = []
        for request in requests:
            chosen = traced.own_edits.chosen(edits if request.edits is None else request.edits)
            parts |= {edit.digest: edit.data for edit in chosen}
            # Part 0 has the blocks.
            numbers = {digest: index for index, digest in enumerate(parts, start=1)}
            invokes.append(
                SentInvoke(
                    prompt=_prompt(request.prompt),
                    sampling=_sampling(request, shared),
                    edits=[
                        SentEdit(name=edit.name, digest=edit.digest, part=numbers[edit.digest])
                        for edit in chosen
                    ],
                )
            )
        return Inputs(invokes=invokes, parts=list(parts.values()))

    def reference(self, value: Any, barriers: list[Barrier]) -> tuple[str, ...] | None:
        return reference_of(value, self._envoy, barriers)

    def resolver(self, outputs: Mapping[str, Any]) -> Resolve:
        """Return a function that looks up what a result refers to: a request's output, or an envoy."""

        def resolve(reference: tuple[str, ...]) -> Any:
            kind, name = reference
            if kind == "result":
                return _output(name, outputs)
            return place_named(self._envoy, kind, name)

        return resolve


@functools.cache
def _fingerprint(name: str) -> str:
    """Return the fingerprint of a folder; empty for a repository, which its name identifies."""
    return fingerprint_of_folder(name) if Path(name).is_dir() else ""


def local_tokenizer(model: VLLM) -> Any:
    """Return the tokenizer of a model that runs on a server, loaded from files on this machine."""
    dialect = model.remote_dialect()
    return AutoTokenizer.from_pretrained(dialect.model, revision=dialect.revision or None)


def _prompt(prompt: Mapping[str, Any]) -> str | list[int]:
    known = {name: value for name, value in prompt.items() if value is not None}
    if list(known) == ["prompt"]:
        return str(known["prompt"])
    if list(known) == ["prompt_token_ids"]:
        return [int(token) for token in known["prompt_token_ids"]]
    raise EncodeError(
        f"a prompt is sent to a server as text or as token ids, and this one has {', '.join(known)}"
    )


def _sampling(request: Request, shared: Mapping[str, Any]) -> dict[str, Any]:
    params, named = request.sampling_over(shared)
    if params is not None and not isinstance(params, msgspec.Struct):
        raise EncodeError(f"sampling_params= takes vLLM's SamplingParams, got {type(params).__name__}")
    try:
        plain: dict[str, Any] = {} if params is None else msgspec.to_builtins(params)
        plain |= msgspec.to_builtins(named)
    except TypeError as error:
        raise EncodeError(f"a sampling parameter cannot be serialized: {error}") from error
    return {name: value for name, value in plain.items() if not name.startswith("_")}


def _output(name: str, outputs: Mapping[str, Any]) -> RemoteOutput:
    """Return a request's output with its choices, from ``outputs`` by ``"<request>/<choice>"``."""
    choices = [(key, plain) for key, plain in outputs.items() if key.partition("/")[0] == name]
    if not choices:
        raise LookupError(f"the server returned no output of request {name}")
    first = choices[0][1]
    return RemoteOutput(
        prompt=first["prompt"],
        prompt_token_ids=list(first["prompt_token_ids"]),
        outputs=[
            RemoteChoice(
                index=int(key.partition("/")[2]),
                text=plain["text"],
                token_ids=list(plain["token_ids"]),
                finish_reason=plain["finish_reason"],
            )
            for key, plain in choices
        ],
    )
