"""``LanguageModel``: a causal language model with its tokenizer, for text inputs and generation.

The rows of all invokes are padded to one length, and every row computes the same as it would alone. Other
arguments of an invoke or of the trace go to the model's forward or to ``generate``, and apply to all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import TransformersKwargs

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.values import named_arguments, unknown_arguments_error
from nnsight_engine.interleaving.batching import Batcher
from nnsight_engine.modeling.generator import Generator, TokenFeed, rows_per_input, takes_streamer
from nnsight_engine.modeling.mixins.meta import GeneratingMixin
from nnsight_engine.modeling.rows import (
    ROW_INPUTS,
    TOKEN_INPUTS,
    counts_positions,
    filled_left,
    filling_of,
    join_rows,
    join_shared,
    positions,
    read_rows,
    without_input,
)
from nnsight_engine.modeling.spread_rows import SpreadBatcher
from nnsight_engine.modeling.transformers import TransformersModel

Prepared = tuple[tuple[Any, ...], dict[str, Any]]

_MAX_NEW_TOKENS: Final = "max_new_tokens"
_GENERATION_ONLY: Final = frozenset(
    {_MAX_NEW_TOKENS, "min_new_tokens", "do_sample", "num_beams", "temperature"}
)
_OF_ANY_MODEL: Final = frozenset({*TransformersKwargs.__optional_keys__, "return_dict"})


class LanguageModel(GeneratingMixin, TransformersModel):
    """A language model and its tokenizer.

    Attributes:
        tokenizer: Encodes text. Rows are padded on its ``padding_side``.
        generator: Its output is the result of ``generate``; ``generator.streamer.output`` is each new token.
    """

    default_automodel: ClassVar[str] = "AutoModelForCausalLM"
    input_names: ClassVar[tuple[str, ...]] = TOKEN_INPUTS
    """Keyword arguments that form an input."""

    _added_later = ("generator",)

    tokenizer: PreTrainedTokenizerBase
    generator: Envoy

    def __init__(
        self,
        source: Any,
        *args: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load a model and its tokenizer, or wrap both.

        Args:
            source: A repository, a folder, a module, or a config, which yields a model with random weights.
            *args: Passed to ``from_pretrained``.
            tokenizer: The tokenizer, required with a module or a config.
            tokenizer_kwargs: Passed to the tokenizer's ``from_pretrained``, such as ``{"padding_side":
                "right"}``.
            **kwargs: See ``TransformersModel``; others are passed to the model's ``from_pretrained``.

        Raises:
            AttributeError: A module or a config is passed without a tokenizer.
        """
        if tokenizer is None:
            self._check_loads(source, "Tokenizer", "tokenizer")
        super().__init__(source, *args, **kwargs)
        if tokenizer is None:
            tokenizer = self._load_tokenizer({**self._hub_options(kwargs), **(tokenizer_kwargs or {})})
        self.tokenizer = tokenizer
        self._add_envoy(Generator(), "generator")

    def _load_tokenizer(self, options: dict[str, Any]) -> PreTrainedTokenizerBase:
        tokenizer = AutoTokenizer.from_pretrained(self.repo_id, **options)  # nosec B615 # the user's choice
        return self._set_up(tokenizer, options)

    def _set_up(self, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> PreTrainedTokenizerBase:
        """Set the padding side, unless the user has chosen one, and a token for padding."""
        # Not for an encoder: its positions are mostly absolute, and would count the padding.
        if "padding_side" not in options and not getattr(self.config, "is_encoder_decoder", False):
            tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def _check_loads(self, source: Any, what: str, argument: str) -> None:
        """Raise AttributeError if ``source`` is no place from which the tokenizer could be loaded."""
        if not isinstance(source, str | Path):
            name = type(self).__name__
            raise AttributeError(  # noqa: TRY004 - the documented error
                f"{what} not found. If you passed a pre-loaded model to `{name}`, you need to provide a "
                f"{argument} when initializing: `{name}(model, {argument}={argument})`."
            )

    # Inputs.

    def _new_batcher(self) -> Batcher:
        return SpreadBatcher()

    def _has_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(args) or any(kwargs.get(name) is not None for name in self.input_names)

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Return the arguments with tokens as tensors, and the number of rows; see ``Batchable``."""
        if not self._has_input(inputs, kwargs):
            return without_input(kwargs)
        if len(inputs) > 1:
            raise TypeError(
                f"{type(self).__name__} takes one input, got {len(inputs)}: put several texts in a list, "
                "and give other arguments by name"
            )
        arguments = self._with_positions(self._read(*inputs, **kwargs))
        return (), arguments, len(arguments["attention_mask"])

    def _read(self, value: Any = None, /, **kwargs: Any) -> dict[str, Any]:
        fields = dict(value) if isinstance(value, Mapping) else {"input_ids": value}
        return read_rows(self.tokenizer, {**fields, **kwargs})

    def _batch(self, batched_input: Prepared, *inputs: Any, **kwargs: Any) -> Prepared:
        """Add an invoke's rows to the batch, all padded to one length; see ``Batchable``."""
        del inputs  # all prepared arguments have names
        first, second = batched_input[1], kwargs
        rows = join_rows(filling_of(self.tokenizer), _rows(first), _rows(second))
        others = self._join_others(_without_rows(first), _without_rows(second))
        return (), self._with_positions({**rows, **others})

    def _join_others(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments other than rows; they apply to the run, so invokes cannot differ in them."""
        return join_shared(first, second)

    def _with_positions(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Add ``position_ids`` for padded rows, if the model does not compute them itself."""
        mask = arguments["attention_mask"]
        is_per_token = mask.ndim == 2  # not the user's own mask per pair of tokens
        if (
            "position_ids" in arguments
            or not is_per_token
            or bool(mask.all())
            or not counts_positions(self._module)
        ):
            return arguments
        return {**arguments, "position_ids": positions(mask)}

    def _on_device(self, arguments: dict[str, Any]) -> dict[str, Any]:
        device = self.device
        return {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }

    def _check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        # An invoke may make it a generation, and ``generate`` itself refuses what nothing takes.
        if kwargs.get(_MAX_NEW_TOKENS) is None and not _GENERATION_ONLY & kwargs.keys():
            self._refuse_unknown({name: kwargs[name] for name in kwargs if name not in self.input_names})

    def _refuse_unknown(self, arguments: Mapping[str, Any]) -> None:
        """Raise TypeError for an argument that no module takes; the model's forward would ignore it."""
        names = {name for name, value in arguments.items() if value is not None}
        known, takes_others = named_arguments(type(self._module))
        if not takes_others or names <= known:
            return
        kinds = {type(module) for module in self._module.modules()}
        known = known.union(*(named_arguments(kind)[0] for kind in kinds), _OF_ANY_MODEL, ROW_INPUTS)
        unknown = [name for name in arguments if name in names - known - {*self.tokenizer.model_input_names}]
        if unknown:
            near = {*known, *_GENERATION_ONLY}
            raise unknown_arguments_error(unknown, near, f"a trace of {type(self._module).__name__}")

    def _example_input(self) -> dict[str, Any] | None:
        tokens = torch.zeros(1, 2, dtype=torch.long)
        return self._prepare_input(tokens)[1]

    # Running.

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model once; with ``max_new_tokens``, generate."""
        misplaced = _GENERATION_ONLY & kwargs.keys()
        if kwargs.get(_MAX_NEW_TOKENS) is not None:
            return self.__nnsight_generate__(*args, **kwargs)
        if misplaced:
            raise TypeError(
                f"{', '.join(sorted(misplaced))} is for generation, and a trace without {_MAX_NEW_TOKENS}= "
                f"runs the model once: add it, or write `with model.generate(...)`"
            )
        self._refuse_unknown(kwargs)
        return super()._run_module(*args, **self._on_device(kwargs))

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        return module.generate(*args, **self._for_generation(kwargs))

    def __nnsight_generate__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, as ``with model.generate(...)`` does: each call of the model is a step."""
        interleaver = self._interleaver
        interleaver.clock = f"{self.path}.input"
        module: Any = self._module
        batcher = interleaver.batcher
        if isinstance(batcher, SpreadBatcher):
            batcher.copies = rows_per_input(module.generation_config, kwargs)
        if takes_streamer(module.generation_config, kwargs):
            streamer = self.generator.streamer._module  # noqa: SLF001 - an envoy of ours
            kwargs["streamer"] = TokenFeed(streamer, kwargs.get("streamer"))
        # A compiled model would bypass the hooks.
        output = module.generate(*args, **self._for_generation(kwargs), disable_compile=True)
        interleaver.end_loops()
        return self.generator._module(output)  # noqa: SLF001

    def _for_generation(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments on the model's device, padded on the left, and with a padding token."""
        kwargs = self._on_device(kwargs)
        if not getattr(self.config, "is_encoder_decoder", False):
            kwargs = filled_left(kwargs)  # generated tokens follow the last column
        config: Any = kwargs.get("generation_config") or self._module.generation_config
        if kwargs.get("pad_token_id", config.pad_token_id) is None:
            kwargs["pad_token_id"] = filling_of(self.tokenizer).token
        return kwargs


def _rows(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if name in ROW_INPUTS}


def _without_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in ROW_INPUTS}
