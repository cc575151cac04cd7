"""The project's Dockerfile, read: its stages, and what each says."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Final

from dockerfile_parse import DockerfileParser  # type: ignore[import-untyped] # it has no types

PROJECT: Final = Path(__file__).resolve().parents[2]
DOCKERFILE: Final = PROJECT / "Dockerfile"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage: what it is built on, and its instructions in their order, each with its value."""

    base: str
    steps: list[tuple[str, str]]

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.steps if name == instruction]

    def environment(self) -> dict[str, str]:
        words = [word for value in self.values("ENV") for word in shlex.split(value)]
        return dict(word.split("=", 1) for word in words)

    def command(self) -> list[str]:
        """Return what runs: the entry point with its command."""
        (entry,), (command,) = self.values("ENTRYPOINT"), self.values("CMD")
        return [*json.loads(entry), *json.loads(command)]


def stages() -> dict[str, Stage]:
    """Return the stages by their names."""
    found: dict[str, Stage] = {}
    for step in DockerfileParser(str(DOCKERFILE), cache_content=True).structure:
        name, value = step["instruction"], step["value"]
        if name == "FROM":
            base, _, stage = value.partition(" AS ")
            found[stage] = Stage(base, [])
        elif found:
            list(found.values())[-1].steps.append((name, value))
    return found
