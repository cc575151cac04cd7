"""Models that come from a Hugging Face repository, or from a folder that looks like one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nnsight_engine.modeling.mixins.remoteable import RemoteableMixin


class HuggingFaceModel(RemoteableMixin):
    """A model known by its repository.

    Attributes:
        repo_id: The repository or folder; None for a module whose config names none.
        revision: Branch, tag or commit of the repository; None is its default branch.
    """

    repo_id: str | None
    revision: str | None

    def __init__(self, source: Any, *args: Any, revision: str | None = None, **kwargs: Any) -> None:
        """Wrap a module, or load one from a repository.

        Args:
            source: A repository, a folder, or a module.
            *args: For the loader.
            revision: Branch, tag or commit.
            **kwargs: See ``MetaMixin``; all else goes to ``from_pretrained``.
        """
        if isinstance(source, Path):
            source = str(source)
        self.repo_id = source if isinstance(source, str) else _name_of(source)
        self.revision = revision
        super().__init__(source, *args, **kwargs)

    def _hub_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the options that every part of a repository is to be loaded with."""
        options = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
        return options if self.revision is None else {**options, "revision": self.revision}


_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "subfolder", "token", "trust_remote_code")


def _name_of(source: torch.nn.Module | Any) -> str | None:
    """Return the repository that a module's config, or a config, says it is from."""
    config = getattr(source, "config", source)
    return getattr(config, "name_or_path", None) or None
