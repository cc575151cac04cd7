"""``VisionLanguageModel``: a language model with image and video inputs.

The processor's outputs have as many rows as there are images or parts of them, not one per text, so the
images of several invokes are concatenated in the order of their placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin

from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.modeling.rows import ROW_INPUTS, TOKEN_INPUTS, join_shared, read_rows

_MEDIA: Final = ("images", "videos")


class VisionLanguageModel(LanguageModel):
    """A language model with image and video inputs, and its processor.

    Text is passed as to a ``LanguageModel``, with ``images=`` or ``videos=`` in the forms that the processor
    accepts, and with the model's own placeholder where an image belongs.

    Attributes:
        processor: Prepares texts and images; its tokenizer is ``tokenizer``.
    """

    default_automodel: ClassVar[str] = "AutoModelForImageTextToText"
    input_names: ClassVar[tuple[str, ...]] = (*TOKEN_INPUTS, "text", *_MEDIA)

    processor: ProcessorMixin

    def __init__(
        self,
        source: Any,
        *args: Any,
        processor: ProcessorMixin | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load a model and its processor, or wrap both.

        Args:
            source: A repository, a folder, a module, or a config, which yields a model with random weights.
            *args: Passed to ``from_pretrained``.
            processor: The processor, required with a module or a config.
            processor_kwargs: Passed to the processor's ``from_pretrained``.
            **kwargs: See ``LanguageModel``.

        Raises:
            AttributeError: A module or a config is passed without a processor.
        """
        if processor is None:
            self._check_loads(source, "Processor", "processor")
        self._processor_options = processor_kwargs or {}
        self.processor = processor
        kwargs.setdefault("tokenizer", getattr(processor, "tokenizer", None))
        super().__init__(source, *args, **kwargs)
        if self.processor is None:  # a tokenizer was passed, so _load_tokenizer did not load the processor
            self.processor = self._load_processor(self._hub_options(kwargs))

    def _load_tokenizer(self, options: dict[str, Any]) -> PreTrainedTokenizerBase:
        self.processor = self._load_processor(options)
        tokenizer: PreTrainedTokenizerBase = self.processor.tokenizer
        return self._set_up(tokenizer, {**options, **self._processor_options})

    def _load_processor(self, options: dict[str, Any]) -> ProcessorMixin:
        options = {**options, **self._processor_options}
        return AutoProcessor.from_pretrained(self.repo_id, **options)  # nosec B615 # the user's choice

    def _read(self, value: Any = None, /, **kwargs: Any) -> dict[str, Any]:
        """Return the model's arguments: with images or videos, those that the processor makes of them."""
        fields = {**(value if isinstance(value, Mapping) else {"text": value}), **kwargs}
        media = {name: fields.pop(name) for name in _MEDIA if name in fields}
        media = {name: items for name, items in media.items() if items is not None}
        text = fields.pop("text", None)
        if not media:
            return super()._read(fields if text is None else {"input_ids": text, **fields})
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not all(isinstance(item, str) for item in texts):
            raise TypeError(
                f"{' and '.join(media)} need a text with the processor's mark for each, got {text!r}; "
                "tokens with images are passed as the processor returns them"
            )
        features = self.processor(text=list(texts), **media, padding=True, return_tensors="pt")
        return read_rows(self.tokenizer, {**features, **fields})

    def _join_others(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        """Join what the processor made of two invokes' images; other arguments have to be equal."""
        names = set(getattr(self.processor, "model_input_names", ())) - ROW_INPUTS
        shared = {name: value for name, value in second.items() if name not in names}
        joined = join_shared({name: value for name, value in first.items() if name not in names}, shared)
        for name in names:
            features = [invoke[name] for invoke in (first, second) if invoke.get(name) is not None]
            if features:
                joined[name] = _concatenated(name, features)
        return joined


def _concatenated(name: str, features: list[Any]) -> Any:
    """Concatenate an argument of one or two invokes along its first axis; ValueError if it is impossible."""
    if len(features) == 1:
        return features[0]
    first, second = features
    if isinstance(first, list):
        return [*first, *second]
    if first.shape[1:] != second.shape[1:]:
        raise ValueError(
            f"{name} of all invokes must have one shape, got {tuple(first.shape)} and {tuple(second.shape)}; "
            "resize the images, or trace apart"
        )
    return torch.cat([first, second.to(first.device)])
