"""What can go wrong with a block in the serving engine, and only there."""

from __future__ import annotations


class CacheLimitError(RuntimeError):
    """The caches of a request keep more than one request may."""

    @classmethod
    def over(cls, max_bytes: int) -> CacheLimitError:
        """They would keep more than this."""
        return cls(
            f"The caches of this request would keep more than {max_bytes:,} bytes. Name the modules, "
            "tracer.cache(modules=[...]), keep a smaller type with dtype=, or start the engine with "
            "limits=EngineLimits(max_cache_bytes=...)."
        )


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
