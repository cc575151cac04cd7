"""The tree of envoys on the worker's model, for blocks that came with requests."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.tokenizers import cached_tokenizer_from_config

from nnsight_engine.envoys.architectures.part_envoys import AttentionEnvoy, GatedMlpEnvoy, MlpEnvoy, UpEnvoy
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.probes import Probes
from nnsight_engine.modeling.wrapper import WrapperModule
from nnsight_engine.vllm_backend.families import ModelPoints
from nnsight_engine.vllm_backend.traces.board import Board
from nnsight_engine.vllm_backend.traces.errors import SandboxedError
from nnsight_engine.vllm_backend.traces.names import Names, add_vocabulary
from nnsight_engine.vllm_backend.traces.points import LOGITS, SAMPLES, StandardNames
from nnsight_engine.vllm_backend.traces.points_kernels import KernelProbes
from nnsight_engine.vllm_backend.traces.points_unembedding import VocabularyEnvoy
from nnsight_engine.vllm_backend.traces.points_worker import WorkerPoints
from nnsight_engine.vllm_backend.traces.stages.elsewhere import (
    EnvoyElsewhere,
    ModuleElsewhere,
    SpanningEnvoy,
    envoy_classes,
    spanning_paths,
)

_NONE: Final[Mapping[str, torch.nn.Module]] = types.MappingProxyType({})


class WorkerModel(StandardNames):
    """What ``model`` is in a block: the modules that vLLM runs, and what it makes behind them.

    ``model.logits.output`` is ``[1, vocabulary]``, what the next token is about to be sampled from, and
    ``model.samples.output`` is ``[1, 1]``, the token sampled. Beside the modules are the standard points, see
    ``points``.
    """

    def __init__(
        self,
        points: ModelPoints,
        config: VllmConfig | None,
        board: Board,
        elsewhere: Mapping[str, torch.nn.Module] = _NONE,
        names: Names | None = None,
        calls: type[EnvoyElsewhere] | None = None,
    ) -> None:
        """Stand for the loaded model.

        Args:
            points: The model's points.
            config: vLLM's; None in a sandbox.
            board: Where the model's calls meet the requests.
            elsewhere: What stands for modules of other pipeline stages, by their paths below the model.
            names: A client's own names and classes.
            calls: Makes the calls of a model all of whose modules are elsewhere.
        """
        names = names or Names()
        envoys = _envoys(points)
        own = envoys | envoy_classes(envoys, elsewhere.values()) | _spanning(points, elsewhere)
        if calls is not None:
            own |= envoy_classes(envoys, [points.model], calls)
        super().__init__(
            points.model,
            interleaver=board,  # type: ignore[arg-type] # stands for all of them
            rename=names.rename_over(_renamed(points)),
            envoys=names.envoys_over(own),
        )
        add_vocabulary(self)
        for path, module in elsewhere.items():
            parent, _, name = path.rpartition(".")
            above = self.get(f"{self.path}.{parent}") if parent else self
            above._add_envoy(module, name)  # noqa: SLF001 - an envoy of ours
        for name in (LOGITS, SAMPLES):
            self._add_envoy(WrapperModule(), name)
        mine = self.__dict__
        mine["_probe_set"] = Probes(self.own_modules(), board, calls_forward=_calls_forward)  # type: ignore[arg-type] # as above
        mine["_kernel_probes"] = KernelProbes(_bare_kernels(points), board)
        mine["_config"] = config
        mine["_board"] = board
        mine["_points"] = WorkerPoints(self, points, board)
        mine["_vocab_size"] = points.vocab_size

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when it is first asked for."""
        config: VllmConfig | None = self.__dict__["_config"]
        if config is None:
            raise SandboxedError.attribute("model", "tokenizer")
        return cached_tokenizer_from_config(config.model_config)

    @property
    def entry(self) -> str:
        """The place where the residual stream begins, where a tap has it; else empty."""
        board: Board = self.__dict__["_board"]
        return board.entry

    def standard(self, name: str) -> Any:
        """Return what has a standard name, see ``EnginePoints.standard``."""
        points: WorkerPoints = self.__dict__["_points"]
        return points.standard(name)

    def token_places(self) -> dict[str, int]:
        """Return the places at which integers are ids of tokens, with how many there are."""
        places = {f"{self.path}.{SAMPLES}.output": self.__dict__["_vocab_size"]}
        for envoy in self.modules():
            if isinstance(envoy._module, VocabParallelEmbedding):  # noqa: SLF001 - an envoy of ours
                places[f"{envoy.path}.input"] = int(envoy._module.org_vocab_size)  # noqa: SLF001
        return places

    def own_modules(self) -> list[tuple[torch.nn.Module, str]]:
        """Return the modules that are here, with their paths."""
        return [
            (envoy._module, str(envoy.path))  # noqa: SLF001 - envoys of ours
            for envoy in self._by_module.values()
            # Transformers' models do call the placeholders, which hand on what they are given.
            if not isinstance(envoy._module, ModuleElsewhere | PPMissingLayer)  # noqa: SLF001
        ]

    @contextlib.contextmanager
    def heard(self, board: Board) -> Iterator[None]:
        """Let a board hear of the modules' calls, and of the operations that blocks look at."""
        self._install()
        board.listen()
        try:
            yield
        finally:
            board.pause()
            self._remove()

    def _install(self) -> None:
        self._probe_set.install()
        self._kernel_probes.install()
        for source in self._sources:
            source.install()

    def forget_sources(self) -> None:
        """Put back the forwards of modules that blocks have looked into since the step began."""
        for source in self._sources:
            source.remove()

    def _remove(self) -> None:
        """Leave the modules as they were."""
        self.forget_sources()
        self._kernel_probes.remove()
        self._probe_set.remove()


def _renamed(points: ModelPoints) -> Mapping[str, str] | None:
    """Return further names: transformers' of the unembedding, where vLLM has none or another."""
    if not hasattr(points.model, "lm_head"):
        return {".model.embed_tokens": "lm_head"}
    return {".lm_head": "embed_out"} if points.family.name == "gpt_neox" else None


def _bare_kernels(points: ModelPoints) -> list[tuple[torch.nn.Module, str]]:
    """Return the attention kernels that no probe of modules hears of, with their paths."""
    if not points.family.is_kernel_bare:
        return []
    family = points.family
    return [
        (points.attention(layer), f"model.{family.layers}.{layer}.{family.kernel}")
        for layer in points.local_layers
    ]


def _envoys(points: ModelPoints) -> dict[type[torch.nn.Module], type[Envoy]]:
    """Return the classes that stand for modules of their own kind."""
    found: dict[type[torch.nn.Module], type[Envoy]] = {VocabParallelEmbedding: VocabularyEnvoy}
    layer, family = points.layers[points.local_layers.start], points.family
    found[type(layer.get_submodule(family.attention))] = AttentionEnvoy
    if family.mlp:
        mlp = layer.get_submodule(family.mlp)
        gated = GatedMlpEnvoy if "mlp.gate" in family.leaves else MlpEnvoy
        found[type(mlp)] = UpEnvoy if hasattr(mlp, "act") else gated
    return found


def _spanning(
    points: ModelPoints, elsewhere: Mapping[str, torch.nn.Module]
) -> dict[type[torch.nn.Module], type[Envoy]]:
    """Return what stands for modules that every pipeline stage runs a part of; the model's is its own."""
    if not elsewhere:
        return {}
    paths = spanning_paths(points.family.layers)[1:]
    return {type(points.model.get_submodule(path)): SpanningEnvoy for path in paths}


def _calls_forward(module: torch.nn.Module) -> bool:
    """Tell whether a class has a ``__call__`` of its own, as those have that vLLM may compile."""
    return type(module).__call__ is not torch.nn.Module.__call__
