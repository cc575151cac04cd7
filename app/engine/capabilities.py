"""Builds the answer of ``GET /v1/capabilities`` from the model's description."""

from __future__ import annotations

import math

from api_schemas.capabilities import Capabilities, CapabilityLimits, ModelSizes, PointCapability
from api_schemas.points import PointPattern, point_name
from app.auth.code_policy import takes_code
from app.settings import Settings
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec


def describe(spec: ModelSpec, settings: Settings) -> Capabilities:
    operations = {operation for leaf in spec.leaves for operation in leaf.operations}
    generates = any(leaf.name == "logits" for leaf in spec.leaves)
    operations |= {"trace"} if generates and takes_code(settings) else set()
    return Capabilities(
        model=spec.name,
        architecture=spec.architecture,
        dtype=spec.dtype,
        points=[_point(leaf) for leaf in spec.leaves],
        operations=sorted(operations),
        limits=CapabilityLimits(
            max_operations=settings.max_operations,
            max_tensor_bytes=settings.max_tensor_bytes,
            max_capture_bytes=spec.max_capture_bytes,
            max_work=spec.max_work,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_body_bytes=settings.max_body_bytes,
            max_json_depth=settings.max_json_depth,
        ),
        sizes=ModelSizes(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            max_model_len=spec.max_model_len,
        ),
    )


def spec_of(capabilities: Capabilities) -> ModelSpec:
    sizes = capabilities.sizes
    leaves = tuple(
        LeafSpec(
            PointPattern.parse(one.name).leaf,
            tuple(one.shape),
            one.tier,
            tuple(one.operations),
            None if one.layers is None else tuple(one.layers),
        )
        for one in capabilities.points
    )
    return ModelSpec(
        name=capabilities.model,
        architecture=capabilities.architecture,
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        dtype=capabilities.dtype,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=capabilities.limits.max_num_batched_tokens,
        leaves=leaves,
        max_capture_bytes=capabilities.limits.max_capture_bytes,
        max_work=math.inf if capabilities.limits.max_work is None else capabilities.limits.max_work,
    )


def _point(leaf: LeafSpec) -> PointCapability:
    return PointCapability(
        name=point_name(leaf.name),
        shape=list(leaf.shape),
        width=leaf.width,
        tier=leaf.tier,
        operations=list(leaf.operations),
        layers=None if leaf.layers is None else list(leaf.layers),
    )
