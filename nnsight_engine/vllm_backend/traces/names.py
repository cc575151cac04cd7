"""A client's own names and envoy classes for modules, ``rename=`` and ``envoys=``, in the engine's workers.

They are sent once, after the engine has started, and the worker rebuilds its tree with them taking
precedence. The classes exist in the worker only, where the modules are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from nnsight_engine.envoys.aliases import Rename
from nnsight_engine.envoys.envoy import Envoy, EnvoyMap
from nnsight_engine.serialization import TRUSTED, DecodeError, decode
from nnsight_engine.vllm_backend.client_names import ClientNames
from nnsight_engine.vllm_backend.traces.points_unembedding import VocabularyEnvoy


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
        """Return all additional names; where both sides define one, the client's takes precedence."""
        given: dict[str, list[str]] = {
            path: [names] if isinstance(names, str) else list(names)
            for path, names in (self.rename or {}).items()
        }
        taken = {name.removeprefix(".") for names in given.values() for name in names}
        for path, name in (ours or {}).items():
            if name not in taken:
                given.setdefault(path, []).append(name)
        return given

    def envoys_over(self, ours: Mapping[type[torch.nn.Module], type[Envoy]]) -> EnvoyMap:
        """Return all envoy classes; ours only for modules that the client's do not cover."""
        envoys = self.envoys
        given: Mapping[type[torch.nn.Module] | str, type[Envoy]]
        given = {torch.nn.Module: envoys} if isinstance(envoys, type) else envoys or {}
        missing: dict[type[torch.nn.Module] | str, type[Envoy]] = {
            kind: envoy for kind, envoy in ours.items() if not any(base in given for base in kind.__mro__)
        }
        return {**missing, **given}


def add_vocabulary(model: Envoy) -> None:
    """Mix ``VocabularyEnvoy`` into a client's classes for the vocabulary; vLLM's module is not callable."""
    for envoy in model.modules(lambda one: isinstance(one._module, VocabParallelEmbedding)):  # noqa: SLF001 - an envoy of ours
        kind = type(envoy)
        if not issubclass(kind, VocabularyEnvoy):
            object.__setattr__(envoy, "__class__", type(kind.__name__, (kind, VocabularyEnvoy), {}))
