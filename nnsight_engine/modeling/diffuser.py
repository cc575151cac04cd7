"""A diffusion pipeline as a single module, so that its models form a tree that can be traced.

Without weights, its components are found through the pipeline's own index, as in diffusers.

After its last denoising step a pipeline still decodes an image. Loops over steps end with that step, so that
the code after them can read later values; with a pipeline without a callback for steps they end with the run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

import torch

from nnsight_engine.modeling.huggingface import class_of

DENOISERS: Final = ("unet", "transformer", "prior", "decoder")
"""The names that pipelines use for the model that runs once per step, the most common ones first."""


def diffusers() -> ModuleType:
    """Return the package diffusers, an optional dependency; ImportError with a remedy without it."""
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise ImportError(
            f"diffusion models need the package diffusers, and its import failed: {error}. "
            "Run `pip install nnsight-engine[diffusion]`."
        ) from error


class Diffuser(torch.nn.Module):
    """The models of a pipeline; a forward call runs the denoiser."""

    def __init__(self, pipeline: Any) -> None:
        """Take the components of a pipeline that are modules as submodules, under the same names."""
        super().__init__()
        self.pipeline = pipeline
        for name, component in pipeline.components.items():
            if isinstance(component, torch.nn.Module):
                self.add_module(name, component)

    @property
    def denoiser(self) -> str:
        """The name of the model that runs once per step; ValueError if none has a known name."""
        children = dict(self.named_children())
        denoiser = next((name for name in DENOISERS if name in children), None)
        if denoiser is None:
            raise ValueError(
                f"{type(self.pipeline).__name__} must have one of {', '.join(DENOISERS)}, "
                f"has {', '.join(children)}"
            )
        return denoiser

    @property
    def config(self) -> Any:
        return self.pipeline.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(self.denoiser)(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline."""
        return self.pipeline(*args, **kwargs)


def pipeline_without_weights(
    source: str, automodel: Any, hub_options: dict[str, Any], replacements: dict[str, Any]
) -> Any:
    """Return a pipeline without weights; None in ``replacements`` leaves a component out."""
    index: dict[str, Any] = automodel.load_config(source, **hub_options)
    if automodel is diffusers().DiffusionPipeline:
        automodel = class_of(index["_class_name"], diffusers(), "DiffusionPipeline")
    components: dict[str, Any] = {}
    for name, entry in index.items():
        if name in replacements:
            components[name] = replacements[name]
        elif not name.startswith("_"):
            is_component = isinstance(entry, list | tuple)
            components[name] = _component(source, name, entry, hub_options) if is_component else entry
    return automodel(**components)


def _component(source: str, name: str, entry: Sequence[str | None], options: dict[str, Any]) -> Any:
    """Return a component without weights; ``entry`` has its library and class, None if it is left out."""
    library, class_name = entry
    if library is None or class_name is None:
        return None
    pipeline_module = getattr(diffusers().pipelines, library, None)  # some components belong to one pipeline
    cls = getattr(pipeline_module or importlib.import_module(library), class_name)
    location = {**options, "subfolder": name}
    if not issubclass(cls, torch.nn.Module):
        with torch.device("cpu"):  # a scheduler computes its tables in its constructor
            return cls.from_pretrained(source, **location)
    if hasattr(cls, "config_class") and cls.config_class is not None:  # a class of transformers
        return cls(cls.config_class.from_pretrained(source, **location)).eval()
    return cls.from_config(cls.load_config(source, **location)).eval()


_CALLBACK: Final = "callback_on_step_end"
_INPUTS: Final = "callback_on_step_end_tensor_inputs"


def with_last_step(pipeline: Any, kwargs: dict[str, Any], ended: Callable[[], None]) -> dict[str, Any]:
    """Return a pipeline's arguments with a callback that calls ``ended`` after the last denoising step."""
    if _CALLBACK not in inspect.signature(type(pipeline).__call__).parameters:
        return kwargs
    callback = kwargs.get(_CALLBACK)

    def step_ended(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        changed = callback(pipe, step, time, values) if callback is not None else values
        if step + 1 == getattr(pipe, "num_timesteps", None):
            ended()
        return changed if changed is not None else {}

    chained = {**kwargs, _CALLBACK: step_ended}
    inputs = getattr(callback, "tensor_inputs", None)  # set on diffusers' own callbacks
    if inputs is not None:
        chained[_INPUTS] = inputs
    return chained
