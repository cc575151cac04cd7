from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from app.command_error import CommandError
from app.process_environment import set_engine_defaults
from nnsight_engine.certificate.certificate import PLAIN, SKIP, VALUES, WRITES, Certificate, Finding, Status
from nnsight_engine.certificate.measurements import CertificateError, CheckRequest
from nnsight_engine.core.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from vllm import EngineArgs

_STYLES: Final = {
    Status.OK: "green",
    Status.DIFFERS: "bold red",
    Status.NOT_COMPARED: "yellow",
    Status.SILENTLY_WRONG: "bold red",
}
_SHORT: Final = {
    Status.OK: "ok",
    Status.DIFFERS: "differs",
    Status.NOT_COMPARED: "–",
    Status.SILENTLY_WRONG: "silent",
}
_SHOWN: Final = 4


def run(request: CheckRequest, arguments: Sequence[str], json_file: Path | None) -> int:
    """Check a model, print its certificate, and return the exit status, 0 if nothing is wrong."""
    set_engine_defaults()
    errors, console = Console(stderr=True, highlight=False), Console(highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
            task = progress.add_task("importing vLLM", total=None)

            def report(stage: str, done: int, total: int) -> None:
                progress.update(task, description=stage, completed=done, total=total or None)

            engine_options = _engine_arguments(request.model, arguments)
            certify = importlib.import_module("nnsight_engine.certificate.certify").certify
            certificate: Certificate = certify(request, report=report, **engine_options)
    except (CertificateError, UnsupportedOptionError) as error:
        raise CommandError(str(error)) from error
    if json_file is not None:
        json_file.write_bytes(certificate.to_json())
    print_certificate(certificate, console)
    return 0 if certificate.is_ok else 1


def _engine_arguments(model: str, options: Sequence[str]) -> dict[str, Any]:
    """Return those of vLLM's engine arguments that the options change from their defaults."""
    parse = importlib.import_module("app.engine.vllm_arguments").parse
    kind: type[EngineArgs] = importlib.import_module("vllm").EngineArgs
    chosen, default = (kind.from_cli_args(parse([model, *added])) for added in (options, ()))
    values = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def print_certificate(certificate: Certificate, console: Console) -> None:
    """Print the findings as a table of points, the reasons of those that are not ok, and a summary."""
    subjects: dict[str, dict[str, Finding]] = {}
    for finding in certificate.findings:
        subjects.setdefault(finding.subject, {})[finding.what] = finding
    columns = (PLAIN, *VALUES, *WRITES, SKIP)
    table = Table(Column("point", no_wrap=True), *columns, box=None, pad_edge=False, header_style="bold")
    for subject, by_what in subjects.items():
        table.add_row(subject, *(_cell(by_what.get(column)) for column in columns))
    console.print(table)
    for verdict, findings in certificate.reasons().items():
        where = [f"{finding.subject} ({finding.what})" for finding in findings]
        remainder = f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else ""
        text = f"{verdict.status}: {', '.join(where[:_SHOWN])}{remainder}: {verdict.reason}"
        console.print(text, style=_STYLES[verdict.status], markup=False, soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in certificate.versions.items())
    counts = ", ".join(f"{number} {status}" for status, number in certificate.counts().items())
    console.print(
        f"{certificate.model} ({certificate.architecture}, in vLLM {certificate.vllm_class}, "
        f"{certificate.dtype}), layers "
        f"{', '.join(map(str, certificate.layers)) or 'none'} of {certificate.num_layers}, {versions}: "
        f"{counts}. Values count as equal within {certificate.bounds.value:g} of the largest, effects within "
        f"{certificate.bounds.movement:g}.",
        markup=False,
        soft_wrap=True,
    )


def _cell(finding: Finding | None) -> Text:
    if finding is None:
        return Text("")
    status = finding.verdict.status
    return Text(_SHORT[status], style=_STYLES[status])
