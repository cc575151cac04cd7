"""The driver for a local ``LanguageModel``: each pack is one trace, which ends at the last point."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers

import nnsight_engine
from api_schemas.points import ENCODER_BLOCK
from nnsight_engine.core.model_spec import STATE
from nnsight_engine.core.tensors import hash_of_weights
from nnsight_engine.datasets.loader import ActivationDataset, load
from nnsight_engine.datasets.manifest import (
    EngineIdentity,
    Interventions,
    Manifest,
    ModelIdentity,
    Point,
    SettingsError,
)
from nnsight_engine.datasets.plan import (
    PlannedShard,
    Planner,
    RowSelection,
    Tokens,
    check_prompts,
    remaining_shards,
)
from nnsight_engine.datasets.shards import PromptRows
from nnsight_engine.datasets.writer import DatasetWriter
from nnsight_engine.harvesting.driver import (
    Display,
    Encoder,
    by_ids,
    names_of,
    unknown_point,
)
from nnsight_engine.harvesting.request import HarvestRequest
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.messages import fingerprint_of
from nnsight_engine.remote_backend.values.object_references import reference_of
from nnsight_engine.remote_backend.values.outcomes import SentPart
from nnsight_engine.serialization import encode_trace


def harvest_local(model: LanguageModel, request: HarvestRequest) -> ActivationDataset:
    """Write a local model's dataset, or what is missing of it: a trace in this process for each pack."""
    if request.interventions is not None:
        raise SettingsError(
            "a local model takes no `interventions`: change it with `with model.edit(inplace=True):`, whose "
            "blocks run here too"
        )
    model.dispatch()
    settings = request.rows(_points(model, request.points), by_ids(request.where, model.tokenizer))
    selection = RowSelection(settings)
    manifest = Manifest(
        model=_identity(model),
        engine=EngineIdentity(
            "transformers",
            {
                "nnsight_engine": nnsight_engine.__version__,
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
            },
        ),
        tokenizer=str(model.tokenizer.name_or_path),
        source=request.prompts.identity,
        rows=settings,
        plan=request.plan,
        interventions=_edits(model),
    )
    config: Any = model.config
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    encode = Encoder(model.tokenizer, settings.max_tokens, longest)
    with Display(show=request.options.get("show_progress")) as display:
        with DatasetWriter(request.to, manifest, **request.writer) as writer:
            if writer.is_complete:
                check_prompts(request.prompts, writer.manifest.shards)
            else:
                shards = remaining_shards(
                    request.prompts,
                    Planner(manifest.plan, settings),
                    completed=writer.completed,
                    encode=encode,
                )
                steps = _Steps(model, settings.points, selection)
                for shard in shards:
                    _run_shard(shard, steps, writer, display)
        display.show(writer.progress())
    _raise_failure(writer)
    return load(request.to)


def _run_shard(shard: PlannedShard, steps: _Steps, writer: DatasetWriter, display: Display) -> None:
    """Run a shard's packs and hand their rows to the writer's thread."""
    writer.begin(shard)
    first_prompt = shard.first_prompt
    for pack in shard.packs:
        if writer.policy == "slow":
            writer.wait_for_room()
        _raise_failure(writer)
        for rows in steps.run(first_prompt, pack):
            writer.put(rows)
        first_prompt += len(pack)
        display.show(writer.progress())


def _raise_failure(writer: DatasetWriter) -> None:
    failure = writer.progress().failure
    if failure is not None:
        raise failure


class _Steps:
    """Runs packs and yields the rows of their prompts."""

    def __init__(self, model: LanguageModel, points: list[Point], selection: RowSelection) -> None:
        self._model = model
        self._points = points
        self._selection = selection
        self._pads_left = model.tokenizer.padding_side == "left"

    def run(self, first_prompt: int, pack: list[Tokens]) -> Iterator[PromptRows]:
        """Yield the rows of a pack's prompts, whose numbers follow each other from ``first_prompt``."""
        positions_of_prompts = [
            self._selection.positions(first_prompt + index, tokens) for index, tokens in enumerate(pack)
        ]
        values = self._values(pack, positions_of_prompts)
        end = 0
        for index, (tokens, positions) in enumerate(zip(pack, positions_of_prompts, strict=True)):
            start, end = end, end + len(positions)
            prompt_values = {name: value[start:end] for name, value in values.items()}
            if self._selection.is_mean and len(positions):
                prompt_values = {
                    name: value.float().mean(0, keepdim=True) for name, value in prompt_values.items()
                }
            yield PromptRows(first_prompt + index, *self._selection.index(positions, tokens), prompt_values)

    def _values(self, pack: list[Tokens], positions_of_prompts: list[Tokens]) -> dict[str, torch.Tensor]:
        """Return the rows of all prompts at these positions, after each other, ``[rows, width]`` by point."""
        if not any(map(len, positions_of_prompts)):
            return {point.name: torch.zeros(0, point.width) for point in self._points}
        nonempty = [
            (tokens, positions)
            for tokens, positions in zip(pack, positions_of_prompts, strict=True)
            if len(tokens)
        ]
        longest = max(len(tokens) for tokens, _ in nonempty)
        prompt_indexes = torch.from_numpy(
            np.repeat(np.arange(len(nonempty)), [len(positions) for _, positions in nonempty])
        )
        columns = torch.from_numpy(
            np.concatenate(
                [
                    positions + (longest - len(tokens) if self._pads_left else 0)
                    for tokens, positions in nonempty
                ]
            )
        )
        names, widths = [point.name for point in self._points], [point.width for point in self._points]
        values: dict[str, torch.Tensor] = {}
        model = self._model
        with torch.no_grad(), model.trace([tokens.tolist() for tokens, _ in nonempty]) as tracer:
            for name, width in zip(names, widths, strict=True):
                value = model.points[name]
                values[name] = value[prompt_indexes.to(value.device), columns.to(value.device)].reshape(
                    -1, width
                )
            tracer.stop()
        return values


def _points(model: LanguageModel, patterns: Any) -> list[Point]:
    """Return the points in the order in which the model computes them; each has a row for each token."""
    shapes = model.points()
    num_layers = 1 + max(
        (int(name.split(".")[1]) for name in shapes if name.startswith("layers.")), default=-1
    )
    names = set(names_of(patterns, num_layers))
    for name in sorted(names):
        shape = shapes.get(name)
        encoder = ENCODER_BLOCK.partition(".")[0]
        if shape is None or -1 in shape or name.endswith(f".{STATE}") or name.startswith(encoder):
            raise unknown_point(name)
    return [Point(name, int(np.prod(shape))) for name, shape in shapes.items() if name in names]


def _identity(model: LanguageModel) -> ModelIdentity:
    module = model._module  # noqa: SLF001 - an envoy of ours
    digest = hash_of_weights(fingerprint_of(module.config), module)
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    return ModelIdentity(model.repo_id or "", digest, model.revision or "", dtype)


def _edits(model: LanguageModel) -> Interventions:
    """Return the model's inplace edits with a hash over their blocks, encoded as a trace is for a server."""
    edits = model._default_mediators  # noqa: SLF001 - an envoy of ours
    if not edits:
        return Interventions()
    blocks = [SentPart.alone(edit.info).as_sent() for edit in edits]
    data = encode_trace(blocks, reference=lambda value: reference_of(value, model, []))
    return Interventions(hashlib.sha256(data).hexdigest(), [{"op": "edit"} for _ in edits])
