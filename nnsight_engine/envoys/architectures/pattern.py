"""Attention probabilities: a value that no module takes or returns, captured inside the attention function.

Right before it attends, an attention module of transformers looks up the implementation named in its config.
While a block waits for the probabilities, ``config`` is replaced by one that names our implementation, which
calls the original and offers the output of its softmax. A module without a request runs unchanged.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.envoys.architectures.module_points import check_fits
from nnsight_engine.envoys.architectures.named_points import PatternError
from nnsight_engine.envoys.eproperty import eproperty
from nnsight_engine.envoys.source.rewrite import rewrite

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy

_IMPLEMENTATION: Final = "nnsight_engine_pattern"
_EAGER: Final = "eager"
_SDPA: Final = "sdpa"
_IMPLEMENTATION_OF_CONFIG: Final = "_attn_implementation"
_EAGER_FUNCTION: Final = "eager_attention_forward"


class _WatchedConfig:
    """An attention module's config, except for the implementation that it names."""

    _attn_implementation = _IMPLEMENTATION

    def __init__(self, config: Any, point: PatternPoint) -> None:
        self.original = config
        self.point = point

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class PatternPoint:
    """The probabilities of one layer's attention, ``[batch, heads, tokens, keys]``."""

    def __init__(self, name: str, envoy: Envoy, out: Envoy, num_heads: int) -> None:
        """Create the point; ``out``, the output projection, is called after the probabilities are used."""
        self.name = name
        self.path = envoy.path
        self.interleaver = envoy.interleaver
        self.shape: tuple[int, ...] = (num_heads, -1)
        self._envoy = envoy
        self._passed_by = f"{out.path}.input"
        self._provider = f"{envoy.path}.pattern"
        self._original: Any = None
        self._eager: Callable[..., Any] | None = None
        self._num_softmax = 0

    @eproperty()
    def pattern(self) -> Any:
        """The probabilities; a request for them makes the module provide them."""
        # Probabilities of calls before this request count as provided, so that a late request is an error.
        calls = self.interleaver.calls
        passed = calls.get(self._passed_by, 0)
        calls[self._provider] = max(passed, calls.get(self._provider, 0))
        self._watch()

    def read(self) -> torch.Tensor:
        """Wait for the probabilities; PatternError if the model's attention implementation yields none."""
        pattern: torch.Tensor = self.pattern
        return pattern

    def write(self, value: torch.Tensor) -> None:
        """Replace the probabilities; PatternError if the model's attention does not use them."""
        if self._implementation() != _EAGER and self.interleaver.current is not None:
            raise self._not_writable()
        self.pattern = check_fits(self.name, value, self.read())

    # Installation.

    def _config(self) -> Any:
        config = self._envoy._module.config
        return config.original if isinstance(config, _WatchedConfig) else config

    def _implementation(self) -> str:
        return str(getattr(self._config(), _IMPLEMENTATION_OF_CONFIG, None))

    def _watch(self) -> None:
        """Replace the module's config, so that the module calls our implementation; see the file."""
        module: Any = self._envoy._module
        if isinstance(module.config, _WatchedConfig):
            return
        implementation = self._implementation()
        if implementation not in {_EAGER, _SDPA}:
            raise PatternError(
                f"{self.name} needs attention that is eager or sdpa, got {implementation!r}; load the model "
                f"with attn_implementation={_EAGER!r}"
            )
        if implementation == _EAGER and self._eager is None:
            self._eager = self._rewritten_eager(module)
        _register()
        self._original = module.config
        module.config = _WatchedConfig(module.config, self)

    def release(self) -> None:
        if self._original is not None:
            self._envoy._module.config = self._original
            self._original = None

    # Attention.

    def attend(self, module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attend with the model's own implementation, and offer the probabilities on the way."""
        watched, module.config = module.config, self._config()  # the function may read the implementation
        try:
            if self._implementation() == _EAGER:
                return self._attend_eagerly(module, query, *args, **kwargs)
            return self._attend_fused(module, query, *args, **kwargs)
        finally:
            module.config = watched

    def _attend_eagerly(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the rewritten eager function, in which ``_run_operation`` offers the softmax's result."""
        assert self._eager is not None  # noqa: S101 - made before the module was watched
        self._num_softmax = 0
        result = self._eager(module, *args, **kwargs)
        if self._num_softmax != 1:
            raise PatternError(
                f"{self.name} is the result of the softmax in {_EAGER_FUNCTION}, which must be called once "
                f"and was called {self._num_softmax} times; load the model with attn_implementation={_SDPA!r}"
            )
        return result

    def _attend_fused(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        """Call fused attention; if a block waits, offer probabilities computed beside it, read-only."""
        if self._is_wanted():
            attended = probabilities(
                query,
                key,
                attention_mask,
                scaling=kwargs.get("scaling"),
                is_causal=_is_causal(module, kwargs.get("is_causal")),
            )
            unedited = attended.clone()
            if not _equal(self._offer(attended), unedited):
                raise self._not_writable()
        return _sdpa()(module, query, key, value, attention_mask, **kwargs)

    def _is_wanted(self) -> bool:
        return get_ident() == self.interleaver.listener and self._provider in self.interleaver.wanted

    def _offer(self, pattern: torch.Tensor) -> torch.Tensor:
        """Serve the probabilities to the blocks that wait for them; return them with the blocks' edits."""
        interleaver = self.interleaver
        if get_ident() != interleaver.listener:
            return pattern
        number = interleaver.calls.get(f"{self.path}.input", 1) - 1
        if self._provider in interleaver.wanted:
            pattern = interleaver.offer(self._provider, number, pattern)
        interleaver.calls[self._provider] = number + 1
        return pattern

    def _rewritten_eager(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return the module's eager function, rewritten so that its calls go through ``_run_operation``."""
        if getattr(module, "reorder_and_upcast_attn", False):
            raise PatternError(
                f"{self.name} is not available with reorder_and_upcast_attn, which uses another attention "
                "function; switch it off in the config"
            )
        for base in type(module).__mro__:
            function = vars(sys.modules[base.__module__]).get(_EAGER_FUNCTION)
            if function is not None:
                return rewrite(function, self._run_operation, f"{self.path}.{_EAGER_FUNCTION}").function
        raise PatternError(f"{self.name}: the module of {type(module).__name__} has no {_EAGER_FUNCTION}")

    def _run_operation(
        self, _name: str, callee: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make one call of the eager function, and offer its result if it is the softmax."""
        value = callee(*args, **kwargs)
        if callee is not torch.nn.functional.softmax:
            return value
        self._num_softmax += 1
        return self._offer(value)

    def _not_writable(self) -> PatternError:
        return PatternError(
            f"{self.name} can be written in eager attention only: {self._implementation()} never forms the "
            f"probabilities; load the model with attn_implementation={_EAGER!r}"
        )


def probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    is_causal: bool,
) -> torch.Tensor:
    """Return the probabilities that fused attention uses, in float32, ``[batch, heads, tokens, keys]``.

    Args:
        query: ``[batch, heads, tokens, head_dim]``.
        key: ``[batch, kv_heads, keys, head_dim]``; each serves heads / kv_heads consecutive query heads.
        mask: Boolean mask of visible keys, or scores to be added; None for all keys, or causal attention.
        is_causal: Whether, without a mask, each of several tokens sees only itself and those before it.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    factor = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    scores = query.float() @ key.float().transpose(-1, -2) * factor
    num_tokens, num_keys = scores.shape[-2:]
    if mask is None:
        if is_causal and num_tokens > 1:
            seen = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
    elif mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    else:
        scores = scores + mask
    # A row without visible keys (padding) gets zeros, as in fused attention.
    return scores.softmax(dim=-1).nan_to_num(0.0)


def _is_causal(module: torch.nn.Module, setting: bool | None) -> bool:  # noqa: FBT001 - transformers' argument
    return setting if setting is not None else bool(getattr(module, "is_causal", True))


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.shape != other.shape:
        return False
    # Fake tensors have no values to compare; the run on real tensors makes the check.
    return hasattr(tensor, "fake_mode") or torch.equal(tensor, other)


def _attend(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Attend in a watched module; transformers calls this by the name of our implementation."""
    config: Any = module.config  # a _WatchedConfig, since it named this function
    return config.point.attend(module, *args, **kwargs)


def _register() -> None:
    from transformers import AttentionInterface  # noqa: PLC0415 - slow to import; loaded by now

    AttentionInterface.register(_IMPLEMENTATION, _attend)


def _sdpa() -> Callable[..., Any]:
    """Return the fused attention function of transformers."""
    from transformers import AttentionInterface  # noqa: PLC0415

    function: Callable[..., Any] = AttentionInterface()[_SDPA]
    return function
