"""An API call with declarative interventions; each prompt is compiled separately, for its positions."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD, Intervention, PromptOperations
from api_schemas.operations import Stop
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.collect.results import CollectedResults
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.compile.scope import TokenOf
from nnsight_engine.plans.compile.tensors import CombinedVectors
from nnsight_engine.plans.request_plan import (
    NO_MARKERS,
    NO_MEDIA,
    PLAN_KEY,
    AnswerMarkers,
    CompiledRequest,
    PromptMedia,
    Spans,
)
from nnsight_engine.vllm_backend.compat import add_entries

MAX_SENT_BYTES: Final = 128 * 2**20
"""Most bytes of the tensors of a call that are sent to the engine."""


@dataclasses.dataclass(slots=True)
class PromptEntry:
    """One prompt of a call while it runs; ``key`` is independent of vLLM's request id.

    Attributes:
        collectors: One for each choice.
        token_ids: Generated token ids delivered so far, by choice.
    """

    key: str
    compiled: CompiledRequest
    collectors: list[RequestCollector]
    token_ids: list[list[int]]
    media: PromptMedia = NO_MEDIA

    def deliver(self, outputs: Sequence[Any], *, cumulative: bool) -> None:
        """Record the tokens of an output's choices; ``cumulative`` outputs repeat those before."""
        for output in outputs:
            ids = self.token_ids[output.index]
            if cumulative:
                ids.clear()
            ids.extend(output.token_ids)

    def raise_failure(self) -> None:
        for collector in self.collectors:
            if collector.failure is not None:
                failure = collector.failure
                raise ApiError(ErrorCode(failure.code), failure.message, "interventions")


class InterventionCall:
    """The operations of one API call, which are compiled prompt by prompt, as vLLM asks for them."""

    def __init__(
        self,
        ops: tuple[Intervention, ...],
        spec: ModelSpec,
        token_of: TokenOf,
        *,
        stream: bool,
        markers: AnswerMarkers = NO_MARKERS,
        max_text_bytes: int = 0,
    ) -> None:
        """Take a call's operations; ``token_of`` gives the id of a text's single token.

        Numbers with more JSON than ``max_text_bytes`` are answered as a file.
        """
        self.ops = ops
        self._max_text_bytes = max_text_bytes
        self._by_prompt = PromptOperations(ops)
        self.entries: list[PromptEntry] = []
        self.failure: ApiError | None = None
        self._spec = spec
        self._token_of = token_of
        self._stream = stream
        self._markers = markers
        self._combined = CombinedVectors(spec)
        self._num_bytes = 0

    def prepare(self) -> None:
        """Compute all that needs no prompt; may take seconds, on any thread. Raise ApiError if invalid."""
        self._combined.prepare(self.ops)

    def op_names(self, prompt: int) -> list[str]:
        return [op.op for _, op in self._by_prompt.of(prompt)]

    def operations(self, choice: int, num_choices: int) -> list[Intervention]:
        return [op for _, op in self._by_prompt.of(choice // num_choices)]

    @property
    def spent_s(self) -> float:
        """Seconds that its operations took in the engine, as far as they were reported."""
        return sum(collector.spent_s for entry in self.entries for collector in entry.collectors)

    def compile(
        self, prompt_token_ids: Sequence[int], media: PromptMedia, params: SamplingParams | PoolingParams
    ) -> CompiledRequest:
        """Return the plan for the next prompt; raise ApiError if the operations do not fit it."""
        generates = isinstance(params, SamplingParams)
        num_choices = params.n if generates else 1
        declared = self._by_prompt.of(len(self.entries))
        for index, op in () if generates else declared:
            if isinstance(op, Stop):
                raise ApiError(
                    ErrorCode.UNSUPPORTED_COMBINATION,
                    "`stop` ends an answer, and nothing is generated here; use `flag`.",
                    f"{FIELD}.{index}",
                )
        compiled = compile_request(
            [op for _, op in declared],
            spec=self._spec,
            prompt_token_ids=prompt_token_ids,
            max_tokens=(params.max_tokens if generates else None) or 1,
            token_of=self._token_of,
            stream=self._stream,
            markers=self._markers,
            media=media,
            prompt_logprobs=generates and params.prompt_logprobs is not None,
            indexes=[index for index, _ in declared],
            combined=self._combined,
            max_text_bytes=self._max_text_bytes,
        )
        # vLLM sends each choice to the engine by itself.
        self._num_bytes += num_choices * sum(len(tensor.data) for tensor in compiled.tensors.values())
        if self._num_bytes > MAX_SENT_BYTES:
            raise ApiError(
                ErrorCode.TENSOR_TOO_LARGE,
                "The vectors, values and detectors of a request, once for each choice of each prompt, may "
                f"have {MAX_SENT_BYTES} bytes together, and these have at least {self._num_bytes}; send "
                "fewer choices or prompts at a time.",
                FIELD,
            )
        return compiled

    def take_part(self, choice: int, num_choices: int) -> CollectedResults | None:
        """Return the results that belong to the tokens delivered so far for a choice of the answer."""
        entry, index = self._locate(choice, num_choices)
        with _as_api_error():
            return entry.collectors[index].take_part(len(entry.token_ids[index]))

    def take_final(self, choice: int, num_choices: int) -> CollectedResults:
        """Return all results of a choice of the answer, which has ended."""
        entry, index = self._locate(choice, num_choices)
        with _as_api_error():
            return entry.collectors[index].take_final(entry.token_ids[index])

    def stopped(self, num_choices: int) -> set[int]:
        """Return the choices that an operation has stopped, as numbers over all prompts."""
        return {
            prompt * num_choices + index
            for prompt, entry in enumerate(self.entries)
            for index, collector in enumerate(entry.collectors)
            if collector.is_stopped
        }

    def images(self, choice: int, num_choices: int) -> tuple[Spans, ...]:
        entry, _ = self._locate(choice, num_choices)
        return entry.media.images

    def _locate(self, choice: int, num_choices: int) -> tuple[PromptEntry, int]:
        """Return the entry of a choice's prompt, and the choice's index in it."""
        # vLLM numbers choices prompt by prompt.
        prompt, index = divmod(choice, num_choices)
        if prompt >= len(self.entries):
            raise ApiError(
                ErrorCode.INTERNAL,
                "the engine answered a prompt that it was never given interventions for; "
                "nothing was returned, please report this",
            )
        return self.entries[prompt], index


@contextlib.contextmanager
def _as_api_error() -> Iterator[None]:
    try:
        yield
    except InterventionError as error:
        raise ApiError(ErrorCode(error.code), error.message, "interventions") from error


def salted(compiled: CompiledRequest, salt: str | None, secret: str) -> str | None:
    """Return the prefix cache salt: a hex digest that is unique to each set of writes.

    Keys and values with a write must never serve a request without it, nor the reverse. Fingerprints are
    public and a plain request may send any salt: without ``secret`` it could fill the cache entries of a
    steered one.
    """
    if not compiled.plan.fingerprint:
        return salt
    parts = [secret, compiled.plan.fingerprint, salt or ""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def engine_entry(compiled: CompiledRequest, key: str) -> dict[str, Any]:
    """Return the ``extra_args`` entry for the worker: plain values and bytes only."""
    tensors = {
        name: (content.dtype, list(content.shape), content.data) for name, content in compiled.tensors.items()
    }
    return {"key": key, "plan": compiled.plan.encode(), "tensors": tensors}


def prepare_params(params: SamplingParams | PoolingParams, compiled: CompiledRequest, key: str) -> None:
    """Add the compiled operations to a request's parameters, for the scheduler and the worker."""
    add_entries(params, {PLAN_KEY: engine_entry(compiled, key)})
    if compiled.reads_prompt:
        # A cached prefix does not run through the model, so its rows could not be read.
        params.skip_reading_prefix_cache = True
