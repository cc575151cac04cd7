"""The points of uploaded dictionaries, in a model with attention in some layers only."""

from __future__ import annotations

from typing import Any, Final

import pytest

from api_schemas.errors import ApiError
from api_schemas.server import Capabilities
from app.catalog.dictionary_points import points_of_dictionary
from nnsight_engine.features.saelens import SaeLensConfig, read_config
from tests.fakes.results import CAPABILITIES

_ALL: Final = ["steer", "capture"]
_CFG: Final = {"d_in": 8, "d_sae": 16, "apply_b_dec_to_input": False}


def model(architecture: str = "LlamaForCausalLM") -> Capabilities:
    leaves: dict[str, tuple[int, list[str], list[int] | None]] = {
        "input": (8, _ALL, None),
        "output": (8, _ALL, None),
        "mlp.input": (8, _ALL, None),
        "mlp.output": (8, _ALL, None),
        "attn.heads": (12, _ALL, [1, 3]),
        "attn.pattern": (4, ["capture"], [1, 3]),
    }
    points = [
        {
            "name": f"layers.*.{leaf}",
            "shape": [width],
            "width": width,
            "tier": "tap",
            "operations": operations,
            "layers": layers,
        }
        for leaf, (width, operations, layers) in leaves.items()
    ]
    plain = CAPABILITIES.model_dump()
    return Capabilities.model_validate({**plain, "architecture": architecture, "points": points})


def read(**fields: Any) -> SaeLensConfig:
    return read_config({**_CFG, **fields})


def test_hooks_and_given_points() -> None:
    stream = read(hook_name="blocks.2.hook_resid_post")
    assert points_of_dictionary(stream, None, None, model()) == ("layers.2.output", None)
    assert points_of_dictionary(stream, "layers.-4.input", None, model()) == ("layers.0.input", None)
    assert points_of_dictionary(read(hook_name="blocks.3.attn.hook_z", d_in=12), None, None, model()) == (
        "layers.3.attn.heads",
        None,
    )


def test_transcoders_have_two() -> None:
    mlp = read(
        architecture="transcoder",
        d_out=8,
        hook_name="blocks.1.mlp.hook_in",
        hook_name_out="blocks.1.hook_mlp_out",
    )
    assert points_of_dictionary(mlp, None, None, model()) == ("layers.1.mlp.input", "layers.1.mlp.output")
    assert points_of_dictionary(mlp, None, "layers.1.output", model()) == (
        "layers.1.mlp.input",
        "layers.1.output",
    )
    with pytest.raises(ApiError, match=r"`hook_name_out` is 'blocks\.1\.hook_mlp_out'") as caught:
        points_of_dictionary(mlp, None, None, model("Gemma2ForCausalLM"))
    assert caught.value.param == "output_at"
    given = points_of_dictionary(mlp, None, "layers.1.mlp.output", model("Gemma2ForCausalLM"))
    assert given == ("layers.1.mlp.input", "layers.1.mlp.output")


@pytest.mark.parametrize(
    ("fields", "at", "code", "message"),
    [
        ({}, None, "invalid_dictionary", "`hook_name` is missing"),
        ({"hook_name": "blocks.2.ln2.hook_normalized"}, None, "invalid_dictionary", "give the point as `at`"),
        ({"hook_name": "blocks.4.hook_resid_post"}, None, "unknown_layer", "4"),
        ({"hook_name": "blocks.2.attn.hook_z", "d_in": 12}, None, "unknown_point", "layers.2.attn.heads"),
        ({"d_in": 4}, "layers.1.attn.pattern", "unknown_point", "layers.1.attn.pattern"),
        ({"d_in": 8}, "layers.1.attn.heads", "wrong_width", "12 numbers"),
        ({}, "layers.0:2.output", "invalid_dictionary", "belongs to one point"),
        ({}, "norm.output", "unknown_point", "norm.output"),
        ({}, "layers.x.output", "unknown_layer", "x"),
    ],
)
def test_what_does_not_fit_is_refused(
    fields: dict[str, Any], at: str | None, code: str, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        points_of_dictionary(read(**fields), at, None, model())
    assert caught.value.code == code
    assert message in caught.value.message
