from __future__ import annotations

from typing import Any, ClassVar

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from nnsight_engine.modeling.huggingface import HuggingFaceModel, class_of


class TransformersModel(HuggingFaceModel):
    """A model loaded by an Auto class.

    Attributes:
        automodel: The Auto class.
    """

    default_automodel: ClassVar[str] = "AutoModel"

    def __init__(self, source: Any, *args: Any, automodel: type | str | None = None, **kwargs: Any) -> None:
        """Wrap a module, or load one.

        Args:
            source: A repository, a folder, a module, or a config, which yields a model with random weights.
            *args: Passed to ``from_pretrained``.
            automodel: The class that loads it, or its name in transformers.
            **kwargs: See ``HuggingFaceModel``.

        Raises:
            ValueError: transformers has no class of that name.
        """
        self.automodel = class_of(
            automodel or type(self).default_automodel, transformers, "AutoModelForCausalLM"
        )
        super().__init__(source, *args, **kwargs)

    def _load(self, source: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Load the module with its weights; for a config, create it with random ones."""
        if isinstance(source, PreTrainedConfig):
            return self._from_config(source, kwargs)
        module: torch.nn.Module = self.automodel.from_pretrained(
            source, *args, **kwargs, **self._revision_option()
        )
        return module

    def _load_meta(self, source: Any, **kwargs: Any) -> torch.nn.Module:
        """Return the module that a config describes; the default device, meta, has no weights."""
        if isinstance(source, PreTrainedConfig):
            return self._from_config(source, kwargs)
        config = kwargs.pop("config", None)
        if not isinstance(config, PreTrainedConfig):
            location = source if config is None else config
            config, _ = AutoConfig.from_pretrained(  # nosec B615 # the user's choice
                location, return_unused_kwargs=True, **kwargs, **self._revision_option()
            )
        return self._from_config(config, kwargs)

    def _from_config(self, config: PreTrainedConfig, kwargs: dict[str, Any]) -> torch.nn.Module:
        """Create a module by its config, with those of the user's options that apply to it."""
        supported = ("dtype", "attn_implementation", "trust_remote_code")
        options = {name: kwargs[name] for name in supported if name in kwargs and kwargs[name] != "auto"}
        module: torch.nn.Module = self.automodel.from_config(config, **options)
        return module.eval()
