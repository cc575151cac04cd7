"""The transformers side, in float32 and in a process that ends, and frees its memory, before vLLM loads.

The two must not share a process: vLLM's Transformers backend changes transformers' classes for all models of
its process. ``python -m nnsight_engine.certificate.reference_process FOLDER`` reads the request in the folder
and writes the reference there; lines of its output are progress.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from api_schemas.errors import ApiError
from api_schemas.points import LayerSelection, PointPattern
from nnsight_engine.certificate import measurements
from nnsight_engine.certificate.measurements import (
    CertificateError,
    CheckRequest,
    Failure,
    Measurement,
    Reference,
    ReferenceFacts,
    Report,
    all_measured,
    measured,
)
from nnsight_engine.core.model_spec import EXPERTS, STATE
from nnsight_engine.envoys.architectures.named_points import NoStandardPointsError
from nnsight_engine.modeling.language import LanguageModel

_MIN_TOKENS: Final = 4
_MAX_TOKENS: Final = 256
"""Values of all points at all positions are held at once."""
_SCALES: Final = (1.0, 4.0, 4.0)
"""A change has the size of the value, its root mean square, and grows until it moves the logits clearly."""
_CLEAR: Final = 0.05
"""A clear movement, relative to the largest logit."""
_LEAST: Final = 1e-6


def compute(request: CheckRequest, report: Report) -> Reference:
    """Compute the reference; CertificateError if the model cannot load, or prompt or layers do not fit."""
    report("loading transformers' model", 0, 0)
    model = _load(request)
    prompt_ids = model.tokenizer.encode(request.prompt)
    if not _MIN_TOKENS <= len(prompt_ids) <= _MAX_TOKENS:
        raise CertificateError(
            f"the prompt must have {_MIN_TOKENS} to {_MAX_TOKENS} tokens, got {len(prompt_ids)}; choose "
            "another one"
        )
    return _Measuring(request, model, prompt_ids, report).run()


def _load(request: CheckRequest) -> LanguageModel:
    """Load the model in float32, with the attention that yields patterns if it has that."""
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "device_map": request.device,
        "trust_remote_code": request.trust_remote_code,
        "dispatch": True,
    }
    if request.revision is not None:
        options["revision"] = request.revision
    try:
        try:
            return LanguageModel(request.model, attn_implementation="eager", **options)
        except ValueError:  # its attention has one implementation, which yields no patterns
            return LanguageModel(request.model, **options)
    except Exception as error:  # whatever transformers raises for a checkpoint
        raise CertificateError(
            f"transformers cannot load {request.model}: {Failure.of(error).message}"
        ) from error


class _Measuring:
    def __init__(
        self, request: CheckRequest, model: LanguageModel, prompt_ids: list[int], report: Report
    ) -> None:
        self._request = request
        self._model = model
        self._module: Any = model._module  # noqa: SLF001 - transformers' own model, which an envoy wraps
        self._ids = prompt_ids
        self._prompt = torch.tensor([prompt_ids])
        self._report = report
        self._tensors: dict[str, torch.Tensor] = {}
        self._failures: dict[str, Failure] = {}

    def run(self) -> Reference:
        """Measure the continuation, values, the effect of changes, and of skipped layers."""
        tokens = self._generate()
        num_layers, layers, shapes = self._points()
        values = all_measured(list(shapes), lambda names: measurements.read(self._model, self._prompt, names))
        for name, value in values.items():
            self._add(f"value {name}", value)
        total = len(shapes) + len(layers)
        generator = torch.Generator().manual_seed(self._request.seed)
        for done, (name, shape) in enumerate(shapes.items()):
            self._report(f"transformers: {name}", done, total)
            self._write(name, shape, values[name], generator)
        for done, layer in enumerate(layers, len(shapes)):
            self._report(f"transformers: layers.{layer} skipped", done, total)
            self._add(f"skip {layer}", measured(self._skip, layer))
        architecture = type(self._module).__name__
        facts = ReferenceFacts(
            architecture, self._ids, num_layers, layers, list(shapes), tokens, self._failures
        )
        return Reference(facts, self._tensors)

    def _add(self, key: str, measurement: Measurement) -> None:
        if isinstance(measurement, Failure):
            self._failures[key] = measurement
        else:
            self._tensors[key] = measurement

    def _generate(self) -> list[int]:
        """Continue the prompt greedily, without a cache; keeps the logits of each step."""
        ids, rows = list(self._ids), []
        for _ in range(self._request.num_tokens):
            with torch.no_grad():
                prompt = torch.tensor([ids], device=self._module.device)
                logits = self._module(prompt, use_cache=False).logits
            rows.append(logits[0, -1].float().cpu())
            ids.append(int(rows[-1].argmax()))
        self._tensors["plain"] = torch.stack(rows)
        return ids[len(self._ids) :]

    def _points(self) -> tuple[int, list[int], dict[str, tuple[int, ...]]]:
        """Return the number of layers, the compared layers, and the shapes of points there and outside."""
        try:
            shapes = self._model.points()
        except NoStandardPointsError as error:
            self._failures["points"] = Failure.of(error)
            return 0, [], {}
        by_layer = {name: PointPattern.parse(name).layers for name in shapes}
        num_layers = 1 + max(
            (point.index or 0 for point in by_layer.values() if point is not None), default=-1
        )
        layers = self._layers(num_layers)
        selected = {
            name: shape
            for name, shape in shapes.items()
            if (point := by_layer[name]) is None or point.index in layers
        }
        return num_layers, layers, selected

    def _layers(self, num_layers: int) -> list[int]:
        """Return the layers of the request, or the first, the middle and the last of each kind."""
        if self._request.layers is not None:
            try:
                parts = [LayerSelection.parse(part.strip()) for part in self._request.layers.split(",")]
                return sorted({layer for part in parts for layer in part.resolve(num_layers)})
            except ApiError as error:
                raise CertificateError(error.message) from error
        types = getattr(self._module.config.get_text_config(), "layer_types", None) or [""] * num_layers
        kinds: defaultdict[Any, list[int]] = defaultdict(list)
        for layer in range(num_layers):
            modules = self._model.layers[layer]._module.named_modules()  # noqa: SLF001 - as above
            kinds[(types[layer], *((path, type(module).__name__) for path, module in modules))].append(layer)
        return sorted(
            {
                index
                for layers in kinds.values()
                for index in (layers[0], layers[len(layers) // 2], layers[-1])
            }
        )

    def _skip(self, layer: int) -> torch.Tensor:
        num_items = measurements.num_returned(self._model, self._prompt, layer)
        return measurements.skip(self._model, self._prompt, layer, num_items=num_items)

    def _write(
        self, name: str, shape: tuple[int, ...], value: Measurement, generator: torch.Generator
    ) -> None:
        """Measure the effect of a change, as large as is needed for a clear one."""
        is_read_only = any(size < 0 for size in shape) or name.endswith((EXPERTS, STATE))
        if isinstance(value, Failure) or is_read_only:
            return  # patterns, which grow, ids of experts, and states
        plain = self._tensors["plain"][0]
        change = torch.randn(shape, generator=generator) * value.square().mean().sqrt().clamp_min(_LEAST)
        for scale in _SCALES:
            change *= scale
            measurement = measured(measurements.write_in_place, self._model, self._prompt, name, change)
            if (
                isinstance(measurement, Failure)
                or (measurement - plain).abs().max() >= _CLEAR * plain.abs().max()
            ):
                break
        self._tensors[f"change {name}"] = change
        self._add(f"write {name}", measurement)


_REQUEST: Final = "request.json"
_FAILURE: Final = "failure.txt"
_ERRORS: Final = "stderr.txt"
_SHOWN: Final = 2000


def compute_apart(request: CheckRequest, report: Report) -> Reference:
    """Compute the reference in another process; CertificateError with its message if it fails."""
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
            error_text = (folder / _ERRORS).read_text(errors="replace")[-_SHOWN:]
            raise CertificateError(
                f"the process with transformers' model ended with status {process.returncode}, perhaps for "
                f"lack of memory:\n{error_text}"
            )
        return Reference.load(folder)


def _follow(process: subprocess.Popen[bytes], report: Report) -> None:
    """Report the progress that the process prints, until it ends; it is killed if this is interrupted."""
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
    """Compute the reference in the folder that the first argument names; the parent reads an error there."""
    folder = Path(sys.argv[1])
    request = msgspec.json.decode((folder / _REQUEST).read_bytes(), type=CheckRequest)
    try:
        compute(request, _print_progress).save(folder)
    except CertificateError as error:
        (folder / _FAILURE).write_text(str(error))


if __name__ == "__main__":
    main()
