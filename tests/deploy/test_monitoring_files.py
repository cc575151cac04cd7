"""Dashboards and alerts are what Grafana and Prometheus take, and the alerts do what their tests say."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped] # it has no types

from tests.monitoring import DASHBOARDS, PROJECT, RULES
from tests.sharing import lacking

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
