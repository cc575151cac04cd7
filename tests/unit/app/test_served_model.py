"""Whose traces a server takes: those written against the model that it has."""

from __future__ import annotations

import pytest

from api_schemas.errors import ApiError
from app.engine.served_model import ServedModel
from nnsight_engine.remote_backend.messages import TraceHead

MODEL = ServedModel(("smol", "smol-2"), "org/smol", "shape")


def head(model: str, **fields: str) -> TraceHead:
    return TraceHead(model=model, **{"dialect": "vllm", **fields})  # type: ignore[arg-type] # all of them are text


@pytest.mark.parametrize(
    "of",
    [
        head("smol"),
        head("smol-2"),
        head("org/smol"),
        head("org/smol/"),
        head("/home/me/checkpoints/x", fingerprint="shape"),
        head("C:\\models\\x", fingerprint="shape"),
        head("smol", revision="main"),
    ],
)
def test_its_own_are_taken(of: TraceHead) -> None:
    MODEL.check(of)


@pytest.mark.parametrize(
    "of",
    [
        head(""),
        head("gpt2"),
        head("org/other", fingerprint="shape"),  # another checkpoint of the same shape
        head("/home/me/checkpoints/x", fingerprint="other"),
        head("/home/me/checkpoints/x"),
        head("/srv/smol", fingerprint="other"),  # the same folder's name, on another machine
        head("smol", revision="step-1000"),
    ],
)
def test_those_of_other_models_are_not(of: TraceHead) -> None:
    with pytest.raises(ApiError) as caught:
        MODEL.check(of)
    assert caught.value.code == "model_not_found"


def test_its_names_are_those_that_traces_may_use() -> None:
    assert MODEL.all_names == ("smol", "smol-2", "org/smol")
    local = ServedModel(("small",), "/srv/checkpoints/smol/", "shape")
    assert local.all_names == ("small", "smol"), "where its folder is on the server is no name"
    for served in (MODEL, local):
        for name in served.all_names:
            served.check(head(name))


def test_a_model_whose_shape_is_not_known_goes_by_its_name_alone() -> None:
    unknown = ServedModel(("smol",), "/srv/smol")
    unknown.check(head("smol"))
    with pytest.raises(ApiError):
        unknown.check(head("/home/me/x", fingerprint=""))
    with pytest.raises(ApiError, match="revision 'main'"):
        ServedModel(("smol",), "smol", revision="v2").check(head("smol", revision="main"))


def test_an_adapter_is_a_model_for_blocks_of_vllm() -> None:
    adapted = ServedModel(("smol",), "org/smol", "shape", adapters=("pirate",))
    assert adapted.all_names == ("smol", "org/smol", "pirate")
    adapted.check(head("pirate"))
    with pytest.raises(ApiError) as caught:
        adapted.check(head("pirate", dialect="transformers"))
    assert caught.value.code == "unsupported_combination"
    with pytest.raises(ApiError):
        MODEL.check(head("pirate"))
