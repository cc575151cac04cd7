"""What can go wrong with a block in the serving engine, and only there."""

from __future__ import annotations


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


class StageError(RuntimeError):
    """A block asked one pipeline stage for something that only another one has."""

    @classmethod
    def attribute(cls, path: str, name: str, stage: int) -> StageError:
        """Something of a module that does not travel: a weight, for one."""
        return cls(
            f"`{path}.{name}` is on pipeline stage {stage}, and blocks run on the last one: only values and "
            "calls travel between stages. Read what the module takes and returns, or call the module."
        )

    @classmethod
    def call(cls, path: str, stage: int) -> StageError:
        """A call of a module while its stage does not listen."""
        return cls(
            f"`{path}` cannot be called here: it is on pipeline stage {stage}, which only answers while it "
            "computes its part of a step. Call it after asking for a value of that stage, and before asking "
            "for one of a later stage."
        )

    @classmethod
    def spanning(cls, path: str, what: str) -> StageError:
        """Something that every stage does a part of."""
        return cls(
            f"{what} of `{path}` cannot be had with several pipeline stages: each runs a part of it. Ask the "
            "modules inside it."
        )

    @classmethod
    def value(cls, kind: str, stage: int) -> StageError:
        """An object that does not travel."""
        return cls(
            f"this value, of type {kind}, is on pipeline stage {stage} and does not travel to the last one, "
            "where blocks run: tensors, numbers, strings and containers of them do"
        )

    @classmethod
    def argument(cls, path: str, what: str) -> StageError:
        """A module elsewhere is called with something that does not travel."""
        return cls(
            f"`{path}` is on another pipeline stage than the blocks, so it is called with tensors, numbers "
            f"and strings, in tuples, lists and dicts; got {what}"
        )

    @classmethod
    def unlike(cls) -> StageError:
        """Stages that do not agree on what a step is."""
        return cls(
            "the stages of the pipeline do not agree on whose rows are whose in this step, so the block was "
            "ended; please report this"
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


class SandboxedError(RuntimeError):
    """A sandboxed block asked for something that there is only outside of its process."""

    @classmethod
    def attribute(cls, path: str, name: str) -> SandboxedError:
        """Something of a module that stays in the worker: a weight, for one."""
        return cls(
            f"`{path}.{name}` stays in the engine: sandboxed blocks have the values that modules take and "
            "return, and may call modules, but have none of their weights. Ask the operator for a key of the "
            "tier 'trusted', if the block needs them."
        )

    @classmethod
    def source(cls, path: str) -> SandboxedError:
        """Operations inside a module's forward."""
        return cls(
            f"The source of `{path}` cannot be had in a sandbox. Ask the modules inside it, or the operator "
            "for a key of the tier 'trusted'."
        )

    @classmethod
    def value(cls, kind: str) -> SandboxedError:
        """An object that does not cross."""
        return cls(
            f"this value, of type {kind}, stays in the engine: tensors with rows of the request's own, "
            "numbers and strings cross into a sandbox, and containers of them"
        )

    @classmethod
    def unshared(cls, reason: str) -> SandboxedError:
        """A value that cannot be given to one request alone."""
        return cls(reason)

    @classmethod
    def call(cls, path: str) -> SandboxedError:
        """A module is called by code that is not the running block's own."""
        return cls(f"`{path}` is called by the block itself, while it runs")

    @classmethod
    def argument(cls, path: str, what: str) -> SandboxedError:
        """A module is called with something that does not cross."""
        return cls(f"`{path}` is called with tensors, numbers and strings from a sandbox, got {what}")

    @classmethod
    def uncalled(cls, path: str, why: str) -> SandboxedError:
        """A module that the worker does not call for a stranger, or not with that."""
        return cls(f"`{path}` cannot be called from a sandbox: {why}")

    @classmethod
    def costly(cls, path: str, num_rows: int, seconds: float) -> SandboxedError:
        """Modules are called for longer than one step of the engine allows."""
        return cls(
            f"`{path}` was called with {num_rows:,} rows from a sandbox, which takes longer than the "
            f"{seconds:g} s that all calls of a trace may take within one step of the engine. Call it with "
            "fewer rows: with the last position's, for one, or for fewer layers."
        )

    @classmethod
    def crowded(cls) -> SandboxedError:
        """More blocks in one trace than the sandbox has room for."""
        return cls("the trace has more blocks and edits than a sandbox takes: send it in several traces")

    @classmethod
    def spread(cls) -> SandboxedError:
        """The model is not in one piece."""
        return cls(
            "sandboxed blocks run where the model is in one process: this server spreads it over several "
            "ranks or stages. Ask the operator for a key of the tier 'trusted'."
        )
