"""A client's own names and classes for modules, ``rename=`` and ``envoys=``, in the engine's workers.

A block finds its places in the worker's tree, so what the client calls modules must be known there. It goes
once, when the engine has started: the worker then builds its tree anew, the client's names over ours. The
client's own tree knows the names too; classes live in the worker alone, since there the modules are.
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
    """What a client adds to the tree, in a worker."""

    @staticmethod
    def read(data: bytes) -> Names:
        """Read what ``write`` made; runs the bodies of classes that came as source.

        Raises:
            DecodeError: It is something else.
        """
        plain = decode(data, policy=TRUSTED)
        if not isinstance(plain, dict) or not isinstance(plain.get("rename"), dict):
            raise DecodeError("the message holds no names")
        envoys = plain.get("envoys")
        return Names(plain["rename"], dict(envoys) if isinstance(envoys, list) else envoys)

    def rename_over(self, ours: Mapping[str, str] | None) -> Rename:
        """Return all further names; where both sides give one, it is the client's."""
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
        """Return all classes, ours for modules that the client's leave out."""
        envoys = self.envoys
        given: Mapping[type[torch.nn.Module] | str, type[Envoy]]
        given = {torch.nn.Module: envoys} if isinstance(envoys, type) else envoys or {}
        missing: dict[type[torch.nn.Module] | str, type[Envoy]] = {
            kind: envoy for kind, envoy in ours.items() if not any(base in given for base in kind.__mro__)
        }
        return {**missing, **given}


def add_vocabulary(model: Envoy) -> None:
    """Let a client's classes for the vocabulary do what ours does: the module itself cannot be called."""
    for envoy in model.modules(lambda one: isinstance(one._module, VocabParallelEmbedding)):  # noqa: SLF001 - an envoy of ours
        kind = type(envoy)
        if not issubclass(kind, VocabularyEnvoy):
            object.__setattr__(envoy, "__class__", type(kind.__name__, (kind, VocabularyEnvoy), {}))
