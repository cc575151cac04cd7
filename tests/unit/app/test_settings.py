"""Settings: where they come from, and that each is explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from app.process_environment import environment_for_traces
from app.settings import Settings


def test_the_environment_sets_and_arguments_win(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NNSIGHT_ENGINE_PORT", "9001")
    monkeypatch.setenv("NNSIGHT_ENGINE_RESULT_TTL_S", "5")
    assert (Settings().port, Settings().result_ttl_s) == (9001, 5.0)
    assert Settings(port=9002).port == 9002


@pytest.mark.parametrize("bad", [{"port": 70_000}, {"max_json_depth": 10_000}, {"result_ttl_s": 0}])
def test_values_out_of_bounds_are_refused(bad: dict[str, float]):
    with pytest.raises(ValidationError):
        Settings.model_validate(bad)


def test_processes_that_run_clients_code_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NNSIGHT_ENGINE_HOST", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "DATABASE_URL"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    environment = environment_for_traces()
    assert "secret" not in environment.values()
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_jobs_lie_in_the_data_directory_and_a_password_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    settings = Settings(database_url="postgresql://me:hunter2@there/jobs")
    assert settings.data_dir == Path("/somewhere/nnsight-engine/server")
    assert "hunter2" not in repr(settings)
