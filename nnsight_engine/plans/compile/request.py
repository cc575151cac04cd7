"""Compiles a request's operations into the plan that the worker runs; the only module that builds one.

Every error that can be detected before the first step is raised here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.interventions import FIELD, Intervention, Operation
from api_schemas.operations import Trace
from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.compile.conditions import check_labels, num_label_bytes
from nnsight_engine.plans.compile.operations import OperationCompiler
from nnsight_engine.plans.compile.scope import CompileScope, MatchedPositions, TokenOf, leaf_of
from nnsight_engine.plans.compile.tensors import CombinedVectors
from nnsight_engine.plans.records import feature_row_bytes, text_row_bytes
from nnsight_engine.plans.request_plan import (
    LOGITS,
    NO_MARKERS,
    NO_MEDIA,
    AnswerMarkers,
    CompiledRequest,
    OperationKind,
    PlannedOp,
    PromptMedia,
    RequestPlan,
    WhereRule,
)
from nnsight_engine.plans.where import last_position
from nnsight_engine.plans.work import MAX_WEIGHTS, WorkByPosition, weights_of, works_of

_READING_OPERATIONS: Final = frozenset(
    {"capture", "probe", "logit_lens", "detect", "features", "stop", "flag"}
)
MAX_PROMPT_TESTS: Final = 64
"""Maximum number of tests of all conditions of a prompt."""

_PAIR_BYTES: Final = 8
"""Bytes of a token in a lens result: an id or a rank, and a log-probability, four bytes each."""


def compile_request(  # noqa: PLR0913 - keywords but the first
    ops: Sequence[Intervention],
    *,
    spec: ModelSpec,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    token_of: TokenOf,
    stream: bool,
    markers: AnswerMarkers = NO_MARKERS,
    media: PromptMedia = NO_MEDIA,
    prompt_logprobs: bool = False,
    indexes: Sequence[int] | None = None,
    combined: CombinedVectors | None = None,
    max_text_bytes: int = 0,
) -> CompiledRequest:
    """Resolve a request's operations against the model and one prompt; called once for each prompt.

    ``combined`` is shared by a request's prompts. Numbers with more JSON than ``max_text_bytes`` are returned
    in a file, without labels. ApiErrors have the field's path; a trace is a TypeError.
    """
    if any(isinstance(op, Trace) for op in ops):
        raise TypeError("a trace has no plan: its request brings it as code")
    numbers = range(len(ops)) if indexes is None else indexes
    declared = {index: op for index, op in zip(numbers, ops, strict=True) if not isinstance(op, Trace)}
    scope = CompileScope(spec, prompt_token_ids, max_tokens, token_of, markers, media)
    names = _names(declared)
    compiler = OperationCompiler(scope, combined or CombinedVectors(spec))
    planned: list[PlannedOp] = []
    needs_prompt = False
    num_bytes = num_tests = 0
    num_prompt: dict[int, int] = {}
    for index, op in declared.items():
        param = f"{FIELD}.{index}"
        plan_op, matched = compiler.compile(op, names[index], param)
        if prompt_logprobs:
            _check_beside_logprobs(op.op, plan_op, matched, param)
        planned.append(plan_op)
        num_tests += 0 if plan_op.when is None else len(plan_op.when.tests)
        if num_tests > MAX_PROMPT_TESTS:
            raise ApiError(
                ErrorCode.TOO_MANY_OPERATIONS,
                f"All conditions of a prompt together may have {MAX_PROMPT_TESTS} tests.",
                f"{param}.when",
            )
        needs_prompt |= _needs_prompt(plan_op, matched)
        num_bytes += _prompt_bytes(plan_op, matched, spec)
        num_prompt[index] = matched.num_prompt
    if sum(map(text_row_bytes, planned)) * scope.num_positions <= max_text_bytes:
        _check_labels(declared, names, num_prompt, spec)
    works = works_of(planned, compiler.tensors, spec, scope.num_positions)
    num_bytes += _key_bytes(planned, scope.prompt_len, spec)
    if num_bytes > spec.max_capture_bytes:
        raise ApiError(
            ErrorCode.CAPTURE_TOO_LARGE,
            f"One request may capture {spec.max_capture_bytes} bytes, the prompt alone asks for {num_bytes}; "
            "capture fewer points or positions, or use `reduce`.",
            FIELD,
        )
    plan = RequestPlan(
        prompt_len=scope.prompt_len,
        ops=tuple(planned),
        stream=stream,
        fingerprint=_fingerprint(planned, scope),
        answer=scope.answer if any(op.where.names_part for op in planned) else None,
        images=scope.images_in_encoder() if any(op.is_in_encoder for op in planned) else (),
        num_positions=scope.num_positions if any(_has_slots(op) for op in planned) else 0,
        dictionaries=compiler.features.paths,
        works=works,
        weights=weights_of(planned, compiler.tensors, spec) if works else 0.0,
    )
    if works:
        _check_work(plan, prompt_token_ids, spec)
    return CompiledRequest(plan, compiler.tensors, needs_prompt)


def _check_beside_logprobs(name: str, op: PlannedOp, matched: MatchedPositions, param: str) -> None:
    """Refuse what a request for the prompt's log-probabilities cannot have beside them."""
    if not op.reads and LOGITS in op.sites:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"`{name}` at {LOGITS} changes what is sampled, not the prompt's log-probabilities; ask "
            "for one of the two.",
            param,
        )
    if op.kind is OperationKind.STOP and matched.num_prompt:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "A `stop` in the prompt leaves no log-probabilities of it; name `phase` generated.",
            f"{param}.where",
        )


def _needs_prompt(op: PlannedOp, matched: MatchedPositions) -> bool:
    """Return whether an operation needs the whole prompt computed, without a hit of the prefix cache."""
    # A mean is taken over prompt rows, which would not be computed on a prefix cache hit.
    if matched.num_prompt > 0 and (op.reads or op.kind is OperationKind.MEAN):
        return True
    # What a condition decided at a cached position is not known.
    if op.when is not None and (matched.num_prompt > 0 or op.when.has_history):
        return True
    # Generated positions attend to the prompt, whose keys are seen only when they are computed.
    return op.captures_patterns


def _names(ops: Mapping[int, Operation]) -> dict[int, str]:
    """Return the key of each operation's result; names that the request gave are unique, also of writes."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for index, op in ops.items():
        name = op.name if op.name is not None else f"{op.op}_{index}"
        has_result = op.op in _READING_OPERATIONS
        if has_result or op.name is not None:
            if name in taken:
                raise ApiError(
                    ErrorCode.DUPLICATE_NAME,
                    f"Names must differ within a request, {clip(name)!r} is used twice; give one of them "
                    "another `name` (by default the operation and its index, capture_2).",
                    f"{FIELD}.{index}.name",
                )
            taken.add(name)
        names[index] = name
    return names


def _prompt_bytes(op: PlannedOp, matched: MatchedPositions, spec: ModelSpec) -> int:
    """Return the bytes of an operation's results at the prompt positions that it matches."""
    num_prompt = matched.num_prompt
    match op.kind:
        case OperationKind.CAPTURE:
            # A mean is kept in float32; a reduced capture is one row for any number of positions.
            num_rows = num_prompt if op.reduce == "none" else min(num_prompt, 1)
            item_bytes = ITEM_BYTES["float32" if op.reduce == "mean" else op.dtype]
            width = sum(leaf_of(site, spec).width for site in op.sites)
            if op.captures_patterns:
                # Every row is padded to the length of the last, with one number per key.
                width *= matched.last_prompt + 1
            return num_rows * width * item_bytes
        case OperationKind.PROBE:
            return num_prompt * len(op.sites) * ITEM_BYTES["float32"]
        case OperationKind.LENS:
            return num_prompt * len(op.sites) * (op.top_k + len(op.targets)) * _PAIR_BYTES
        case OperationKind.DETECT:
            return num_prompt * ITEM_BYTES["float32"]
        case OperationKind.FEATURES:
            return num_prompt * feature_row_bytes(op)
        case _:
            return num_prompt if op.when is not None else 0


def _check_labels(
    ops: Mapping[int, Operation], names: Mapping[int, str], num_prompt: Mapping[int, int], spec: ModelSpec
) -> None:
    """Refuse labels beyond the limit; ``num_prompt``: how many prompt positions each operation matches."""
    num_bytes = 0
    for index, op in ops.items():
        num_bytes += num_label_bytes(op) * num_prompt[index]
        check_labels(num_bytes, spec.max_capture_bytes, names[index])


def _check_work(plan: RequestPlan, prompt_ids: Sequence[int], spec: ModelSpec) -> None:
    """Refuse (``too_much_work``) more weights, or more work at a position, than one step may have."""
    if plan.weights > MAX_WEIGHTS:
        raise ApiError(
            ErrorCode.TOO_MUCH_WORK,
            "The dictionaries and detectors of this request, counted for each operation, have "
            f"{plan.weights:.0f} times as many weights as the model, and {MAX_WEIGHTS:g} times is allowed; "
            "use fewer operations, or smaller dictionaries or detectors.",
            FIELD,
        )
    if sum(plan.works.values()) <= spec.max_work and not plan.needs_whole_prompt:
        return
    work = WorkByPosition(plan, prompt_ids)
    if plan.needs_whole_prompt and work.between(0, plan.prompt_len) > spec.max_num_batched_tokens:
        raise ApiError(
            ErrorCode.TOO_MUCH_WORK,
            "`ablate` by mean needs the whole prompt in one step, and with the work of the other "
            "operations that is too long for one; send those in a request of their own.",
            FIELD,
        )
    if work.most > spec.max_work:
        raise ApiError(
            ErrorCode.TOO_MUCH_WORK,
            f"At one position the operations of this request take {work.most:.0f} times as long as the "
            f"model, and this server allows {spec.max_work:g} times (NNSIGHT_ENGINE_MAX_WORK); name fewer "
            "layers, features or targets at the same position, or send several requests.",
            FIELD,
        )


def _has_slots(op: PlannedOp) -> bool:
    return op.when is not None and op.when.has_slots


def _key_bytes(ops: Sequence[PlannedOp], prompt_len: int, spec: ModelSpec) -> int:
    """Return the bytes of the prompt's keys that patterns need; operations at one layer share its keys."""
    num_keys: dict[int, int] = {}
    for op in ops:
        if not op.captures_patterns:
            continue
        last = last_position(op.where, prompt_len)
        needed = prompt_len if last is None else min(prompt_len, last + 1)
        for site in op.sites:
            num_keys[site.layer] = max(num_keys.get(site.layer, 0), needed)
    num_values = (
        count * leaf.width for layer, count in num_keys.items() if (leaf := spec.leaf("attn.k", layer))
    )
    return sum(num_values) * ITEM_BYTES[spec.dtype]


def _fingerprint(planned: list[PlannedOp], scope: CompileScope) -> str:
    """Return the hash that separates prefix cache entries with different writes.

    Two requests with the same fingerprint must write the same values at every position up to which their
    tokens agree. So the prompt's length is hashed if a rule has a phase or names a part of the answer, or a
    condition is over the prompt; the prompt itself if a mean makes early positions depend on later ones.
    """
    writes = tuple(op for op in planned if not op.reads)
    if not writes:
        return ""
    digest = hashlib.sha256(msgspec.msgpack.encode(writes))
    if any(
        (_has_phase(op.where) and not op.is_in_encoder) or op.where.names_part or _is_over_prompt(op)
        for op in writes
    ):
        digest.update(f"prompt_len:{scope.prompt_len}".encode())
    if any(op.kind is OperationKind.MEAN for op in writes):
        digest.update(b"prompt:")
        digest.update(scope.prompt_ids.tobytes())
        digest.update(scope.media.digest.encode())
    return digest.hexdigest()


def _is_over_prompt(op: PlannedOp) -> bool:
    return op.when is not None and any(test.over == "prompt" for test in op.when.tests)


def _has_phase(rule: WhereRule) -> bool:
    return rule.phase != "all" or (rule.exclude is not None and _has_phase(rule.exclude))
