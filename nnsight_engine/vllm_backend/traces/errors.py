"""What can go wrong with a block in the serving engine, and only there."""

from __future__ import annotations


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


class SpreadModuleError(RuntimeError):
    """A block asks for something of a module that is spread over tensor-parallel ranks, and cannot be had."""

    @classmethod
    def place(cls, provider: str) -> SpreadModuleError:
        """Nobody knows how the ranks' parts of a value make a whole."""
        return cls(
            f"With several tensor-parallel ranks `{provider}` cannot be read or written: each rank has a "
            "part of it, and it is not known how the parts make a whole. Take the input or the output of a "
            "module around it, or one rank."
        )

    @classmethod
    def argument(cls, what: str) -> SpreadModuleError:
        """A module is called with what cannot be sent to the other ranks."""
        return cls(
            "a module that is spread over tensor-parallel ranks is called on all of them, with tensors, "
            f"numbers and strings, in tuples, lists and dicts; got {what}"
        )

    @classmethod
    def direct_call(cls, path: str) -> SpreadModuleError:
        """A module is called in a way that the other ranks do not hear of."""
        return cls(
            f"With several tensor-parallel ranks `{path}` is called by a block itself, not by a thread that "
            "it started, and without hook=True: all ranks make the call together"
        )

    @classmethod
    def method(cls, path: str, name: str) -> SpreadModuleError:
        """A method of a module is called that works on a part."""
        return cls(
            f"With several tensor-parallel ranks `{path}.{name}()` works on one rank's part. Call the module "
            "instead, or a module around it, or use one rank."
        )

    @classmethod
    def held(cls, path: str, name: str) -> SpreadModuleError:
        """A tensor of a module's own is a part, and nobody knows of what."""
        return cls(
            f"With several tensor-parallel ranks `{path}.{name}` is one rank's part, and it is not known how "
            "the parts make a whole. Call the module instead, or use one rank."
        )

    @classmethod
    def outside(cls, what: str) -> SpreadModuleError:
        """Something that all ranks must do together is asked for where they do not listen."""
        return cls(
            f"`{what}` is spread over tensor-parallel ranks, which take part in what a block does while it "
            "runs; ask for it in the block itself"
        )
