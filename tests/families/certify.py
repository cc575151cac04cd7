"""Writes the page of checked families: one row for each checkpoint, from ``nnsight-engine check``.

``python -m tests.families.certify --certificates FOLDER`` writes a checkpoint of every family, checks each in
a process of its own and writes ``docs/model-families.md``. Certificates are kept in the folder, and those
that are there already are not made again, so that a run that was interrupted goes on. Other checkpoints can
be named instead.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nnsight_engine.certificate.certificate import PLAIN, SKIP, VALUES, WRITES, Certificate, Finding, Status
from tests.families.checkpoints import FAMILIES, UNTABLED, VARIANTS, write_checkpoint

_PROJECT: Final = Path(__file__).resolve().parents[2]
_PAGE: Final = _PROJECT / "docs" / "model-families.md"
_TIMEOUT_S: Final = 900
_MAX_REASON: Final = 160
_COLUMNS: Final = 120
_TEXT: Final = """
Each row is the [certificate](howto/check.md) of a tiny checkpoint with random weights, made on {date}
by the comparison of `nnsight-engine check` with {versions}: every point of the first, the middle and
the last layer of each kind, vLLM compared with `transformers`, in float32 on a CPU. *Logits* is the
largest difference without interventions, relative to the largest log-probability. *Values*, *writes*
and *skips* count the comparisons that are ok, of those that could be made. `TransformersForCausalLM` is
vLLM's Transformers backend.
"""
_HEAD: Final = """# Checked model families

<!-- written by python -m tests.families.certify -->

{text}

| checkpoint | architecture | in vLLM | logits | values | writes | skips | not ok |
|---|---|---|---|---|---|---|---|
"""


def check(checkpoint: Path, folder: Path) -> None:
    """Leave a checkpoint's certificate in a folder, or a text that says why there is none."""
    file, failure = folder / f"{checkpoint.name}.json", folder / f"{checkpoint.name}.txt"
    if file.exists():
        return
    failure.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "app", "check", str(checkpoint), "--json", str(file)],
            cwd=_PROJECT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        failure.write_text(f"the check took more than {_TIMEOUT_S} s")
        return
    if not file.exists():
        lines = [line for line in done.stderr.splitlines() if line.startswith("nnsight-engine: ")]
        failure.write_text(lines[-1].removeprefix("nnsight-engine: ") if lines else done.stderr[-2000:])


def page(checkpoints: Sequence[Path], folder: Path) -> str:
    """Return the page for checkpoints that have been checked."""
    rows, versions = [], ""
    for name in sorted(checkpoint.name for checkpoint in checkpoints):
        file = folder / f"{name}.json"
        if not file.exists():
            reason = (folder / f"{name}.txt").read_text().strip().splitlines()[-1]
            rows.append(f"| {name} | | | | | | | {_cell(reason.replace(str(checkpoints[0].parent), ''))} |")
            continue
        certificate = Certificate.from_json(file.read_bytes())
        versions = ", ".join(f"{one} {version}" for one, version in certificate.versions.items())
        cells = [
            name, certificate.architecture, certificate.vllm_class, _logits(certificate),
            _counted(certificate, *VALUES), _counted(certificate, *WRITES), _counted(certificate, SKIP),
            _remarks(certificate),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = textwrap.fill(
        _TEXT.format(date=today, versions=versions).strip(), _COLUMNS, break_on_hyphens=False
    )
    return _HEAD.format(text=text) + "\n".join(rows) + "\n"


def _logits(certificate: Certificate) -> str:
    plain = next(one.verdict for one in certificate.findings if one.what == PLAIN)
    size = "" if plain.difference is None else f"{plain.difference:.0e}"
    return size if plain.status is Status.OK else f"**{plain.status} {size}**"


def _counted(certificate: Certificate, *what: str) -> str:
    counts = certificate.counts(*what)
    total = counts.total() - counts[Status.NOT_COMPARED]
    return f"{counts[Status.OK]} of {total}" if total else "none"


def _remarks(certificate: Certificate) -> str:
    remarks = []
    for verdict, findings in certificate.reasons().items():
        status = str(verdict.status) if verdict.status is Status.NOT_COMPARED else f"**{verdict.status}**"
        remarks.append(f"{status}: {_where(findings)}: {_cell(verdict.reason)}")
    return "<br>".join(remarks)


def _where(findings: Sequence[Finding]) -> str:
    """Return the leaves of findings, with their layers."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for one in findings:
        prefix, _, rest = one.subject.partition(".")
        layer, _, leaf = rest.partition(".")
        name = (
            f"`{leaf}`"
            if leaf and prefix == "layers"
            else ("skips" if one.what == SKIP else f"`{one.subject}`")
        )
        if prefix == "layers" and layer not in layers[name]:
            layers[name].append(layer)
        else:
            layers[name] += []
    return ", ".join(f"{name} of {', '.join(of)}" if of else name for name, of in layers.items())


def _cell(text: str) -> str:
    short = text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"
    return short.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Check the checkpoints named on the command line, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--certificates", type=Path, required=True, help="a folder to keep certificates in")
    parser.add_argument("--output", type=Path, default=_PAGE)
    options = parser.parse_args()
    options.certificates.mkdir(parents=True, exist_ok=True)
    checkpoints = options.checkpoints or [
        write_checkpoint(family, options.certificates / "checkpoints" / family)
        for family in FAMILIES + VARIANTS + UNTABLED
    ]
    for number, checkpoint in enumerate(checkpoints, 1):
        sys.stderr.write(f"{number} of {len(checkpoints)}: {checkpoint}\n")
        check(checkpoint.resolve(), options.certificates)
    options.output.write_text(page(checkpoints, options.certificates))


if __name__ == "__main__":
    main()
