"""Snapshot of a loaded model, to restore it after each trace.

Changes to Python objects are undone. Changed weights cannot be restored, only detected. ``is_suspect`` is
cheap and is checked before a trace's answer is sent; ``restore`` reads all weights after it. Neither protects
against malicious code, which runs in the same process.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_modules

from nnsight_engine.local_engine.attributes import AttributeSnapshot, Definitions
from nnsight_engine.local_engine.process_state import ProcessState, renew_globals
from nnsight_engine.local_engine.tensor_checksums import TensorChecksums

if TYPE_CHECKING:
    from nnsight_engine.modeling.language import LanguageModel

_PROBES = "_probes"


class ModelSnapshot:
    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        vars(model)[_PROBES] = None
        global_hooks = [value for name, value in vars(torch_modules).items() if name.startswith("_global_")]
        self._attributes = AttributeSnapshot([model, global_hooks])
        self._definitions = Definitions(
            {type(one) for one in self._attributes.objects} | {torch.Tensor},
            (builtins, torch, torch.nn.functional),
        )
        self._contents = TensorChecksums(self._attributes.tensors)
        self._tokens = _tokens(model.tokenizer)
        self._surroundings = ProcessState()

    @property
    def is_suspect(self) -> bool:
        return self._contents.is_written

    def begin(self) -> None:
        renew_globals()

    def restore(self) -> bool:
        """Undo the changes of a trace; return False if something cannot be undone."""
        is_alone = self._surroundings.restore()
        self._definitions.restore()
        model = self._model
        model._drop_inspection_state()  # noqa: SLF001 - an envoy of ours
        attributes = vars(model)
        probes, attributes[_PROBES] = attributes[_PROBES], None
        if not self._attributes.restore():
            attributes[_PROBES] = probes  # expensive to compute, and the tree has not changed
        return self._contents.restore() and _tokens(model.tokenizer) == self._tokens and is_alone


def _tokens(tokenizer: Any) -> list[Any]:
    """Return the state that determines how text is tokenized, where it is not held by Python objects."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    states = [None if part is None else part.__getstate__() for part in parts]
    added = {number: str(token) for number, token in backend.get_added_tokens_decoder().items()}
    return [backend.get_vocab_size(), added, states]


__all__ = ["ModelSnapshot"]
