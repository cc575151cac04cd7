"""A client's own names and classes for modules, ``rename=`` and ``envoys=``, in the engine's workers.

A block finds its places in the worker's tree, so what the client calls modules must be known there. It goes
once, when the engine has started: the worker then builds its tree anew, the client's names over ours. The
client's own tree knows the names too; classes live in the worker alone, since there the modules are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from nnsight_engine.envoys.aliases import Rename
from nnsight_engine.envoys.envoy import Envoy, EnvoyMap
from nnsight_engine.vllm_backend.traces.points_unembedding import VocabularyEnvoy
from nnsight_engine.wire import TRUSTED, DecodeError, decode, encode


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """What a client adds to the tree.

    Attributes:
        rename: Further names for modules, see ``envoys.aliases``.
        envoys: The classes that stand for modules: by vLLM's class, or one for all.
    """

    rename: Rename | None = None
    envoys: EnvoyMap = None

    def write(self) -> bytes | None:
        """Return them as a message, None if there are none.

        Raises:
            EncodeError: Something in them cannot travel.
        """
        if not self.rename and self.envoys is None:
            return None
        envoys: Any = self.envoys
        if isinstance(envoys, Mapping):
            envoys = list(envoys.items())
        return encode({"rename": dict(self.rename or {}), "envoys": envoys})

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
        """Return all classes, ours for modules that the client's leave out.

        What our class of the vocabulary does, the client's does too: the module itself cannot be called.
        """
        envoys = self.envoys
        given = {torch.nn.Module: envoys} if isinstance(envoys, type) else dict(envoys or {})
        left = {
            kind: envoy for kind, envoy in ours.items() if not any(base in given for base in kind.__mro__)
        }
        mixed = {
            kind: _mixed(envoy)
            for kind, envoy in given.items()
            if issubclass(kind, VocabParallelEmbedding) and not issubclass(envoy, VocabularyEnvoy)
        }
        for_all = next((given[base] for base in VocabParallelEmbedding.__mro__ if base in given), None)
        if for_all is not None and not issubclass(for_all, VocabularyEnvoy):
            mixed[VocabParallelEmbedding] = _mixed(for_all)
        return {**left, **given, **mixed}


def _mixed(envoy: type[Envoy]) -> type[Envoy]:
    return type(envoy.__name__, (envoy, VocabularyEnvoy), {})


def check_envoys(envoys: Any) -> None:
    """Check what a client gave as ``envoys``.

    Raises:
        TypeError: It is no class of envoys, nor a mapping from modules' classes to such.
    """
    classes = list(envoys.values()) if isinstance(envoys, Mapping) else [envoys]
    keys = list(envoys) if isinstance(envoys, Mapping) else []
    fits = all(isinstance(one, type) and issubclass(one, Envoy) for one in classes)
    if envoys is not None and not (fits and all(isinstance(key, type) for key in keys)):
        raise TypeError(
            "envoys is a subclass of Envoy, or maps classes of vLLM's modules to such, "
            f"{{LlamaMLP: MyEnvoy}}; got {envoys!r}"
        )
