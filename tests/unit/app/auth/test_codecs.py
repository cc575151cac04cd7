"""Pickles are taken where the operator has said so twice, and nowhere else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Limits, NewKey, Scope, Tier
from app.auth.codecs import check_codec, codecs_of
from app.auth.principal import ANONYMOUS, Principal
from app.settings import Settings
from nnsight_engine.remote_backend.messages import TraceHead

OPEN = Settings(allow_cloudpickle=True)
TRUSTED = Principal(
    "acme", "k", frozenset(Scope), Tier.TRUSTED, Limits(), Limits(), trusted_codecs=True
)  # fmt: skip


def head(codec: Any = "cloudpickle") -> TraceHead:
    return TraceHead(model="m", dialect="vllm", codec=codec)


def test_keys_with_trusted_codecs_may_use_pickle() -> None:
    check_codec(head(), TRUSTED, OPEN)
    assert codecs_of(OPEN) == ["wire", "cloudpickle"]
    assert codecs_of(Settings()) == ["wire"]


@pytest.mark.parametrize(
    ("settings", "caller"),
    [
        (Settings(), TRUSTED),
        (OPEN, dataclasses.replace(TRUSTED, trusted_codecs=False)),
        (OPEN, ANONYMOUS),
    ],
)
def test_other_keys_may_not_use_pickle(settings: Settings, caller: Principal) -> None:
    with pytest.raises(ApiError, match="'wire'") as caught:
        check_codec(head(), caller, settings)
    assert (caught.value.code, caught.value.status) == (ErrorCode.CODEC_NOT_ALLOWED, 403)
    check_codec(head("wire"), caller, settings)


def test_a_key_whose_code_is_not_trusted_is_none_of_these() -> None:
    assert not NewKey(tenant="acme", tier=Tier.TRUSTED).trusted_codecs
    with pytest.raises(ValidationError, match="trusted"):
        NewKey(tenant="acme", trusted_codecs=True)
