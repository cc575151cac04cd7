"""``make audit``: what is found fails it, what cannot be asked does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).resolve().parents[2] / "scripts" / "audit.py"
BAD = {
    "name": "idna",
    "version": "3.6",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["3.7"]}],
}
GOOD = {"name": "torch", "version": "2.13.0", "vulns": []}
UNKNOWN = {"name": "idna", "skip_reason": "not found"}


@pytest.fixture
def audit(tmp_path: Path) -> Any:
    """Audit a lock, asking a pip-audit that answers as it is told: ``known`` first, then ``lock``."""

    def audited(known: object, lock: object = None, accepted: str = "") -> tuple[int, str]:
        program = tmp_path / "pip-audit"
        program.write_text(
            f"#!{sys.executable}\nimport sys\n"
            f"known, lock = {json.dumps({'dependencies': [known]})!r}, {json.dumps(lock)!r}\n"
            "print(known if 'known.txt' in sys.argv[-1] else lock)\n"
        )
        program.chmod(0o755)
        file = tmp_path / "audit.toml"
        file.write_text(accepted)
        done = subprocess.run(
            [sys.executable, AUDIT, "lock.txt", "--accepted", file, "--program", program],
            capture_output=True, check=False, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return audited


def test_what_is_vulnerable_fails_it(audit: Any):
    status, said = audit(BAD, {"dependencies": [BAD, GOOD]})
    assert status == 1
    assert "idna 3.6: PYSEC-1, fixed in 3.7; NOT ACCEPTED" in said
    assert audit(BAD, {"dependencies": [GOOD]})[0] == 0


@pytest.mark.parametrize("name", ["PYSEC-1", "CVE-1"])
def test_what_is_accepted_has_a_reason_and_does_not(audit: Any, name: str):
    entry = f'[[accepted]]\nid = "{name}"\npackage = "idna"\n'
    status, said = audit(BAD, {"dependencies": [BAD]}, f'{entry}reason = "short names"')
    assert (status, "short names" in said) == (0, True)
    assert audit(BAD, {"dependencies": [BAD]}, entry)[0] != 0
    assert audit(BAD, {"dependencies": [BAD]}, f'{entry}reason = ""')[0] != 0
    assert "found no more" in audit(BAD, {"dependencies": [GOOD]}, f'{entry}reason = "short names"')[1]


@pytest.mark.parametrize(
    "known", [UNKNOWN, {**BAD, "vulns": []}], ids=["an index", "a service that knows nothing"]
)
def test_an_unreachable_vulnerability_index_is_reported(audit: Any, known: dict[str, Any]):
    status, said = audit(known, {"dependencies": [UNKNOWN]})
    assert (status, "nothing was audited" in said) == (0, True)


def test_a_service_that_goes_away_is_none(audit: Any):
    status, said = audit(BAD, "not what is wanted")
    assert (status, "nothing was audited" in said) == (0, True)
