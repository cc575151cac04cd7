from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from nnsight_engine.modeling.edit_files import DEFAULT_VARIANT, edits_path, read_edits, write_edits
from nnsight_engine.modeling.mixins.remoteable import RemoteableMixin


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
        options = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
        return options if self.revision is None else {**options, "revision": self.revision}


_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "subfolder", "token", "trust_remote_code")


def _name_of(source: torch.nn.Module | Any) -> str | None:
    config = getattr(source, "config", source)
    return getattr(config, "name_or_path", None) or None
