"""Pickles are taken where the operator has said so twice, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from api_schemas.errors import ApiError, ErrorCode
from app.auth.codecs import check_codec, codecs_of
from app.settings import Settings
from nnsight_engine.remote_backend.messages import TraceHead

KEYS = (SecretStr("first-key"), SecretStr("schlüssel"))
OPEN = Settings(allow_cloudpickle=True, cloudpickle_keys=KEYS)


def head(codec: Any = "cloudpickle") -> TraceHead:
    return TraceHead(model="m", dialect="vllm", codec=codec)


@pytest.mark.parametrize("authorization", ["Bearer first-key", "bearer  first-key ", "Bearer schlüssel"])
def test_holders_of_a_key_may(authorization: str) -> None:
    check_codec(head(), authorization, OPEN)
    assert codecs_of(OPEN) == ["wire", "cloudpickle"]


@pytest.mark.parametrize(
    ("settings", "authorization"),
    [
        (Settings(), "Bearer first-key"),
        (Settings(cloudpickle_keys=KEYS), "Bearer first-key"),
        (Settings(allow_cloudpickle=True), "Bearer first-key"),
        (Settings(allow_cloudpickle=True), None),
        (Settings(allow_cloudpickle=True, cloudpickle_keys=(SecretStr(""),)), "Bearer "),
        (OPEN, None),
        (OPEN, ""),
        (OPEN, "Bearer"),
        (OPEN, "Bearer first-ke"),
        (OPEN, "Bearer first-key2"),
        (OPEN, "Basic first-key"),
        (OPEN, "first-key"),
    ],
)
def test_nobody_else_may(settings: Settings, authorization: str | None) -> None:
    with pytest.raises(ApiError, match="'wire'") as caught:
        check_codec(head(), authorization, settings)
    assert (caught.value.code, caught.value.status) == (ErrorCode.CODEC_NOT_ALLOWED, 403)
    assert "first-key" not in caught.value.message
    check_codec(head("wire"), authorization, settings)


def test_keys_come_from_the_environment_and_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNSIGHT_ENGINE_CLOUDPICKLE_KEYS", '["first-key"]')
    monkeypatch.setenv("NNSIGHT_ENGINE_ALLOW_CLOUDPICKLE", "true")
    settings = Settings()
    check_codec(head(), "Bearer first-key", settings)
    assert "first-key" not in repr(settings)
    assert codecs_of(Settings(cloudpickle_keys=())) == ["wire"]
