"""Compiles one operation; checks over several operations (names, total size) are in ``request``.

The numbers of a ``steer`` are brought to the form that kernels take, and checked against the model's dtype.
"""

from __future__ import annotations

from typing import Final

import msgspec

from api_schemas.conditions import When
from api_schemas.errors import ApiError, ErrorCode, excerpt
from api_schemas.interventions import Operation
from api_schemas.operations import (
    Ablate,
    Capture,
    Detect,
    Feature,
    Features,
    Flag,
    LogitLens,
    Patch,
    Probe,
    Steer,
    Stop,
    Write,
)
from api_schemas.points import ENCODER_BLOCK, VISION
from nnsight_engine.core.model_spec import EXPERTS, PATTERN, ROUTER, STATE, ModelSpec
from nnsight_engine.plans.compile.conditions import ConditionCompiler, FeatureCompiler
from nnsight_engine.plans.compile.scope import (
    CompileScope,
    MatchedPositions,
    compile_encoder_rows,
    compile_where,
    leaf_of,
    resolve_lens_sites,
    resolve_positions,
    resolve_sites,
)
from nnsight_engine.plans.compile.tensors import (
    CombinedVectors,
    check_directions,
    check_experts,
    check_float32,
    check_patch,
    check_range,
    check_rows,
    check_within,
    read_tensor,
    read_weights,
    reorder_rows,
)
from nnsight_engine.plans.request_plan import (
    SAMPLES,
    OperationKind,
    PlannedOp,
    PlannedSite,
    TensorData,
    WhereRule,
)
from nnsight_engine.plans.where import may_generate

_NEED_DIRECTION: Final = frozenset({"norm_match", "project_out", "clamp", "affine"})


def with_effect(planned: PlannedOp, op: Steer, tensor: TensorData, dtype: str, param: str) -> PlannedOp:
    """Return a planned ``steer`` with its kind and its numbers.

    Raises ``invalid_value`` for a vector without a direction, ``not_finite`` beyond a dtype.
    """
    field = f"{param}.{'vector' if op.vectors is None else 'vectors'}"
    is_subspace = op.mode == "project_out" and op.vectors is not None
    if op.mode in _NEED_DIRECTION and not is_subspace:
        check_directions(tensor, op.mode, field)
    scale = check_float32(1.0 if op.scale is None else op.scale, f"{param}.scale")
    match op.mode:
        case "add" | "replace":
            check_range(tensor, scale, dtype, field if abs(scale) <= 1 else f"{param}.scale")
            kind = OperationKind(op.mode)
        case "norm_match":
            kind = OperationKind.NORM_MATCH
        case "project_out":
            kind = OperationKind.SUBSPACE if is_subspace else OperationKind.PROJECT
        case "clamp" | "affine":
            return _projected(planned, op, scale, dtype, param)
    return msgspec.structs.replace(planned, kind=kind, scale=scale)


def _projected(planned: PlannedOp, op: Steer, scale: float, dtype: str, param: str) -> PlannedOp:
    """Return ``clamp`` or ``affine`` as PROJECT: the component ``c`` becomes ``c - removed * c + offset``."""
    removed, offset = 1.0, scale
    if op.mode == "affine":
        removed = 1.0 - check_float32(1.0 if op.gain is None else op.gain, f"{param}.gain")
        offset = check_within(op.offset or 0.0, dtype, f"{param}.offset")
    elif op.has_bounds:
        removed, offset = 0.0, 0.0
    else:
        check_within(scale, dtype, f"{param}.scale")
    low, high = (
        None if bound is None else check_within(bound, dtype, f"{param}.{field}")
        for field, bound in (("low", op.low), ("high", op.high))
    )
    return msgspec.structs.replace(
        planned, kind=OperationKind.PROJECT, scale=removed, offset=offset, low=low, high=high
    )


_ENCODER: Final = ENCODER_BLOCK.removesuffix("output")
_ABLATIONS: Final = {"zero": OperationKind.ZERO, "mean": OperationKind.MEAN, "vector": OperationKind.REPLACE}


class OperationCompiler:
    def __init__(self, scope: CompileScope, combined: CombinedVectors) -> None:
        self.tensors: dict[str, TensorData] = {}
        self._scope = scope
        self._combined = combined
        self._spec: ModelSpec = scope.spec
        self.features = FeatureCompiler(scope.spec)
        self._conditions = ConditionCompiler(scope.spec, self.tensors, self.features)

    def compile(self, op: Operation, name: str, param: str) -> tuple[PlannedOp, MatchedPositions]:
        """Return the planned operation, and which prompt positions it matches; may raise ApiError."""
        if self._is_in_encoder(op, param):
            matched = compile_encoder_rows(op.where, self._scope, f"{param}.where")
        else:
            op = self._on_images(op, param)
            matched = compile_where(op.where, self._scope, f"{param}.where")
        planned = self._planned(op, matched, name, param)
        if isinstance(op, Write) and op.when is not None:
            planned = self._conditional(planned, op.when, matched, f"{param}.when")
        return planned, matched

    def _planned(self, op: Operation, matched: MatchedPositions, name: str, param: str) -> PlannedOp:
        """Plan an operation, a write without ``when``; ``matched`` is its ``where``, ``name`` its result."""
        match op:
            case Steer():
                planned = self._steer(op, matched, param)
            case Ablate():
                planned = self._ablate(op, matched, param)
            case Patch():
                planned = self._patch(op, matched, param)
            case Capture():
                planned = self._capture(op, matched, name, param)
            case Probe():
                planned = self._probe(op, matched, name, param)
            case LogitLens():
                planned = self._lens(op, matched, name, param)
            case Detect():
                detector = self._conditions.detector(op.detector, f"{param}.detector")
                planned = PlannedOp(OperationKind.DETECT, detector.sites, matched.rule, name, score=detector)
            case Features() | Feature():
                planned = self._on_features(op, matched, name, param)
            case Stop() | Flag():
                when = self._conditions.condition(op.when, (), matched, f"{param}.when")
                sites = (when.last_site(self._spec),)
                planned = PlannedOp(OperationKind(op.op), sites, matched.rule, name, when=when)
        return planned

    def _on_features(
        self, op: Features | Feature, matched: MatchedPositions, name: str, param: str
    ) -> PlannedOp:
        """Plan ``features``, which reads activations into a result, or ``feature``, which changes them."""
        if isinstance(op, Features):
            site, features = self.features.reading(op, param)
            return PlannedOp(OperationKind.FEATURES, (site,), matched.rule, name, features=features)
        site, features = self.features.changing(op, param)
        return PlannedOp(OperationKind.FEATURE, (site,), matched.rule, features=features)

    def _conditional(
        self, planned: PlannedOp, when: When, matched: MatchedPositions, param: str
    ) -> PlannedOp:
        """Return a planned write with its condition."""
        if planned.is_in_encoder:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "The vision encoder runs before any position is computed, so no condition decides there.",
                param,
            )
        condition = self._conditions.condition(when, planned.sites, matched, param)
        return msgspec.structs.replace(planned, when=condition)

    def _is_in_encoder(self, op: Operation, param: str) -> bool:
        """Return whether the operation is in the vision encoder; raise if only some of its points are."""
        points = _points(op)
        inside = [point.startswith(_ENCODER) for point in points]
        if any(inside) and not all(inside):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"{_ENCODER}* has rows for the patches of images; name it in operations of its own.",
                f"{param}.at",
            )
        if not any(inside):
            return False
        if not self._scope.media.images:
            raise self._without_images(points[0], param)
        return True

    def _without_images(self, point: str, param: str) -> ApiError:
        return ApiError(
            ErrorCode.POSITION_OUT_OF_RANGE,
            f"This prompt has no images, and so no {excerpt(point)}.",
            f"{param}.at",
        )

    def _on_images(self, op: Operation, param: str) -> Operation:
        """Return an operation at the rows of images with these as its positions, and any other as it is."""
        points = _points(op)
        if VISION not in points:
            return op
        if len(points) > 1:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"{VISION} has rows at the positions of images only; name it in an operation of its own.",
                f"{param}.at",
            )
        if op.where.images is not None:
            return op
        num_images = len(self._scope.media.images)
        if not num_images:
            raise self._without_images(VISION, param)
        where = op.where.model_copy(update={"images": [*range(num_images)]})
        return op.model_copy(update={"where": where})

    def _steer(self, op: Steer, matched: MatchedPositions, param: str) -> PlannedOp:
        sites = resolve_sites(op.at, op.op, self._spec, f"{param}.at")
        if op.vector is not None:
            tensor = read_tensor(op.vector, f"{param}.vector")
            check_rows(tensor, self._widths(sites), f"{param}.vector")
        else:
            tensor = self._combined.combine(op, sites, param)
        planned = PlannedOp(OperationKind.ADD, sites, matched.rule, tensor=self._keep(tensor))
        return with_effect(planned, op, tensor, self._spec.dtype, param)

    def _ablate(self, op: Ablate, matched: MatchedPositions, param: str) -> PlannedOp:
        sites = resolve_sites(op.at, op.op, self._spec, f"{param}.at")
        widths = self._widths(sites)
        kind = _ABLATIONS[op.method]
        key = ""
        if op.vector is not None:
            tensor = read_tensor(op.vector, f"{param}.vector")
            check_rows(tensor, widths, f"{param}.vector")
            self._check_experts(sites, tensor, f"{param}.vector")
            check_range(tensor, 1.0, self._spec.dtype, f"{param}.vector")
            key = self._keep(tensor)
        if any(site.leaf == EXPERTS for site in sites) and (op.method != "vector" or op.units is not None):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"{EXPERTS} are ids of experts: `ablate` gives all of them with `method` vector, "
                "without `units`.",
                f"{param}.method",
            )
        units = None if op.units is None else _units(op.units, min(widths), f"{param}.units")
        if kind is OperationKind.MEAN and not sites[0].is_in_encoder:
            self._check_mean(matched, param)
        return PlannedOp(kind, sites, matched.rule, tensor=key, units=units)

    def _check_experts(self, sites: tuple[PlannedSite, ...], tensor: TensorData, param: str) -> None:
        """Check ids of experts, if the sites take some: kernels use them as indices."""
        has_ids = [site.leaf == EXPERTS for site in sites]
        if not any(has_ids):
            return
        if not all(has_ids):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"{EXPERTS} are ids of experts: write them in an operation of their own.",
                param,
            )
        routers = [PlannedSite(ROUTER, site.layer) for site in sites]
        check_experts(tensor, min(self._widths(tuple(routers))), param)

    def _check_mean(self, matched: MatchedPositions, param: str) -> None:
        limit = self._spec.max_num_batched_tokens
        if self._scope.prompt_len > limit:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"`ablate` by mean needs the whole prompt in one step, of at most {limit} tokens; this "
                f"prompt has {self._scope.prompt_len}. Shorten it, or capture the mean and ablate by "
                "`vector`.",
                f"{param}.method",
            )
        if matched.num_prompt == 0:
            raise ApiError(
                ErrorCode.CONTRADICTORY_WHERE,
                "`ablate` by mean takes the mean over the prompt positions that `where` names, and it names "
                "none; name some, or ablate by `vector`.",
                f"{param}.where",
            )

    def _patch(self, op: Patch, matched: MatchedPositions, param: str) -> PlannedOp:
        where, path = op.where, f"{param}.where"
        unusable = (where.range, where.tokens, where.scope, where.exclude)
        if any(clause is not None for clause in unusable) or (where.positions and where.images):
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                "`patch` has one row of `values` per position, so its `where` takes either `positions` or "
                "`images`, and `phase` only.",
                path,
            )
        in_encoder = _points(op)[0].startswith(_ENCODER)
        if where.images and in_encoder:
            positions = self._scope.encoder_rows(where.images, f"{path}.images")
        elif where.images:
            positions = self._scope.image_positions(where.images, f"{path}.images")
        else:
            positions = resolve_positions(
                where.positions or [], where.phase, self._scope, f"{path}.positions"
            )
        if len(set(positions)) < len(positions):
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"`patch` may name a position once; {excerpt(positions)} has one twice (negatives resolved).",
                f"{path}.positions",
            )
        if where.phase == "generated" and min(positions) < self._scope.prompt_len:
            raise ApiError(
                ErrorCode.CONTRADICTORY_WHERE,
                f"With `phase` generated a patch's positions must all be {self._scope.prompt_len} or more, "
                f"the prompt's length; got {min(positions)}.",
                f"{path}.positions",
            )
        sites = resolve_sites(op.at, op.op, self._spec, f"{param}.at")
        tensor = read_tensor(op.values, f"{param}.values")
        check_patch(tensor, self._widths(sites), len(positions), f"{param}.values")
        self._check_experts(sites, tensor, f"{param}.values")
        check_range(tensor, 1.0, self._spec.dtype, f"{param}.values")
        order = sorted(range(len(positions)), key=positions.__getitem__)
        rule = matched.rule if in_encoder else WhereRule(positions=tuple(positions[i] for i in order))
        return PlannedOp(OperationKind.PATCH, sites, rule, tensor=self._keep(reorder_rows(tensor, order)))

    def _capture(self, op: Capture, matched: MatchedPositions, name: str, param: str) -> PlannedOp:
        sites = resolve_sites(op.at, op.op, self._spec, f"{param}.at")
        dtype = op.dtype or self._spec.dtype
        if any(site == SAMPLES for site in sites):
            if len(sites) > 1 or op.dtype is not None or op.reduce == "mean":
                raise ApiError(
                    ErrorCode.UNSUPPORTED_COMBINATION,
                    f"`{SAMPLES}` are token ids: capture them in an operation of their own, without `dtype` "
                    "and without `reduce` mean.",
                    f"{param}.at",
                )
            self._check_sampled(matched, param)
            dtype = "int64"
        has_ids = [site.leaf == EXPERTS for site in sites]
        if any(has_ids):
            if not all(has_ids) or op.dtype is not None or op.reduce == "mean":
                raise ApiError(
                    ErrorCode.UNSUPPORTED_COMBINATION,
                    f"{EXPERTS} are ids of experts: capture them in an operation of their own, without "
                    "`dtype` and without `reduce` mean.",
                    f"{param}.at",
                )
            dtype = "int64"
        has_state = [site.leaf == STATE for site in sites]
        if any(has_state):
            self._check_states(matched, param, is_alone=all(has_state))
            dtype = op.dtype or "float32"
        has_pattern = [site.leaf == PATTERN for site in sites]
        if any(has_pattern) and not all(has_pattern):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "Attention patterns grow with the position and other points do not; capture "
                f"{PATTERN} in an operation of its own.",
                f"{param}.at",
            )
        if op.reduce == "mean" and any(has_pattern):
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                "`reduce` mean needs rows of one length, and attention patterns grow with the position; "
                "capture them with `reduce` none or last.",
                f"{param}.reduce",
            )
        return PlannedOp(OperationKind.CAPTURE, sites, matched.rule, name, reduce=op.reduce, dtype=dtype)

    def _check_sampled(self, matched: MatchedPositions, param: str) -> None:
        """Raise if ``samples`` is captured before the prompt's last position, where no token is sampled."""
        first = self._scope.prompt_len - 1
        early = [position for position in matched.rule.positions or () if position < first]
        if early or (
            matched.last_prompt < first
            and not may_generate(matched.rule, self._scope.prompt_len, self._scope.num_positions)
        ):
            raise ApiError(
                ErrorCode.POSITION_OUT_OF_RANGE,
                f"Tokens are sampled from the prompt's last position, {first}, on, and none is at "
                f"{early[0] if early else matched.last_prompt}; name -1 or `phase` generated, or leave out "
                "`where`.",
                f"{param}.where",
            )

    def _check_states(self, matched: MatchedPositions, param: str, *, is_alone: bool) -> None:
        """Raise if states are captured beside other points, or inside the prompt, where none is kept."""
        if not is_alone:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION,
                f"{STATE} has values at fewer positions than other points; capture it in an operation of its "
                "own.",
                f"{param}.at",
            )
        last = self._scope.prompt_len - 1
        num_early = matched.num_prompt - int(matched.last_prompt == last)
        if num_early:
            raise ApiError(
                ErrorCode.UNSUPPORTED_AT_POINT,
                f"The kernel that computes a prompt keeps {STATE} after its last position, {last}, only, and "
                f"`where` names {num_early} before it; name -1, `phase` generated, or both with `range` "
                "[-1, null]. For the state after an earlier position, send the prompt up to it.",
                f"{param}.where",
            )

    def _probe(self, op: Probe, matched: MatchedPositions, name: str, param: str) -> PlannedOp:
        sites = resolve_sites(op.at, op.op, self._spec, f"{param}.at")
        tensor = read_weights(op.weights, f"{param}.weights")
        check_rows(tensor, self._widths(sites), f"{param}.weights")
        bias = check_float32(op.bias, f"{param}.bias")
        return PlannedOp(OperationKind.PROBE, sites, matched.rule, name, tensor=self._keep(tensor), bias=bias)

    def _lens(self, op: LogitLens, matched: MatchedPositions, name: str, param: str) -> PlannedOp:
        sites = resolve_lens_sites(op.layers, self._spec, f"{param}.layers")
        if op.top_k > self._spec.vocab_size:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"`top_k` must not exceed the vocabulary's {self._spec.vocab_size} tokens, got {op.top_k}.",
                f"{param}.top_k",
            )
        targets: list[int] = []
        for index, token in enumerate(op.targets or ()):
            path = f"{param}.targets.{index}"
            token_id = self._scope.token_id(token, path)
            if token_id in targets:
                raise ApiError(
                    ErrorCode.INVALID_VALUE,
                    f"A target may be named once; {excerpt(token)} is the second.",
                    path,
                )
            targets.append(token_id)
        return PlannedOp(
            OperationKind.LENS, sites, matched.rule, name, top_k=op.top_k, targets=tuple(targets)
        )

    def _widths(self, sites: tuple[PlannedSite, ...]) -> list[int]:
        return [leaf_of(site, self._spec).width for site in sites]

    def _keep(self, tensor: TensorData) -> str:
        key = tensor.key()
        self.tensors[key] = tensor
        return key


def _points(op: Operation) -> list[str]:
    """Return the points that an operation names in ``at``; none if its kind has no ``at``."""
    if isinstance(op, LogitLens | Detect | Features | Feature | Stop | Flag):
        return []
    return [op.at] if isinstance(op.at, str) else op.at


def _units(units: list[int], width: int, param: str) -> tuple[int, ...]:
    if not units:
        raise ApiError(
            ErrorCode.INVALID_VALUE, "An empty `units` selects nothing; leave it out for all units.", param
        )
    for index, unit in enumerate(units):
        if not 0 <= unit < width:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A unit must lie between 0 and {width - 1}, the point's width less one; got "
                f"{excerpt(unit)}.",
                f"{param}.{index}",
            )
    ordered = tuple(sorted(set(units)))
    if len(ordered) < len(units):
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A unit may be named once; {len(units)} are named, {len(ordered)} of them different.",
            param,
        )
    return ordered
