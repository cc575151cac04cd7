"""The tree of envoys over the worker's model, for blocks that arrive with requests.

``rename=`` and ``envoys=`` of a client are sent once, after the engine has started, and the tree is rebuilt
with them taking precedence. The classes exist in the worker only, where the modules are.

Some models call attention kernels by their ``forward``, which module probes do not see; vLLM's Transformers
backend does so. So ``forward`` is replaced on the instance while the model runs in a traced step.

vLLM's unembedding cannot be called: its weights may be sharded over ranks, its rows are padded, and
``forward`` raises. ``model.lm_head(hidden)`` in a block computes logits of a value of the block's own. With
tied weights the same module also embeds tokens, when it is called with token ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.tokenizers import cached_tokenizer_from_config

from nnsight_engine.envoys.architectures.views import AttentionEnvoy, GatedMlpEnvoy, MlpEnvoy, UpEnvoy
from nnsight_engine.envoys.envoy import Envoy, EnvoyMap
from nnsight_engine.envoys.module_options import Rename
from nnsight_engine.envoys.probes import Probes
from nnsight_engine.serialization import TRUSTED, DecodeError, decode
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.module_tree import ClientNames
from nnsight_engine.vllm_backend.traces.errors import NestedTraceError, SandboxedError
from nnsight_engine.vllm_backend.traces.points import SAMPLES, StandardNames
from nnsight_engine.vllm_backend.traces.points_worker import WorkerPoints
from nnsight_engine.vllm_backend.traces.remote_modules import (
    RemoteModule,
    RemoteModuleEnvoy,
    SpanningEnvoy,
    envoy_classes,
    spanning_paths,
)
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher


class VocabularyEnvoy(Envoy):
    """The envoy of vLLM's embedding or unembedding."""

    def _apply_to_values(self, *args: Any, **kwargs: Any) -> Any:
        """Unembed ``[..., hidden]``, without scales and soft caps of the model's logits, or embed tokens."""
        argument = args[0] if len(args) == 1 and not kwargs else None
        if not (isinstance(argument, torch.Tensor) and argument.is_floating_point()):
            return super()._apply_to_values(*args, **kwargs)
        module: Any = self._module
        logits = module.quant_method.apply(module, argument, bias=getattr(module, "bias", None))
        if module.tp_size > 1:
            logits = tensor_model_parallel_all_gather(logits)
        return logits[..., : module.org_vocab_size]


@dataclasses.dataclass(frozen=True, slots=True)
class Names(ClientNames):
    @staticmethod
    def read(data: bytes) -> Names:
        """Decode the output of ``write``; this runs bodies of classes sent as source. Raises DecodeError."""
        plain = decode(data, policy=TRUSTED)
        if not isinstance(plain, dict) or not isinstance(plain.get("rename"), dict):
            raise DecodeError("the message holds no names")
        envoys = plain.get("envoys")
        return Names(plain["rename"], dict(envoys) if isinstance(envoys, list) else envoys)

    def rename_over(self, ours: Mapping[str, str] | None) -> Rename:
        """Return the client's names by path, and the engine's (``ours``) that the client has not taken."""
        aliases: dict[str, list[str]] = {
            path: [names] if isinstance(names, str) else list(names)
            for path, names in (self.rename or {}).items()
        }
        taken = {name.removeprefix(".") for names in aliases.values() for name in names}
        for path, name in (ours or {}).items():
            if name not in taken:
                aliases.setdefault(path, []).append(name)
        return aliases

    def envoys_over(self, ours: Mapping[type[torch.nn.Module], type[Envoy]]) -> EnvoyMap:
        """Return the client's envoy classes, and the engine's (``ours``) for modules these do not cover."""
        envoys = self.envoys
        chosen: Mapping[type[torch.nn.Module] | str, type[Envoy]]
        chosen = {torch.nn.Module: envoys} if isinstance(envoys, type) else envoys or {}
        missing: dict[type[torch.nn.Module] | str, type[Envoy]] = {
            kind: envoy for kind, envoy in ours.items() if not any(base in chosen for base in kind.__mro__)
        }
        return {**missing, **chosen}


def add_vocabulary(model: Envoy) -> None:
    """Mix ``VocabularyEnvoy`` into a client's classes for the vocabulary; vLLM's module is not callable."""
    for envoy in model.modules(lambda candidate: isinstance(candidate._module, VocabParallelEmbedding)):  # noqa: SLF001 - an envoy of ours
        kind = type(envoy)
        if not issubclass(kind, VocabularyEnvoy):
            object.__setattr__(envoy, "__class__", type(kind.__name__, (kind, VocabularyEnvoy), {}))


_NONE: Final[Mapping[str, torch.nn.Module]] = types.MappingProxyType({})


class WorkerModel(StandardNames):
    """The object that ``model`` refers to in a block: vLLM's modules, the logits and the sampled tokens.

    ``model.logits`` is ``[1, vocabulary]``, the logits from which the next token is about to be
    sampled. ``model.samples`` is ``[1, 1]``, the sampled token. Beside the modules are the standard
    points, see ``points``.
    """

    def __init__(
        self,
        points: ModelPoints,
        config: VllmConfig | None,
        dispatcher: TraceDispatcher,
        elsewhere: Mapping[str, torch.nn.Module] = _NONE,
        names: Names | None = None,
        calls: type[RemoteModuleEnvoy] | None = None,
    ) -> None:
        """Build the tree over the loaded model.

        Args:
            config: None in a sandbox process.
            elsewhere: Stand-ins for modules of other pipeline stages, by their paths below the model.
            calls: The envoy class that makes the calls if all modules are remote (in a sandbox).
        """
        names = names or Names()
        envoys = _envoys(points)
        classes = envoys | envoy_classes(envoys, elsewhere.values()) | _spanning(points, elsewhere)
        if calls is not None:
            classes |= envoy_classes(envoys, [points.model], calls)
        super().__init__(
            points.model,
            interleaver=dispatcher,  # type: ignore[arg-type] # stands for all of them
            rename=names.rename_over(_renamed(points)),
            envoys=names.envoys_over(classes),
        )
        add_vocabulary(self)
        for path, module in elsewhere.items():
            parent, _, name = path.rpartition(".")
            above = self.get(f"{self.path}.{parent}") if parent else self
            above._add_envoy(module, name)  # noqa: SLF001 - an envoy of ours
        self._add_values()
        mine = self.__dict__
        bare = _bare_kernels(points)
        mine["_probe_set"] = Probes(
            self.own_modules(),
            dispatcher,  # type: ignore[arg-type] # as above
            calls_forward=lambda module: module in bare or _calls_forward(module),
        )
        mine["_config"] = config
        mine["_dispatcher"] = dispatcher
        mine["_points"] = WorkerPoints(self, points, dispatcher)
        mine["_vocab_size"] = points.vocab_size
        mine["_model_points"] = points

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded on first access."""
        config: VllmConfig | None = self.__dict__["_config"]
        if config is None:
            raise SandboxedError.attribute("model", "tokenizer")
        return cached_tokenizer_from_config(config.model_config)

    @property
    def entry(self) -> str:
        dispatcher: TraceDispatcher = self.__dict__["_dispatcher"]
        return dispatcher.entry

    def standard(self, name: str) -> Any:
        points: WorkerPoints = self.__dict__["_points"]
        return points.standard(name)

    def token_places(self) -> dict[str, int]:
        """Return the places whose integers blocks can change (tokens, experts), with how many there are."""
        places = {f"{self.path}.{SAMPLES}.output": self.__dict__["_vocab_size"]}
        for envoy in self.modules():
            if isinstance(envoy._module, VocabParallelEmbedding):  # noqa: SLF001 - an envoy of ours
                places[f"{envoy.path}.input"] = int(envoy._module.org_vocab_size)  # noqa: SLF001
        points: ModelPoints = self.__dict__["_model_points"]
        return places | {f"{self.path}.{path}.output": count for path, count in points.choices().items()}

    def _check_runs(self, method: str) -> None:
        raise NestedTraceError.calling(method)

    def own_modules(self) -> list[tuple[torch.nn.Module, str]]:
        """Return the modules that run on this worker, with their paths: no stand-ins and no placeholders."""
        return [
            (envoy._module, str(envoy.path))  # noqa: SLF001 - envoys of ours
            for envoy in self._by_module.values()
            # Transformers' models call the placeholders as well, which return their input unchanged.
            if not isinstance(envoy._module, RemoteModule | PPMissingLayer)  # noqa: SLF001
        ]

    @contextlib.contextmanager
    def observed_by(self, dispatcher: TraceDispatcher) -> Iterator[None]:
        """Offer ``dispatcher`` the values of all module calls in this context, in which the model runs."""
        self._install()
        dispatcher.listen()
        try:
            yield
        finally:
            dispatcher.pause()
            self._remove()

    def _install(self) -> None:
        self._probe_set.install()
        for source in self._sources:
            source.install()

    def forget_sources(self) -> None:
        """Restore the ``forward`` of the modules whose source blocks have inspected since the step began."""
        for source in self._sources:
            source.remove()

    def _remove(self) -> None:
        self.forget_sources()
        self._probe_set.remove()


def _renamed(points: ModelPoints) -> Mapping[str, str] | None:
    """Return additional names: transformers' name of the unembedding where vLLM has none or another one."""
    if not hasattr(points.model, "lm_head"):
        return {".model.embed_tokens": "lm_head"}
    return {".lm_head": "embed_out"} if points.family.name == "gpt_neox" else None


def _bare_kernels(points: ModelPoints) -> set[torch.nn.Module]:
    """Return the attention kernels whose ``forward`` the model calls directly, so that hooks do not run."""
    if not points.family.is_kernel_bare:
        return set()
    blocks = points.layout.blocks
    return {points.attention(layer) for layer in points.local_layers if blocks[layer].kernel}


def _envoys(points: ModelPoints) -> dict[type[torch.nn.Module], type[Envoy]]:
    """Return the envoy classes of the vocabulary, attention and MLP modules, by the modules' classes."""
    classes: dict[type[torch.nn.Module], type[Envoy]] = {VocabParallelEmbedding: VocabularyEnvoy}
    for layer in points.local_layers:
        module, block = points.layers[layer], points.layout.blocks[layer]
        if block.kernel:
            classes[type(module.get_submodule(block.attention))] = AttentionEnvoy
        if block.mlp and "mlp.up" in block.leaves:
            mlp = module.get_submodule(block.mlp)
            gated = GatedMlpEnvoy if "mlp.gate" in block.leaves else MlpEnvoy
            classes[type(mlp)] = UpEnvoy if hasattr(mlp, "act") else gated
    return classes


def _spanning(
    points: ModelPoints, elsewhere: Mapping[str, torch.nn.Module]
) -> dict[type[torch.nn.Module], type[Envoy]]:
    """Return the envoy classes of the modules around the layers, of which each stage runs a part."""
    if not elsewhere:
        return {}
    paths = spanning_paths(points.family.layers)[1:]  # without the model's own, the empty path
    return {type(points.model.get_submodule(path)): SpanningEnvoy for path in paths}


def _calls_forward(module: torch.nn.Module) -> bool:
    """Return whether a class overrides ``__call__``, as classes do that vLLM may compile."""
    return type(module).__call__ is not torch.nn.Module.__call__
