"""The Compose files, parsed as Compose does: their form, and guarantees about permissions and order."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped] # it has no types
from compose_spec import PyCompose

from app.auth.secrets import parsed
from app.settings import Settings
from tests.deploy.dockerfile import PROJECT, stages

DEPLOY: Final = PROJECT / "deploy"
FILES: Final = ("compose.yaml", "compose.gpu.yaml")
ONCE: Final = {"admin-key", "metrics-key"}
LIMITS_URL: Final = "NNSIGHT_ENGINE_LIMITS_URL"


def interpolated(text: str, variables: dict[str, str]) -> str:
    """Put variables in, with Compose's two ways of saying what holds without one."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found[1], found[2], found[3]
        if kind == ":?":
            assert variables.get(name), f"{name} is needed: {rest}"
        return variables.get(name) or (rest if kind == ":-" else "")

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, text)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    subprocess.run([DEPLOY / "prepare.sh", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def variables(prepared: Path) -> dict[str, str]:
    lines = (prepared / ".env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def compose(variables: dict[str, str]) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(interpolated((DEPLOY / FILES[0]).read_text("utf-8"), variables))
    return read


@pytest.mark.parametrize("name", FILES)
def test_compose_takes_its_files(name: str, variables: dict[str, str]) -> None:
    text = interpolated((DEPLOY / name).read_text(encoding="utf-8"), variables)
    # Merged as YAML has it, which the library does not do.
    spec = PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text)))
    assert set(spec.services or {}) >= {"engine", *ONCE}


def test_no_service_has_more_rights_than_needed(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    assert compose["networks"]["inside"]["internal"] is True
    for name in ("postgres", "redis"):
        assert compose["services"][name]["networks"] == ["inside"], name


def test_a_service_reads_secrets_that_it_is_given(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        read = set(re.findall(r"/run/secrets/([\w.]+)", json.dumps(service)))
        assert read <= set(service.get("secrets", [])) <= set(compose["secrets"]), name
    assert "GF_SECURITY_ADMIN_PASSWORD__FILE" in compose["services"]["grafana"]["environment"]


def test_the_server_waits_for_the_database_that_stays(compose: dict[str, Any]) -> None:
    """While it makes the database, the image has a server that listens to a socket alone."""
    assert "--host=127.0.0.1" in compose["services"]["postgres"]["healthcheck"]["test"]


def test_services_wait_for_what_they_need(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        if name not in ONCE:
            assert service["healthcheck"]["test"][0] == "CMD", name
        for other, how in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if other in ONCE else "service_healthy"
            assert how["condition"] == expected, (name, other)
    assert set(services["engine"]["depends_on"]) == {"postgres", "redis", *ONCE}
    assert "/health/ready" in services["engine"]["healthcheck"]["test"][-1]


def test_streams_have_the_time_to_end(compose: dict[str, Any]) -> None:
    grace_s = int(compose["services"]["engine"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings().drain_timeout_s + 10


def test_what_is_written_is_a_volume_or_in_memory(compose: dict[str, Any]) -> None:
    (volume,) = stages()["cpu"].values("VOLUME")
    for name in ("engine", *ONCE):
        assert f"data:{volume}" in compose["services"][name]["volumes"]
    named = {
        entry.split(":")[0]
        for service in compose["services"].values()
        for entry in service.get("volumes", [])
        if not entry.startswith(".")
    }
    assert named == set(compose["volumes"])


def test_prometheus_finds_the_server_and_its_key(compose: dict[str, Any]) -> None:
    (option,) = [word for word in compose["services"]["prometheus"]["command"] if "config.file" in word]
    file = DEPLOY / "prometheus" / option.rsplit("/", 1)[1]
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["scrape_configs"]
    (ours,) = [
        job for job in jobs if any("engine:8000" in group["targets"] for group in job["static_configs"])
    ]
    secrets = {f"/run/secrets/{secret}" for secret in compose["services"]["prometheus"]["secrets"]}
    assert ours["authorization"]["credentials_file"] in secrets


def test_secrets_are_made_once_and_readable_by_their_owner_only(
    prepared: Path, compose: dict[str, Any]
) -> None:
    made = {path: path.read_bytes() for path in prepared.rglob("*") if path.is_file()}
    subprocess.run([DEPLOY / "prepare.sh", prepared], check=True, capture_output=True)
    assert {path: path.read_bytes() for path in prepared.rglob("*") if path.is_file()} == made
    for name, secret in compose["secrets"].items():
        text = (prepared / secret["file"]).read_text(encoding="utf-8").strip()
        assert parsed(text) is not None if name.endswith(".key") else len(text) >= 32
    for private in (prepared / ".env", prepared / "secrets"):
        assert stat.S_IMODE(private.stat().st_mode) & 0o077 == 0
    passwords = re.findall(rb"_PASSWORD=(.*)", (prepared / ".env").read_bytes())
    assert len(passwords) == len(set(passwords)) == 2
    assert all(len(password) >= 32 for password in passwords)


def test_passwords_are_in_no_arguments(compose: dict[str, Any], variables: dict[str, str]) -> None:
    for name, service in compose["services"].items():
        words = json.dumps([service.get("command"), service.get("healthcheck")])
        for variable, value in variables.items():
            assert not (variable.endswith("_PASSWORD") and value in words), name


def test_redis_is_given_its_password_by_its_input(
    compose: dict[str, Any], variables: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "redis-server"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$*"\ncat\n', encoding="utf-8")
    program.chmod(0o755)
    redis = compose["services"]["redis"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **redis["environment"]}
    command = [word.replace("$$", "$") for word in redis["command"]]  # as Compose does
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    arguments, *configuration = done.stdout.splitlines()
    assert arguments == "- --save  --appendonly no --maxmemory 128mb"
    assert configuration == [f"requirepass {variables['REDIS_PASSWORD']}"]
    assert f":{variables['REDIS_PASSWORD']}@redis" in compose["services"]["engine"]["environment"][LIMITS_URL]
