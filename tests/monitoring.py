"""What tests of monitoring share: reading ``/metrics``, and the list of metrics in the documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped] # it has no types
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

PROJECT: Final = Path(__file__).resolve().parents[1]
DASHBOARDS: Final = sorted((PROJECT / "deploy/grafana/dashboards").glob("*.json"))
RULES: Final = sorted((PROJECT / "deploy/prometheus/rules").glob("*.yml"))
OURS: Final = "nnsight_engine_"
_NAMED: Final = re.compile(r"\b(?:nnsight_engine_|vllm:)\w+")
_PARTS: Final = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


class Exposition:
    """The metrics of a server."""

    def __init__(self, text: str) -> None:
        self.text = text
        # ``_created`` families are separate in the text format.
        self.families: dict[str, Metric] = {
            family.name: family
            for family in text_string_to_metric_families(text)
            if not family.name.endswith("_created")
        }

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels; 0 without any."""
        return sum(
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def values(self, name: str, label: str) -> set[str]:
        """Return the values that a label has in a metric."""
        return {
            sample.labels[label]
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name
        }

    @property
    def sample_names(self) -> set[str]:
        """The names under which something can be asked for, also of what has no sample yet."""
        return {
            f"{family.name}{part}"
            for family in self.families.values()
            for part in _PARTS.get(family.type, ("",))
        }


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return the type and the labels of each metric in the documentation."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in (PROJECT / "docs/monitoring.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith(f"| `{OURS}"):
            found[cells[0].strip("`")] = (cells[1], set(re.findall(r"`(\w+)`", cells[2])))
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Yield each query of the dashboards and rules, and where it is."""
    for path in DASHBOARDS:
        board: dict[str, Any] = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{path.name}: ${variable['name']}", variable["definition"]
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield f"{path.name}: {rule['alert']}", rule["expr"]


def named_in(expression: str) -> set[str]:
    """Return the metrics that a query names."""
    return set(_NAMED.findall(expression))
