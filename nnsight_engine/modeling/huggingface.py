"""Models that are loaded as Hugging Face's libraries load them, and files of their edits.

Edits are blocks in the wire format, which refer to parts of the model by name. The shape of the model is
compared before any code is decoded. The code then runs in every trace, so a file of edits must be trusted
like a Python module.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import platformdirs
import torch

from nnsight_engine.envoys.tracers.interleaving import Edit, EditingTracer
from nnsight_engine.modeling.mixins.remoteable import RemoteableMixin
from nnsight_engine.remote_backend.messages import fingerprint_of
from nnsight_engine.remote_backend.values.object_references import ObjectReferences, reference_of
from nnsight_engine.remote_backend.values.outcomes import SentPart
from nnsight_engine.serialization import DecodeError, decode, decode_trace, encode, encode_trace

DEFAULT_VARIANT: Final = "__default__"
_SUFFIX: Final = ".edits"
_NAME: Final = re.compile(r"(?!\.)[\w.-]{1,200}")


def edits_path(name: str, export_dir: str | os.PathLike[str] | None, variant: str) -> Path:
    """Return the path of a file of edits; ValueError if a name could not be part of it."""
    file_name = name.replace(os.sep, "--")
    for name_part in (file_name, variant):
        if not _NAME.fullmatch(name_part):
            raise ValueError(
                f"names and variants of edits have letters, digits, '_', '-' and '.', got {name_part!r}; "
                "choose one with name= or variant="
            )
    cache = Path(platformdirs.user_cache_dir("nnsight-engine"))
    folder = cache / "edits" if export_dir is None else Path(export_dir)
    return folder / file_name / f"{variant}{_SUFFIX}"


def write_edits(model: HuggingFaceModel, path: Path) -> None:
    """Write a model's edits to a file, which replaces an earlier one at once."""
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
    """Return the edits in a file, for this model; ValueError if they are of another one."""
    if not path.is_file():
        raise FileNotFoundError(f"there are no edits at {path}: write them with export_edits() first")
    try:
        content = decode(path.read_bytes())
        shape, data = content["shape"], content["edits"]
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


class HuggingFaceModel(RemoteableMixin):
    """A model identified by its repository.

    Attributes:
        repo_id: The repository or folder; None for a module whose config names none.
        revision: The branch, tag or commit of the repository; None for its default branch.
    """

    repo_id: str | None
    revision: str | None

    def __init__(self, source: Any, *args: Any, revision: str | None = None, **kwargs: Any) -> None:
        """Wrap a module, or load one from a repository.

        Args:
            source: A repository, a folder, or a module.
            *args: Passed to the loader.
            revision: The branch, tag or commit.
            **kwargs: See ``MetaMixin``; others are passed to ``from_pretrained``.
        """
        if isinstance(source, Path):
            source = str(source)
        self.repo_id = source if isinstance(source, str) else _name_of(source)
        self.revision = revision
        if "torch_dtype" in kwargs:  # the former name, deprecated by the libraries
            kwargs["dtype"] = kwargs.pop("torch_dtype")
        super().__init__(source, *args, **kwargs)

    def export_edits(
        self,
        name: str | None = None,
        export_dir: str | os.PathLike[str] | None = None,
        variant: str = DEFAULT_VARIANT,
    ) -> Path:
        """Write the edits of this model to a file, and return its path.

        Args:
            name: The model's name in the folder; by default its repository.
            export_dir: The folder; by default one in the user's cache.
            variant: Distinguishes several exports of one model.

        Raises:
            ValueError: There are no edits, or a name is not a valid file name.
            EncodeError: A value that the edits use cannot be serialized.
        """
        path = edits_path(name or self._edits_name(), export_dir, variant)
        write_edits(self, path)
        return path

    def import_edits(
        self,
        name: str | None = None,
        export_dir: str | os.PathLike[str] | None = None,
        variant: str = DEFAULT_VARIANT,
    ) -> None:
        """Add edits written by ``export_edits`` to those of this model.

        Their code runs in this process in each trace: import only what you would import as a Python module.

        Args:
            name: See ``export_edits``.
            export_dir: See ``export_edits``.
            variant: See ``export_edits``.

        Raises:
            FileNotFoundError: They were not exported.
            ValueError: They are for a model of another shape, or for one with modules that this one lacks.
        """
        path = edits_path(name or self._edits_name(), export_dir, variant)
        self._default_mediators.extend(read_edits(self, path))

    def _edits_name(self) -> str:
        if not self.repo_id:
            raise ValueError("this model was created from a module and has no name: pass one as name=")
        return self.repo_id.strip(os.sep)

    def _hub_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs} | self._revision_option()

    def _revision_option(self) -> dict[str, str]:
        return {} if self.revision is None else {"revision": self.revision}


_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "subfolder", "token", "trust_remote_code")


def _name_of(source: torch.nn.Module | Any) -> str | None:
    config = getattr(source, "config", source)
    return getattr(config, "name_or_path", None) or None


def class_of(automodel: type | str, library: ModuleType, example: str) -> Any:
    """Return the class that loads a model, given or by its name in a library; ValueError without one."""
    if not isinstance(automodel, str):
        return automodel
    kind = getattr(library, automodel, None)
    if kind is None:
        raise ValueError(
            f"automodel must be a class, or the name of one in {library.__name__} such as {example}, "
            f"got {automodel!r}"
        )
    return kind
