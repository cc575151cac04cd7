"""Errors of blocks that occur only in the serving engine."""

from __future__ import annotations


class NestedTraceError(RuntimeError):
    """A block that runs in the engine would run the model."""

    @classmethod
    def calling(cls, method: str) -> NestedTraceError:
        return cls(
            f"{method}() cannot be called in a block that runs in the engine, whose model already runs, for "
            "other requests too. Call it behind this block, or give the trace several invokes."
        )


class EditLimitError(RuntimeError):
    """The engine already stores the maximum number or size of edits."""

    @classmethod
    def over(
        cls, name: str, num_edits: int, max_edits: int, num_bytes: int, max_bytes: int
    ) -> EditLimitError:
        return cls(
            f"with {name!r} the engine would keep {num_edits} edits of {num_bytes:,} bytes; it takes "
            f"{max_edits} of {max_bytes:,} together. Remove some, model.remove_edit(name), or start it with "
            "limits=EngineLimits(max_edits=..., max_edit_bytes=...)."
        )


class UnknownEditError(LookupError):
    """A request selected an edit that the engine does not have, or whose name now belongs to another edit."""


class ChunkedPromptError(RuntimeError):
    """A prompt was computed in chunks, and the block's access to it needs the whole prompt at once."""

    @classmethod
    def reading(cls, provider: str, num_chunks: int) -> ChunkedPromptError:
        return cls(
            f"The prompt was computed in {num_chunks} chunks, so only the first place that a block asks for "
            f"can be gathered whole; `{provider}` was passed by the first chunks before the block asked. "
            "Start the engine with max_num_batched_tokens as long as the longest prompt."
        )

    @classmethod
    def writing(cls, provider: str, num_chunks: int) -> ChunkedPromptError:
        return cls(
            f"The prompt was computed in {num_chunks} chunks, so `{provider}` cannot be changed by what a "
            "block computes from all of it: the first chunks have passed. Assign a value that the block has "
            "from the start, or start the engine with max_num_batched_tokens as long as the longest prompt."
        )


class SeveralStreamsError(RuntimeError):
    """A block requested a value that is several residual streams, which are not split among requests."""

    @classmethod
    def at(cls, provider: str) -> SeveralStreamsError:
        return cls(
            f"`{provider}` is several residual streams at once, [streams, tokens, width], which no block can "
            "have. model.points() lists the places inside the layers that they can."
        )


class TraceBytesError(RuntimeError):
    """A block holds more of the worker's memory than one request is allowed to."""

    @classmethod
    def holding(cls, saved_bytes: int, kept_bytes: int, max_bytes: int) -> TraceBytesError:
        return cls(
            f"The block has saved {saved_bytes} bytes, and {kept_bytes} are kept for what it writes and "
            f"gathers; one request may hold {max_bytes}. Save fewer places or positions (a view such as "
            "output[-1] keeps the whole of output: clone it), or start the engine with a higher "
            "EngineLimits(max_trace_bytes=...)."
        )


class AdapterNotLoadedError(RuntimeError):
    """A block called a module whose LoRA adapter is in no slot of the engine."""

    @classmethod
    def outside_step(cls) -> AdapterNotLoadedError:
        return cls(
            "The adapter of this request is in none of the engine's slots: other requests use them, and this "
            "one takes no part in the step. Call the module while the block has a value of its own step, or "
            "start the engine with a higher max_loras."
        )


class StageError(RuntimeError):
    """A block requested something of one pipeline stage that only another stage has."""

    @classmethod
    def attribute(cls, path: str, name: str, stage: int) -> StageError:
        return cls(
            f"`{path}.{name}` is on pipeline stage {stage}, and blocks run on the last one: only values and "
            "calls travel between stages. Read what the module takes and returns, or call the module."
        )

    @classmethod
    def call(cls, path: str, stage: int) -> StageError:
        return cls(
            f"`{path}` cannot be called here: it is on pipeline stage {stage}, which only answers while it "
            "computes its part of a step. Call it after asking for a value of that stage, and before asking "
            "for one of a later stage."
        )

    @classmethod
    def spanning(cls, path: str, use: str) -> StageError:
        return cls(
            f"{use} of `{path}` cannot be had with several pipeline stages: each runs a part of it. Ask the "
            "modules inside it."
        )

    @classmethod
    def value(cls, kind: str, stage: int) -> StageError:
        return cls(
            f"this value, of type {kind}, is on pipeline stage {stage} and does not travel to the last one, "
            "where blocks run: tensors, numbers, strings and containers of them do"
        )

    @classmethod
    def argument(cls, path: str, got: str) -> StageError:
        return cls(
            f"`{path}` is on another pipeline stage than the blocks, so it is called with tensors, numbers "
            f"and strings, in tuples, lists and dicts; got {got}"
        )

    @classmethod
    def unlike(cls) -> StageError:
        return cls(
            "the stages of the pipeline do not agree on whose rows are whose in this step, so the block was "
            "ended; please report this"
        )


class SpreadModuleError(RuntimeError):
    """A block requested a value or operation of a sharded module that tensor parallelism does not allow."""

    @classmethod
    def unknown_layout(cls, provider: str) -> SpreadModuleError:
        return cls(
            f"With several tensor-parallel ranks `{provider}` cannot be read or written: each rank has a "
            "part of it, and it is not known how the parts make a whole. Take the input or the output of a "
            "module around it, or one rank."
        )

    @classmethod
    def argument(cls, got: str) -> SpreadModuleError:
        return cls(
            "a module that is spread over tensor-parallel ranks is called on all of them, with tensors, "
            f"numbers and strings, in tuples, lists and dicts; got {got}"
        )

    @classmethod
    def direct_call(cls, path: str) -> SpreadModuleError:
        return cls(
            f"With several tensor-parallel ranks `{path}` is called by a block itself, not by a thread that "
            "it started, and without hook=True: all ranks make the call together"
        )

    @classmethod
    def method(cls, path: str, name: str) -> SpreadModuleError:
        return cls(
            f"With several tensor-parallel ranks `{path}.{name}()` works on one rank's part. Call the module "
            "instead, or a module around it, or use one rank."
        )

    @classmethod
    def held(cls, path: str, name: str) -> SpreadModuleError:
        return cls(
            f"With several tensor-parallel ranks `{path}.{name}` is one rank's part, and it is not known how "
            "the parts make a whole. Call the module instead, or use one rank."
        )

    @classmethod
    def outside_block(cls, path: str) -> SpreadModuleError:
        return cls(
            f"`{path}` is spread over tensor-parallel ranks, which take part in what a block does while it "
            "runs; ask for it in the block itself"
        )


class SandboxedError(RuntimeError):
    """A sandboxed block requested something that exists only outside its process."""

    @classmethod
    def attribute(cls, path: str, name: str) -> SandboxedError:
        return cls(
            f"`{path}.{name}` stays in the engine: sandboxed blocks have the values that modules take and "
            "return, and may call modules, but have none of their weights. Ask the operator for a key of the "
            "tier 'trusted', if the block needs them."
        )

    @classmethod
    def source(cls, path: str) -> SandboxedError:
        return cls(
            f"The source of `{path}` cannot be had in a sandbox. Ask the modules inside it, or the operator "
            "for a key of the tier 'trusted'."
        )

    @classmethod
    def value(cls, kind: str) -> SandboxedError:
        return cls(
            f"this value, of type {kind}, stays in the engine: tensors with rows of the request's own, "
            "numbers and strings cross into a sandbox, and containers of them"
        )

    @classmethod
    def shared(cls, provider: str) -> SandboxedError:
        return cls(
            f"`{provider}` holds a tensor that belongs to all requests of the step together, so a sandboxed "
            "block cannot have it. Ask for the value of a module around it."
        )

    @classmethod
    def unsendable(cls, provider: str, error: Exception) -> SandboxedError:
        return cls(f"`{provider}` cannot be given to a sandboxed block: {error}")

    @classmethod
    def call(cls, path: str) -> SandboxedError:
        return cls(f"`{path}` is called by the block itself, while it runs")

    @classmethod
    def argument(cls, path: str, got: str) -> SandboxedError:
        return cls(f"`{path}` is called with tensors, numbers and strings from a sandbox, got {got}")

    @classmethod
    def uncalled(cls, path: str, why: str) -> SandboxedError:
        return cls(f"`{path}` cannot be called from a sandbox: {why}")

    @classmethod
    def costly(cls, path: str, num_rows: int, seconds: float) -> SandboxedError:
        return cls(
            f"`{path}` was called with {num_rows:,} rows from a sandbox, which takes longer than the "
            f"{seconds:g} s that all calls of a trace may take within one step of the engine. Call it with "
            "fewer rows: with the last position's, for one, or for fewer layers."
        )

    @classmethod
    def crowded(cls) -> SandboxedError:
        return cls("the trace has more blocks and edits than a sandbox takes: send it in several traces")
