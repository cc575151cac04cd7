"""The Dockerfile, without a build: a linter's findings, and guarantees about users, paths and packages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.settings import Settings
from tests.deploy.dockerfile import DOCKERFILE, PROJECT, stages

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
