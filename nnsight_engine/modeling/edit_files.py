"""Files of a model's edits: blocks in the wire format, which refer to parts of the model by name.

The shape of the model is compared before any code is decoded. The code then runs in every trace, so a file of
edits must be trusted like a Python module.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import platformdirs

from nnsight_engine.envoys.tracers.editing import Edit, EditingTracer
from nnsight_engine.remote_backend.identity import fingerprint_of
from nnsight_engine.remote_backend.values.object_references import ObjectReferences, reference_of
from nnsight_engine.remote_backend.values.outcomes import SentPart
from nnsight_engine.serialization import DecodeError, decode, decode_trace, encode, encode_trace

if TYPE_CHECKING:
    from nnsight_engine.modeling.huggingface import HuggingFaceModel

DEFAULT_VARIANT: Final = "__default__"
_SUFFIX: Final = ".edits"
_NAME: Final = re.compile(r"(?!\.)[\w.-]{1,200}")


def edits_path(name: str, export_dir: str | os.PathLike[str] | None, variant: str) -> Path:
    file_name = name.replace(os.sep, "--")
    for part in (file_name, variant):
        if not _NAME.fullmatch(part):
            raise ValueError(
                f"names and variants of edits have letters, digits, '_', '-' and '.', got {part!r}; "
                "choose one with name= or variant="
            )
    cache = Path(platformdirs.user_cache_dir("nnsight-engine"))
    folder = cache / "edits" if export_dir is None else Path(export_dir)
    return folder / file_name / f"{variant}{_SUFFIX}"


def write_edits(model: HuggingFaceModel, path: Path) -> None:
    edits: list[Edit] = model._default_mediators  # noqa: SLF001 - an envoy of ours
    if not edits:
        raise ValueError(
            "this model has no edits: make one with edit(inplace=True), or export the edited copy"
        )
    blocks = [SentPart.alone(edit.info).as_sent() for edit in edits]
    data = encode_trace(blocks, reference=lambda value: reference_of(value, model, []))
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_bytes(encode({"shape": _shape_of(model), "edits": data}))
    written.replace(path)


def read_edits(model: HuggingFaceModel, path: Path) -> list[Edit]:
    if not path.is_file():
        raise FileNotFoundError(f"there are no edits at {path}: write them with export_edits() first")
    try:
        kept = decode(path.read_bytes())
        shape, data = kept["shape"], kept["edits"]
    except (DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no edits: write them again with export_edits()") from error
    if shape != _shape_of(model):
        raise ValueError(
            f"the edits at {path} are for a model of another shape: import them into a model of that shape"
        )
    try:
        infos = decode_trace(data, resolve=ObjectReferences(model)).blocks
    except DecodeError as error:
        raise ValueError(f"the edits at {path} do not fit this model: {error}") from error
    tracer = EditingTracer(model, inplace=True)
    return [Edit(tracer, info) for info in infos]


def _shape_of(model: HuggingFaceModel) -> str:
    config: Any = getattr(model._module, "config", None)  # noqa: SLF001 - an envoy of ours
    return "" if not hasattr(config, "get_text_config") else fingerprint_of(config)


__all__ = ["DEFAULT_VARIANT", "edits_path", "read_edits", "write_edits"]
