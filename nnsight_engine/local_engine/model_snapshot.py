"""A model as it was loaded, whatever the last trace has done to it.

A trace's code can do anything to the model that it is given. What it does to objects of Python is undone
here: attributes, modules, hooks, modes, configurations, methods of the model's classes, settings of torch.
Weights that were changed cannot be given back; that is noticed, and whoever owns the process loads the model
anew.

``is_suspect`` costs nothing and is asked before a trace's answer; ``restore`` reads all weights, and has its
time between the answer and the next trace. Neither is a defence against code that means to deceive, which
lives in the same process.
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
    """Remembers how a model was, and makes it so again.

    Args:
        model: The model, with its weights.
    """

    def __init__(self, model: LanguageModel) -> None:
        """Take note of everything."""
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
        """Whether weights were written to since this was last asked, as far as torch has seen it."""
        return self._contents.is_written

    def begin(self) -> None:
        """Make ready for a trace: its random numbers are its own."""
        renew_globals()

    def restore(self) -> bool:
        """Undo what a trace has done; False if something is left that cannot be undone."""
        is_alone = self._surroundings.restore()
        self._definitions.restore()
        model = self._model
        model._forget_looks()  # noqa: SLF001 - an envoy of ours
        attributes = vars(model)
        probes, attributes[_PROBES] = attributes[_PROBES], None
        if not self._attributes.restore():
            attributes[_PROBES] = probes  # they are dear, and those of the same tree
        return self._contents.restore() and _tokens(model.tokenizer) == self._tokens and is_alone


def _tokens(tokenizer: Any) -> list[Any]:
    """Return what changes with how text is read, where that is not written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    states = [None if part is None else part.__getstate__() for part in parts]
    added = {number: str(token) for number, token in backend.get_added_tokens_decoder().items()}
    return [backend.get_vocab_size(), added, states]


__all__ = ["ModelSnapshot"]
