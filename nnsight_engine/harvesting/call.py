"""``harvest``, which chooses the driver by the model's type."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from api_schemas.operations import Where
from nnsight_engine.datasets.loader import ActivationDataset
from nnsight_engine.datasets.manifest import Dtype
from nnsight_engine.harvesting.local import harvest_local
from nnsight_engine.harvesting.request import HarvestOptions, request_of
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.vllm_backend.vllm import VLLM


class UnsupportedModelError(TypeError):
    """There is no driver for models of this type."""


def harvest(
    model: Any,
    prompts: str | os.PathLike[str] | Iterable[Any],
    to: str | os.PathLike[str],
    *,
    points: str | Sequence[str],
    where: Where | Mapping[str, Any] | None = None,
    reduce: str = "all",
    dtype: Dtype = "float32",
    interventions: Any = None,
    **options: Unpack[HarvestOptions],
) -> ActivationDataset:
    """Write a model's activations on prompts to files, and return the dataset.

    Repeating the call after an interruption computes what is missing; the files are the same as without it.

    Args:
        model: A ``LanguageModel``, whose edits apply, or a ``VLLM`` on this machine, whose worker writes the
            rows that it computes.
        prompts: A path or fsspec URL of JSON lines, Parquet or text, or an iterable of texts, token ids or
            objects with ``text``, ``prompt``, ``messages`` or ``token_ids``.
        to: A folder, or a URL that fsspec opens.
        points: Standard points such as ``layers.4.output`` or ``layers.*.mlp.output``.
        where: Positions of each prompt, as in a request's ``where``; all by default.
        reduce: Which of these positions make rows: ``all``, ``last``, ``mean`` (one row), ``every:K`` or
            ``random:N`` (chosen by the option ``seed``).
        dtype: ``float32``, ``bfloat16``, or ``int8`` with a scale for each row.
        interventions: For a ``VLLM``, a list of operations as in a request's ``interventions``, with their
            vectors; they apply to all prompts. A local model has edits in their place.
        **options: ``seed``; ``max_tokens``, to which longer prompts are cut; ``prompt_format``;
            ``pack_tokens`` and ``pack_prompts``, the largest step; ``shard_tokens`` and ``shard_bytes``;
            ``pending_limit_bytes`` and ``policy`` (``slow`` or ``drop``) for rows that are not written yet;
            ``spool`` and ``retries`` for URLs; ``show_progress``, by default on a terminal.

    Raises:
        UnsupportedModelError: There is no driver for the model.
        SettingsError: An argument has no meaning for a dataset or for this model.
        ManifestMismatchError: ``to`` has a dataset with other settings.
        PromptSourceError: A prompt cannot be read; file and line are named.
        SinkError: ``to`` did not take the files.
    """
    if not isinstance(model, LanguageModel | VLLM):
        raise UnsupportedModelError(
            "harvest() takes a LanguageModel or a VLLM, got "
            f"{type(model).__module__}.{type(model).__qualname__}"
        )
    if model.remote:
        raise UnsupportedModelError(
            "harvest() runs in this process, and this model's traces run on a server: load it without remote="
        )
    request = request_of(
        prompts,
        to,
        points=points,
        where=where,
        reduce=reduce,
        dtype=dtype,
        interventions=interventions,
        options=options,
    )
    if isinstance(model, LanguageModel):
        return harvest_local(model, request)
    driver = importlib.import_module("nnsight_engine.harvesting.vllm")  # which imports vLLM
    dataset: ActivationDataset = driver.harvest_vllm(model, request)
    return dataset
