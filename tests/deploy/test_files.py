"""The Dockerfile, the Compose files, dashboards and alerts: their form, and what they guarantee."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped] # it has no types
from compose_spec import PyCompose
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.auth.keys import parse_key
from app.settings import Settings
from tests.deploy.dockerfile import DOCKERFILE, PROJECT, stages
from tests.monitoring import DASHBOARDS, RULES
from tests.sharing import lacking

IMAGES = ("cpu", "gpu")


def test_a_linter_has_nothing_to_say() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_everything_that_is_copied_is_sent_to_the_builder() -> None:
    sent = [
        line[1:]
        for line in (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = {
        source
        for stage in stages().values()
        for value in stage.values("COPY")
        if not value.startswith("--from")
        for source in value.split()[:-1]
    }
    assert {"app", "requirements/gpu.txt"} <= copied
    for source in copied:
        assert (PROJECT / source).exists(), source
        assert any(source == path or source.startswith(f"{path}/") for path in sent), source
    # A checkout may have keys and passwords, for Compose.
    assert not [path for path in sent if path.startswith("deploy")]


@pytest.mark.parametrize("name", ["cpu-build", *IMAGES])
def test_what_is_built_upon_can_be_pinned_by_digest(name: str) -> None:
    base = stages()[name].base
    image, digest = re.findall(r"\$\{(\w+)\}", base)
    assert digest == f"{image.removesuffix('_IMAGE')}_DIGEST"
    declared = re.findall(r"^ARG (\w+)=", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {image, digest} <= set(declared)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_without_privileges_and_writes_below_its_volume(name: str) -> None:
    stage = stages()[name]
    (user,) = stage.values("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)  # a number: Kubernetes asks whether it is root
    assert stage.values("VOLUME") == ["/data"]
    environment = stage.environment()
    written = {"HOME", "XDG_CACHE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    written |= {"NNSIGHT_ENGINE_DATA_DIR", "NNSIGHT_ENGINE_RESULT_DIR"}
    for variable in written:
        path = Path(environment[variable])
        assert path == Path("/data") or Path("/data") in path.parents, variable
    prefix = Settings.model_config["env_prefix"]
    named = {key.removeprefix(prefix).lower() for key in environment if key.startswith(prefix)}
    assert named <= set(Settings.model_fields)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_asked_whether_it_lives_and_not_whether_it_is_ready(name: str) -> None:
    stage = stages()[name]
    (check,) = stage.values("HEALTHCHECK")
    assert "/health/live" in check
    assert stage.command()[:4] == ["tini", "--", "nnsight-engine", "serve"]


def test_the_image_for_gpus_brings_what_vllm_s_own_lacks() -> None:
    script = PROJECT / "scripts" / "gpu_requirements.py"
    spec = importlib.util.spec_from_file_location("gpu_requirements", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (PROJECT / "requirements" / "gpu.txt").read_text(encoding="utf-8")
    assert written == module.text(), f"run: python {script.relative_to(PROJECT)} > requirements/gpu.txt"


def test_both_images_have_what_the_server_can_be_set_up_with() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {canonicalize_name(Requirement(line).name) for line in [*extras["serve"], *extras["redis"]]}
    lock = (PROJECT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    locked = {canonicalize_name(line.split("==")[0]) for line in lock.splitlines() if "==" in line}
    assert wanted | {"redis"} <= locked


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
        assert parse_key(text) is not None if name.endswith(".key") else len(text) >= 32
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


PROMETHEUS = PROJECT / "deploy/prometheus"


@pytest.fixture(scope="module")
def promtool(request: pytest.FixtureRequest) -> str:
    """Where promtool is."""
    found = shutil.which("promtool")
    if found is None:
        lacking(
            request,
            "--require-promtool",
            "promtool is not installed; scripts/promtool.sh does that on Debian, as root",
        )
    return str(found)


@pytest.mark.parametrize("command", [
    ["check", "config", "prometheus.yml"],
    ["check", "config", "--syntax-only", "compose.yml"],  # its key is in the container alone
    ["check", "rules", *(f"rules/{path.name}" for path in RULES)],
    ["test", "rules", "rules_tests.yml"],
], ids=" ".join)  # fmt: skip
def test_promtool_agrees(promtool: str, command: list[str]) -> None:
    told = subprocess.run([promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "SUCCESS" in told.stdout


def test_the_alerts_that_page_are_tested() -> None:
    tested = yaml.safe_load((PROMETHEUS / "rules_tests.yml").read_text())["tests"]
    fire = {one["alertname"] for test in tested for one in test["alert_rule_test"] if one.get("exp_alerts")}
    (group,) = yaml.safe_load(RULES[0].read_text())["groups"]
    pages = {rule["alert"] for rule in group["rules"] if rule["labels"]["severity"] == "page"}
    assert len(pages) >= 5
    assert pages <= fire


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_whole(path: Any) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    variables = {variable["name"] for variable in board["templating"]["list"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) >= 8
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'instance=~"$instance"' in target["expr"]
    assert variables == {"datasource", "instance"}


def test_every_query_of_the_dashboards_is_prometheus_s_language(promtool: str, tmp_path: Any) -> None:
    queries = [
        target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    told = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"{len(queries)} rules found" in told.stdout
