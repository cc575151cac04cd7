"""What can go wrong with a block in the serving engine, and only there."""

from __future__ import annotations

from collections.abc import Collection


class EditLimitError(RuntimeError):
    """The engine keeps as many edits as it may."""

    @classmethod
    def over(
        cls, name: str, num_edits: int, max_edits: int, num_bytes: int, max_bytes: int
    ) -> EditLimitError:
        """There would be too many, or they would have too many bytes."""
        return cls(
            f"with {name!r} the engine would keep {num_edits} edits of {num_bytes:,} bytes; it takes "
            f"{max_edits} of {max_bytes:,} together. Remove some, model.remove_edit(name), or start it with "
            "limits=EngineLimits(max_edits=..., max_edit_bytes=...)."
        )


class UnknownEditError(LookupError):
    """A request chose an edit that the engine does not have, or has another of that name."""


class ChunkedPromptError(RuntimeError):
    """A prompt was computed in chunks, and what a block wants of it needs the whole at once."""

    @classmethod
    def reading(cls, provider: str, num_chunks: int) -> ChunkedPromptError:
        """A second place is read, which the first chunks have passed."""
        return cls(
            f"The prompt was computed in {num_chunks} chunks, so only the first place that a block asks for "
            f"can be gathered whole; `{provider}` was passed by the first chunks before the block asked. "
            "Start the engine with max_num_batched_tokens as long as the longest prompt."
        )

    @classmethod
    def writing(cls, provider: str, num_chunks: int) -> ChunkedPromptError:
        """What is written depends on all of the prompt, whose first chunks are gone."""
        return cls(
            f"The prompt was computed in {num_chunks} chunks, so `{provider}` cannot be changed by what a "
            "block computes from all of it: the first chunks have passed. Assign a value that the block has "
            "from the start, or start the engine with max_num_batched_tokens as long as the longest prompt."
        )


class LostTraceError(RuntimeError):
    """The engine has nothing of a request that it has run."""

    @classmethod
    def of(cls, missing: Collection[int]) -> LostTraceError:
        """Say of which blocks."""
        return cls(
            f"The engine returned nothing of {len(missing)} of the trace's blocks, the first being number "
            f"{min(missing)}: too many traces waited to be collected, or its worker could not read the "
            "request. Run the trace again."
        )


class TraceBytesError(RuntimeError):
    """A block holds more of the worker's memory than one request may."""

    @classmethod
    def holding(cls, saved_bytes: int, kept_bytes: int, max_bytes: int) -> TraceBytesError:
        """Say how much of what."""
        return cls(
            f"The block has saved {saved_bytes} bytes, and {kept_bytes} are kept for what it writes and "
            f"gathers; one request may hold {max_bytes}. Save fewer places or positions (a view such as "
            "output[-1] keeps the whole of output: clone it), or start the engine with a higher "
            "EngineLimits(max_trace_bytes=...)."
        )
