"""SAELens' ``cfg.json``, of its versions 3 to 6: a dictionary's definition, and where it was trained.

Fields of training only are ignored; all that would change results and is not computed here is refused by
name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

from api_schemas.errors import ApiError, ErrorCode, clip, excerpt
from nnsight_engine.features.config import MAX_FEATURES, Architecture, DictionaryConfig, Normalization

PARAM: Final = "cfg"
_MAX_WIDTH: Final = 2**20
_MAX_FACTOR: Final = 1e6
_OLD_NAMES: Final = {"hook_name": "hook_point", "hook_head_index": "hook_point_head_index"}
_ACTIVATIONS: Final = frozenset({"relu", "topk"})
_RESHAPES: Final = frozenset({"none", "hook_z"})
_ELSEWHERE: Final = {
    "batchtopk": "SAELens saves one for use as `jumprelu`",
    "matryoshka_batchtopk": "SAELens saves one for use as `jumprelu`",
}
"""What to do about architectures that are not supported."""

_BLOCK: Final = re.compile(r"blocks\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<hook>[a-z_0-9.]+)")
_LEAVES: Final = {
    "hook_resid_pre": "input", "hook_in": "input",
    "hook_resid_post": "output", "hook_out": "output",
    "hook_attn_out": "attn.output", "attn.hook_out": "attn.output", "attn.hook_z": "attn.heads",
    "mlp.hook_in": "mlp.input", "mlp.hook_post": "mlp.act",
    "hook_mlp_out": "mlp.output", "mlp.hook_out": "mlp.output",
}  # fmt: skip
"""The leaf of a layer by the hook of TransformerLens in a block."""
_MODULE: Final = re.compile(
    r"(?:model|transformer|gpt_neox|model\.language_model|model\.decoder)\.(?:layers|h)\."
    r"(?P<layer>0|[1-9][0-9]{0,5})(?:\.(?P<module>[a-z_]+))?"
)
_MODULE_LEAVES: Final = {
    None: "output", "mlp": "mlp.output",
    "self_attn": "attn.output", "attn": "attn.output", "attention": "attn.output",
}  # fmt: skip
"""The leaf by the module of a transformers model whose output was read."""
_AFTER_NORMS: Final = frozenset({"hook_attn_out", "hook_mlp_out"})
"""Hooks that come after the norms, if any, which follow attention and MLP; our points come before them."""
_WITH_NORMS_AFTER: Final = (
    "Exaone4", "FalconH1", "FlexOlmo", "Gemma2", "Gemma3", "Gemma4", "Glm4For", "Granite", "Olmo2", "Olmo3",
)  # fmt: skip
"""The beginnings of architectures that normalize or scale what attention and MLP return."""

_WITH_STREAM_INSIDE: Final = ("Bloom",)
"""The beginnings of architectures whose modules of attention and MLP add the residual stream themselves."""


@dataclasses.dataclass(frozen=True, slots=True)
class SaeLensConfig:
    """What a ``cfg.json`` says; places and model are in the words of the file, empty if it has none."""

    config: DictionaryConfig
    hook: str
    output_hook: str
    model: str


def read_config(cfg: Mapping[str, Any]) -> SaeLensConfig:
    """Return its content; ApiError ``invalid_dictionary``, or ``unsupported_dictionary`` (not done here)."""
    fields = _Fields(cfg)
    architecture = _architecture(fields)
    input_width = fields.integer("d_in", _MAX_WIDTH)
    num_features = fields.integer("d_sae", MAX_FEATURES)
    output_width = fields.integer("d_out", _MAX_WIDTH) if architecture.is_transcoder else input_width
    normalization, factor = _normalization(fields, architecture)
    k = _k(fields, num_features) if architecture is Architecture.TOPK else None
    is_topk = architecture is Architecture.TOPK
    config = DictionaryConfig(
        architecture,
        input_width,
        num_features,
        output_width,
        normalization,
        factor,
        subtracts_decoder_bias=_subtracts_decoder_bias(fields, architecture),
        k=k,
        rescales_by_decoder_norm=is_topk and fields.flag("rescale_acts_by_decoder_norm", default=False),
    )
    _refuse_others(fields)
    return SaeLensConfig(config, fields.text("hook_name"), fields.text("hook_name_out"), model_of(cfg))


def model_of(cfg: Mapping[str, Any]) -> str:
    """Return the model that a ``cfg.json`` names, empty if none; raises ApiError ``invalid_dictionary``."""
    return _Fields(cfg).text("model_name")


def point_of(hook: str, model_architecture: str) -> str | None:
    """Return the point of a hook, ``blocks.8.hook_resid_post`` or ``model.layers.8``.

    None if the place has no point, or is another one than the point in models of this architecture.
    """
    block = _BLOCK.fullmatch(hook)
    if block is not None:
        is_other = block["hook"] in _AFTER_NORMS and model_architecture.startswith(_WITH_NORMS_AFTER)
        leaf = None if is_other else _LEAVES.get(block["hook"])
        return None if leaf is None else f"layers.{block['layer']}.{leaf}"
    module = _MODULE.fullmatch(hook)
    if module is None or module["module"] not in _MODULE_LEAVES:
        return None
    if module["module"] is not None and model_architecture.startswith(_WITH_STREAM_INSIDE):
        return None
    return f"layers.{module['layer']}.{_MODULE_LEAVES[module['module']]}"


class _Fields:
    """The fields of a ``cfg.json``, checked by type when they are read."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._cfg = cfg
        metadata = cfg.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            raise _invalid("`metadata` must be an object.")
        self._metadata: Mapping[str, Any] = metadata or {}

    def get(self, name: str) -> Any:
        """Return a field by its name or its older one, outside or inside of ``metadata``; None without it."""
        for place in (self._cfg, self._metadata):
            for known in (name, _OLD_NAMES.get(name)):
                if known is not None and place.get(known) is not None:
                    return place[known]
        return None

    def integer(self, name: str, maximum: int) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= maximum:
            raise _invalid(f"`{name}` must be an integer from 1 to {maximum}, got {excerpt(value)}.")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _invalid(f"`{name}` must be true or false, got {excerpt(value)}.")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise _invalid(f"`{name}` must be text, got {excerpt(value)}.")
        return value or ""


def _architecture(fields: _Fields) -> Architecture:
    """Return the architecture, also if an older version names it by its activation function."""
    name = fields.text("architecture") or Architecture.STANDARD.value
    if name not in list(Architecture):
        advice = _ELSEWHERE.get(name, f"those supported are {', '.join(Architecture)}")
        raise _unsupported(f"The architecture {clip(name)!r} is not supported; {advice}.")
    activation = fields.text("activation_fn") or fields.text("activation_fn_str") or "relu"
    if activation not in _ACTIVATIONS:
        raise _unsupported(f"The activation {clip(activation)!r} is not supported; use relu or topk.")
    if activation == "topk" and name == Architecture.STANDARD:  # as older versions call TOPK
        return Architecture.TOPK
    if activation == "topk" and name != Architecture.TOPK:
        raise _unsupported(f"The activation 'topk' is not supported with the architecture {name!r}.")
    return Architecture(name)


def _k(fields: _Fields, num_features: int) -> int:
    """Return the number of features that TOPK keeps, which older versions have among other arguments."""
    value, arguments = fields.get("k"), fields.get("activation_fn_kwargs")
    if value is None and isinstance(arguments, dict):
        value = arguments.get("k")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= num_features:
        raise _invalid(
            f"`k` of topk must be an integer from 1 to `d_sae` ({num_features}), got {excerpt(value)}."
        )
    return value


def _subtracts_decoder_bias(fields: _Fields, architecture: Architecture) -> bool:
    subtracts = fields.flag("apply_b_dec_to_input", default=not architecture.is_transcoder)
    if subtracts and architecture.is_transcoder:
        raise _unsupported("A transcoder cannot have `apply_b_dec_to_input`: its `b_dec` is of the output.")
    return subtracts


def _normalization(fields: _Fields, architecture: Architecture) -> tuple[Normalization, float]:
    """Return how inputs are scaled, with the factor of EXPECTED_AVERAGE, else 1."""
    value = fields.get("normalize_activations")
    if isinstance(value, bool):  # as older versions do
        value = Normalization.EXPECTED_AVERAGE if value else Normalization.NONE
    name = Normalization.NONE if value is None else value
    if not isinstance(name, str) or name not in list(Normalization):
        raise _unsupported(
            f"`normalize_activations` {excerpt(name)} is not supported; use one of "
            f"{', '.join(Normalization)}."
        )
    if name != Normalization.EXPECTED_AVERAGE:
        return Normalization(name), 1.0
    if architecture.is_transcoder:
        raise _unsupported(
            f"`normalize_activations` {name!r} is not defined for transcoders; fold the factor into the "
            "weights and set it to 'none'."
        )
    factor = fields.get("norm_scaling_factor")
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not is_number or not 0 < factor <= _MAX_FACTOR:
        raise _unsupported(
            f"`normalize_activations` {name!r} needs the factor of the inputs, √d_in divided by their mean "
            "norm in training, which SAELens does not write: add it to the cfg as `norm_scaling_factor`, or "
            "fold it into the weights and set `normalize_activations` to 'none'."
        )
    return Normalization.EXPECTED_AVERAGE, float(factor)


def _refuse_others(fields: _Fields) -> None:
    """Refuse fields that would change results and are not computed here."""
    reshape = fields.text("reshape_activations") or "none"
    if reshape not in _RESHAPES:
        raise _unsupported(f"`reshape_activations` {clip(reshape)!r} is not supported.")
    if fields.get("hook_head_index") is not None:
        raise _unsupported("A dictionary of a single head (`hook_head_index`) is not supported.")
    if fields.flag("finetuning_scaling_factor", default=False):
        raise _unsupported(
            "`finetuning_scaling_factor` is not supported: multiply the rows of W_dec by the factors, leave "
            "them out of the weights, and set it to false."
        )
    arguments = fields.get("model_from_pretrained_kwargs")
    if isinstance(arguments, dict) and arguments.get("center_writing_weights") is True:
        raise _unsupported(
            "It was trained on centred values (`center_writing_weights`), and this server's are not. "
            "TransformerLens does not centre a model with RMSNorm: set it to false there."
        )


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_DICTIONARY, f"The dictionary's cfg.json: {message}", PARAM)


def _unsupported(message: str) -> ApiError:
    return ApiError(ErrorCode.UNSUPPORTED_DICTIONARY, f"The dictionary's cfg.json: {message}", PARAM)
