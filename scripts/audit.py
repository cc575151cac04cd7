"""Ask whether versions of the lock are known to be vulnerable, with pip-audit.

    python scripts/audit.py requirements/cpu.txt requirements/dev.txt

Who knows vulnerabilities is asked over the network, which may not be there, or may be an index that knows
packages and nothing else, and is silent on all of them. So a version that is long known to be vulnerable is
asked about first: where nobody knows that, this says so and ends well. What is found fails it, unless
``requirements/audit.toml`` says why that does not concern us.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

SERVICES = ("pypi", "osv")
KNOWN = "idna==3.6"  # PYSEC-2024-60
ACCEPTED = Path(__file__).resolve().parents[1] / "requirements" / "audit.toml"
TIMEOUT_S = 300


def main() -> int:
    """Audit; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("requirements", nargs="+", type=Path)
    parser.add_argument("--accepted", type=Path, default=ACCEPTED)
    parser.add_argument("--program", default=[sys.executable, "-m", "pip_audit"], nargs=1)
    options = parser.parse_args()
    accepted = accepted_in(options.accepted)
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "known.txt"
        known.write_text(f"{KNOWN}\n", encoding="utf-8")
        for service in SERVICES:
            if not found_in(audit(options.program, service, [known])):
                continue
            packages = audit(options.program, service, options.requirements)
            if packages is not None:
                return tell(packages, service, accepted)
    say("Nobody who knows vulnerabilities can be reached: nothing was audited.")
    return 0


def accepted_in(file: Path) -> dict[str, str]:
    """Return what the file accepts: why, by the vulnerability's id."""
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("accepted", [])
    for entry in entries:
        if set(entry) != {"id", "package", "reason"} or not all(entry.values()):
            raise SystemExit(f"{file}: an entry has an id, a package and a reason, got {entry}")
    return {entry["id"]: entry["reason"] for entry in entries}


def audit(program: list[str], service: str, requirements: list[Path]) -> list[dict[str, Any]] | None:
    """Return what a service says of each package, None where it does not answer."""
    files = [word for file in requirements for word in ("--requirement", str(file))]
    asked = [*program, "--vulnerability-service", service, "--no-deps", "--disable-pip", "--format", "json"]
    try:
        answer = subprocess.run(  # noqa: S603 - a program of ours, with files of ours
            [*asked, "--progress-spinner", "off", "--timeout", "10", *files],
            capture_output=True, check=False, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        packages: list[dict[str, Any]] = json.loads(answer.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return None
    return packages


def found_in(packages: list[dict[str, Any]] | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the packages with what is known of them."""
    return [
        (f"{one['name']} {one['version']}", vulnerability)
        for one in packages or []
        for vulnerability in one.get("vulns", [])
    ]


def tell(packages: list[dict[str, Any]], service: str, accepted: dict[str, str]) -> int:
    """Say what was found; returns the exit status."""
    is_bad = False
    seen = set()
    for package, vulnerability in found_in(packages):
        names = {vulnerability["id"], *vulnerability.get("aliases", [])}
        seen |= names
        reason = next((accepted[name] for name in sorted(names) if name in accepted), None)
        fixed = ", ".join(vulnerability.get("fix_versions", [])) or "nothing yet"
        is_bad |= reason is None
        say(f"{package}: {vulnerability['id']}, fixed in {fixed}; {reason or 'NOT ACCEPTED'}")
    for name in sorted(set(accepted) - seen):
        say(f"{name} is accepted and found no more: take it out of requirements/audit.toml")
    num_skipped = sum("skip_reason" in one for one in packages)
    say(f"{len(packages) - num_skipped} packages audited by {service}, {num_skipped} not known there.")
    return int(is_bad)


def say(text: str) -> None:
    """Print one line."""
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
