"""Diffusion models; inputs are prompts for the pipeline or tensors for the denoiser, one row each."""

from __future__ import annotations

from typing import Any, ClassVar, Final, TypeAlias

import torch

from nnsight_engine.interleaving.batching import Batcher
from nnsight_engine.modeling.diffuser import (
    Diffuser,
    diffusers,
    pipeline_without_weights,
    with_last_step,
)
from nnsight_engine.modeling.huggingface import HuggingFaceModel, class_of
from nnsight_engine.modeling.mixins.meta import GeneratingMixin
from nnsight_engine.modeling.rows import join_shared, without_input
from nnsight_engine.modeling.spread_rows import SpreadBatcher

Prepared: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

INPUTS: Final = ("prompt", "prompt_embeds", "batch_size", "sample", "hidden_states")
"""Arguments that determine the number of rows; a pipeline without prompts takes ``batch_size``."""


def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of rows in the arguments; TypeError if none of them determines it."""
    for value in (*args[:1], *(kwargs.get(name) for name in INPUTS)):
        if isinstance(value, int):
            return value
        if isinstance(value, torch.Tensor | list | tuple) and len(value):
            return len(value)
        if isinstance(value, str):
            return 1
    raise TypeError(
        f"a diffusion model takes a prompt, prompts or tensors as its input, or {', '.join(INPUTS)} by name"
    )


def as_lists(kwargs: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """Return the arguments with each single text repeated into a list with one text per row."""
    return {
        name: [value] * num_rows if "prompt" in name and isinstance(value, str) else value
        for name, value in kwargs.items()
    }


def join_arguments(first: Prepared, second: Prepared) -> Prepared:
    """Join the arguments of two invokes by their rows; ValueError if they are incompatible."""
    if len(first[0]) != len(second[0]):
        raise ValueError(
            f"each invoke must have as many arguments without a name, got {len(first[0])} "
            f"and {len(second[0])}"
        )
    nums = (count_rows(*first), count_rows(*second))
    args = _join(_numbered(first[0]), _numbered(second[0]), nums)
    return tuple(args.values()), _join(first[1], second[1], nums)


def _numbered(args: tuple[Any, ...]) -> dict[str, Any]:
    return {f"argument {index}": value for index, value in enumerate(args)}


def _join(first: dict[str, Any], second: dict[str, Any], nums: tuple[int, int]) -> dict[str, Any]:
    """Join arguments by name: those with rows row by row, others are shared; ``nums``: each invoke's rows."""
    rows = {
        name: _join_rows(name, first, second, nums)
        for name in {**first, **second}
        if _has_rows(name, first.get(name), nums[0]) or _has_rows(name, second.get(name), nums[1])
    }
    shared = [
        {name: value for name, value in invoke.items() if name not in rows} for invoke in (first, second)
    ]
    joined = {**join_shared(*shared), **rows}
    return {name: joined[name] for name in {**first, **second}}


def _has_rows(name: str, value: Any, num_rows: int) -> bool:
    if name == "batch_size" or ("prompt" in name and isinstance(value, list | tuple)):
        return True
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) % num_rows == 0


def _join_rows(name: str, first: dict[str, Any], second: dict[str, Any], nums: tuple[int, int]) -> Any:
    """Return an argument's rows of both invokes; ValueError if they do not fit together."""
    pair = [invoke.get(name) for invoke in (first, second)]
    if "negative_prompt" in name:
        pair = [[""] * num if value is None else value for value, num in zip(pair, nums, strict=True)]
    before, after = pair
    if (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.shape[1:] == after.shape[1:]
    ):
        return torch.cat([before, after.to(before.device)])
    if isinstance(before, int) and isinstance(after, int):
        return before + after
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        return [*before, *after]
    raise ValueError(
        f"every invoke must have {name}, and tensors of one shape, got {_described(before)} "
        f"and {_described(after)}"
    )


def _described(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


_MAX_BLOCKS: Final = 3
"""Guidance repeats the batch twice; guidance by text and image, three times."""


class DiffusionModel(GeneratingMixin, HuggingFaceModel):
    """A diffusion pipeline.

    Its models are modules of this one, under the pipeline's names: ``unet``, ``vae``, ``text_encoder``.

    Attributes:
        automodel: The class of the pipeline.
        pipeline: The pipeline itself, with its scheduler and its tokenizers.
    """

    default_automodel: ClassVar[str] = "DiffusionPipeline"

    def __init__(self, source: Any, *args: Any, automodel: type | str | None = None, **kwargs: Any) -> None:
        """Load a pipeline, or wrap one.

        Args:
            source: A repository, a folder, or a pipeline.
            *args: Passed to ``from_pretrained``.
            automodel: The class that loads it, or its name in diffusers.
            **kwargs: See ``HuggingFaceModel``; others are passed to ``from_pretrained``.

        Raises:
            ImportError: diffusers is not installed.
            ValueError: diffusers has no class of that name.
        """
        self.automodel = class_of(automodel or type(self).default_automodel, diffusers(), "DiffusionPipeline")
        if isinstance(source, diffusers().DiffusionPipeline):
            source = Diffuser(source)
        super().__init__(source, *args, **kwargs)
        if isinstance(source, Diffuser):
            self.repo_id = str(source.pipeline.name_or_path or "") or None

    def _load(self, source: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return Diffuser(self.automodel.from_pretrained(source, *args, **kwargs, **self._revision_option()))

    def _load_meta(self, source: Any, **kwargs: Any) -> torch.nn.Module:
        """Return the pipeline's models without weights, in the dtype that the user has chosen."""
        pipeline = pipeline_without_weights(source, self.automodel, self._hub_options(kwargs), kwargs)
        module = Diffuser(pipeline)
        dtype = kwargs.get("dtype")
        return module.to(dtype) if isinstance(dtype, torch.dtype) else module

    # Inputs.

    def _new_batcher(self) -> Batcher:
        return SpreadBatcher()

    def _has_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(args) or any(kwargs.get(name) is not None for name in INPUTS)

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Return the arguments, each text once per row, and the number of rows; see ``Batchable``."""
        if not self._has_input(inputs, kwargs):
            return without_input(kwargs)
        if inputs and isinstance(inputs[0], str | list | tuple):
            kwargs, inputs = {"prompt": inputs[0], **kwargs}, inputs[1:]
        num_rows = count_rows(inputs, kwargs)
        return inputs, as_lists(kwargs, num_rows), num_rows

    def _batch(self, batched_input: Prepared, *inputs: Any, **kwargs: Any) -> Prepared:
        return join_arguments(batched_input, (inputs, kwargs))

    # Running.

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Run the denoiser once, on tensors, which are moved to its device."""
        if "prompt" in kwargs:
            raise TypeError(
                "a trace runs the model that denoises once, on tensors; to make images of a prompt, "
                "write `with model.generate(prompt, ...)`"
            )
        device = self.device
        moved = [
            value.to(device) if isinstance(value, torch.Tensor) else value
            for value in (*args, *kwargs.values())
        ]
        return super()._run_module(*moved[: len(args)], **dict(zip(kwargs, moved[len(args) :], strict=True)))

    def __nnsight_generate__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline; ``seed`` creates the random generators, see ``generators``."""
        interleaver = self._interleaver
        interleaver.clock = f"{self.path}.{self._diffuser.denoiser}.input"
        batcher = interleaver.batcher
        if isinstance(batcher, SpreadBatcher):
            batcher.copies = frozenset({1, _images_per_prompt(kwargs)})
            batcher.num_blocks = _MAX_BLOCKS
        pipeline = self._diffuser.pipeline
        return self._generate(*args, **with_last_step(pipeline, kwargs, interleaver.end_loops))

    def _generate(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """Run the pipeline; ``seed`` determines the noise of each image, see ``generators``."""
        if self._has_input(args, kwargs):
            kwargs = as_lists(kwargs, count_rows(args, kwargs))
        if seed is not None:
            if kwargs.get("generator") is not None:
                raise TypeError("seed= makes the generators, so pass it or generator=, not both")
            num_images = count_rows(args, kwargs) * _images_per_prompt(kwargs)
            kwargs["generator"] = generators(seed, num_images)
        return self._diffuser.pipeline(*args, **kwargs)

    @property
    def _diffuser(self) -> Diffuser:
        module = self._module
        assert isinstance(module, Diffuser)  # noqa: S101 - both loaders see to it
        return module


def generators(seed: int, num_images: int) -> torch.Generator | list[torch.Generator]:
    """Return a generator per image, seeded ``seed``, ``seed + 1`` …, on the CPU: the same on every device."""
    per_image = [torch.Generator().manual_seed(seed + index) for index in range(num_images)]
    return per_image if num_images > 1 else per_image[0]


def _images_per_prompt(kwargs: dict[str, Any]) -> int:
    return int(kwargs.get("num_images_per_prompt") or 1)
