"""The transformers side in a process of its own, which gives the memory back before vLLM loads the model.

The two must not share a process: vLLM's Transformers backend changes transformers' classes for all models of
its process. ``python -m nnsight_engine.certificate.reference_process FOLDER`` reads the request in the folder
and writes the reference there; lines of its output are progress.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from nnsight_engine.certificate.measurements import CertificateError, CheckRequest, Reference, Report
from nnsight_engine.certificate.reference import compute

_REQUEST: Final = "request.json"
_FAILURE: Final = "failure.txt"
_ERRORS: Final = "stderr.txt"
_SHOWN: Final = 2000


def compute_apart(request: CheckRequest, report: Report) -> Reference:
    with tempfile.TemporaryDirectory(prefix="nnsight-engine-") as name:
        folder = Path(name)
        (folder / _REQUEST).write_bytes(msgspec.json.encode(request))
        with (folder / _ERRORS).open("wb") as errors:
            process = subprocess.Popen(  # noqa: S603 - this module
                [sys.executable, "-m", "nnsight_engine.certificate.reference_process", name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            with process:
                _follow(process, report)
        if (folder / _FAILURE).exists():
            raise CertificateError((folder / _FAILURE).read_text())
        if process.returncode:
            said = (folder / _ERRORS).read_text(errors="replace")[-_SHOWN:]
            raise CertificateError(
                f"the process with transformers' model ended with status {process.returncode}, perhaps for "
                f"lack of memory:\n{said}"
            )
        return Reference.load(folder)


def _follow(process: subprocess.Popen[bytes], report: Report) -> None:
    try:
        for line in process.stdout or ():
            try:
                what, done, total = msgspec.json.decode(line, type=tuple[str, int, int])
            except msgspec.DecodeError:
                continue  # a library's own output
            report(what, done, total)
    except BaseException:
        process.kill()
        raise


def _print_progress(what: str, done: int, total: int) -> None:
    sys.stdout.write(msgspec.json.encode((what, done, total)).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    folder = Path(sys.argv[1])
    request = msgspec.json.decode((folder / _REQUEST).read_bytes(), type=CheckRequest)
    try:
        compute(request, _print_progress).save(folder)
    except CertificateError as error:
        (folder / _FAILURE).write_text(str(error))


if __name__ == "__main__":
    main()
