"""The served playground equals a build of the sources with locked packages, byte for byte."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.playground.conftest import SOURCES


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_building_again_gives_the_same_bytes(npm_folder: Path) -> None:
    built = subprocess.run(
        ["npm", "run", "build"], cwd=npm_folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert tree(npm_folder / "static") == tree(SOURCES / "static"), (
        "app/playground/static is not what app/playground/src gives: run `make playground` and commit it"
    )


def test_the_lock_names_no_place_to_download_from() -> None:
    lock = json.loads((SOURCES / "package-lock.json").read_text())
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]


def test_the_page_loads_what_is_there_and_has_nothing_inline() -> None:
    text = (SOURCES / "static/index.html").read_text()
    loaded = set(re.findall(r'(?:src|href)="playground/([^"]+)"', text))
    described = {name for name in tree(SOURCES / "static") if name.endswith(".json")}
    scripts = b"".join((SOURCES / "static" / name).read_bytes() for name in loaded)
    assert all(Path(name).name.encode() in scripts for name in described)
    assert loaded | described == {name for name in tree(SOURCES / "static") if name != "index.html"}
    assert not re.search(r"<style|<script[^>]*>[^<]|\son\w+=|\sstyle=", text)
