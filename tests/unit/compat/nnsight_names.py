"""Every name that the documents of nnsight mention, and whether it is here.

``python -m tests.unit.compat.nnsight_names`` writes the table into ``docs/coming-from/nnsight.md``; a test
compares the list with the page and with the code.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[3] / "docs" / "coming-from" / "nnsight.md"
BEGIN: Final = "<!-- names: made from tests/unit/compat/nnsight_names.py -->"
END: Final = "<!-- names: end -->"


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A documented name.

    Attributes:
        path: Import path, or attribute of a class, as nnsight's user writes it.
        instead: Use this in its place; empty where the name is here.
        note: A difference in behaviour of a name that is here.
        started: Whether it is there only once a block or an engine runs.
    """

    path: str
    instead: str = ""
    note: str = ""
    started: bool = False


def _here(prefix: str, names: str) -> tuple[Name, ...]:
    return tuple(Name(f"{prefix}.{name}" if prefix else name) for name in names.split())


_TOP = "nnsight"
_PLAIN_VALUE = "a block's values are plain Python: use the built-in and save it"
_ENVOYS = "nnsight.intervention.envoy"
_HOOKS = "nnsight.intervention.hooks"
_INTERLEAVER = "nnsight.intervention.interleaver"
_TRACING = "nnsight.intervention.tracing"
_BACKENDS = "nnsight.intervention.backends"
_NO_QUEUES = "blocks are greenlets, which hand over without queues, locks or events of a thread"
_NO_HOOKS = "a module's values come through its envoy; no hook is registered that could be counted or removed"
_EVENTS_HANDLED = "`Interleaver.handle(provider, value)` answers all blocks that wait for the provider"

NAMES: Final[dict[str, tuple[Name, ...]]] = {
    "The package": (
        *_here(
            _TOP,
            "NNsight LanguageModel VisionLanguageModel DiffusionModel Envoy save CONFIG is_model_running "
            "ndif_status register_by_value eproperty intervention modeling util util.WrapperModule",
        ),
        *_here("nnsight.CONFIG", "save set_default_api_key API.HOST API.KEY APP.DEBUG APP.CROSS_INVOKER"),
        *_here("nnsight.CONFIG", "APP.PYMOUNT APP.REMOTE_LOGGING"),
        Name("nnsight.CONFIG.APP.TRACE_CACHING", note="deprecated: compiled blocks are always cached"),
        Name("nnsight.apply", note="deprecated: call the function"),
        Name("nnsight.trace", note="deprecated: any function can be called in a block"),
        Name("nnsight.local", note="deprecated: a block runs in this process already"),
        *(
            Name(f"nnsight.{kind}", note=f"deprecated: {_PLAIN_VALUE}")
            for kind in ["bool", "bytes", "dict", "float", "int", "list", "set", "str", "tuple"]
        ),
        Name("nnsight.cond", "`if` in the block"),
        Name("nnsight.log", "`print` in the block; a remote block's lines come back as the job's log"),
        Name("nnsight.modeling.vllm.VLLM"),
        Name("nnsight.modeling.base.NNsight"),
        Name("nnsight.modeling.language.LanguageModel"),
        Name("nnsight.modeling.diffusion.DiffusionModel"),
        Name("nnsight.modeling.mixins.remoteable.RemoteableMixin"),
        Name("nnsight.modeling.mixins.loadable.LoadableMixin"),
        Name("nnsight.modeling.mixins.meta.MetaMixin"),
        *_here("nnsight.intervention.serialization", "dumps loads"),
    ),
    "Models and envoys": (
        *_here(
            "LanguageModel",
            "trace generate scan edit session clear_edits device dispatch tokenizer generator to_model_key "
            "_prepare_input _batch envoys",
        ),
        Name("LanguageModel.export_edits", note="a file in the wire format; returns its path"),
        Name("LanguageModel.import_edits", note="adds to the edits of the model; reads files of ours only"),
        *_here(
            "Envoy",
            "input inputs output source next skip __call__ interleave _module _default_mediators path",
        ),
        *_here("Envoy", "interleaver"),
        *_here(_ENVOYS, "Envoy eproperty OperationEnvoy"),
        *_here(_HOOKS, "requires_output requires_input requires_operation_output requires_operation_input"),
        *_here("VLLM", "trace tokenizer"),
        *(Name(f"VLLM.{name}", started=True) for name in ("logits", "samples")),
    ),
    "Tracers and backends": (
        *_here("tracer", "invoke barrier iter all next stop cache result backend batcher model mediators"),
        Name("tracer.info", started=True),
        Name("invoker.inputs", note="`(args, kwargs)` of this input alone, tokenized"),
        Name("session.iter", "`for` in the session's block"),
        *_here(
            _TRACING,
            "base.Tracer base.Info base.WithBlockNotFoundError base.Tracer.capture base.Tracer.compile",
        ),
        *_here(
            _TRACING, "base.Tracer.execute tracer.InterleavingTracer tracer.ScanningTracer tracer.Barrier"
        ),
        *_here(
            _TRACING, "tracer.Cache editing.EditingTracer iterator.IteratorTracer backwards.BackwardsTracer"
        ),
        *_here(
            _TRACING, "invoker.Invoker globals.Globals.enter globals.Globals.exit globals.Globals.cache.clear"
        ),
        *_here(_TRACING, "globals.Globals.saves globals.Globals.stack util.wrap_exception"),
        Name(f"{_TRACING}.globals.TracingCache", "`Globals.cache`"),
        Name(
            f"{_TRACING}.util.ExceptionWrapper",
            note="nothing raises it: an error keeps its own type, and is itself what `.original` is there",
        ),
        Name("nnsight.modeling.mixins.remoteable.StreamTracer", "`with tracer.local():` in a remote trace"),
        Name("nnsight.modeling.mixins.remoteable.RemoteInterleavingTracer", "`model.trace(..., remote=...)`"),
        *_here(
            _BACKENDS, "base.Backend base.Backend.__call__ execution.ExecutionBackend remote.RemoteBackend"
        ),
        *_here("RemoteBackend", "job_id job_status __call__"),
        Name(
            "nnsight.modeling.vllm.async_backend.AsyncVLLMBackend",
            '`VLLM(..., mode="async")`, whose traces stream: `async for output in tracer.backend()`',
        ),
    ),
    "The interleaver": (
        Name(
            f"{_INTERLEAVER}.NNSIGHT_PREFIX",
            "nothing: our frames are identified by their files, hooks by their owner",
        ),
        Name(f"{_INTERLEAVER}.T", "a type variable of your own"),
        *_here(
            _INTERLEAVER,
            "IEnvoy IEnvoy.interleaver IEnvoy.path eproperty eproperty.__call__ eproperty.preprocess",
        ),
        *_here(_INTERLEAVER, "eproperty.postprocess eproperty.transform eproperty.provide eproperty.__get__"),
        *_here(
            _INTERLEAVER,
            "eproperty.__set__ eproperty.name eproperty.key eproperty.description eproperty.iterate",
        ),
        *_here(
            _INTERLEAVER, "Events.VALUE Events.SWAP Events.END Events.EXCEPTION Events.SKIP Events.BARRIER"
        ),
        *_here(
            _INTERLEAVER,
            "Cancelation EarlyStopException SkipException SkipException.value MissedProviderError",
        ),
        *_here(
            _INTERLEAVER,
            "OutOfOrderError Interleaver Interleaver.mediators Interleaver.tracer Interleaver.batcher",
        ),
        *_here(
            _INTERLEAVER,
            "Interleaver.current Interleaver.interleaving Interleaver.initialize Interleaver.handle",
        ),
        *_here(_INTERLEAVER, "Interleaver.cancel Interleaver.check_dangling_mediators Interleaver.__enter__"),
        *_here(_INTERLEAVER, "Interleaver.__exit__"),
        Name(
            f"{_INTERLEAVER}.Interleaver.defer_exceptions",
            "nothing: an error ends the run and is raised by the trace",
        ),
        *_here(_INTERLEAVER, "Interleaver.iterate_requester"),
        Name(
            f"{_INTERLEAVER}.Interleaver.wrap_module",
            "wrap it: `NNsight(module)`, or add it to the wrapped model",
        ),
        Name(
            f"{_INTERLEAVER}.Interleaver.check_cache_full",
            "nothing: a cache warns of the modules that it missed",
        ),
        Name(f"{_INTERLEAVER}.Interleaver.__deepcopy__", "nothing: an envoy's copy shares its interleaver"),
        *_here(
            _INTERLEAVER,
            "Mediator Mediator.MissedProviderError Mediator.OutOfOrderError Mediator.intervention",
        ),
        *_here(
            _INTERLEAVER, "Mediator.name Mediator.idx Mediator.info Mediator.batch_group Mediator.interleaver"
        ),
        *_here(
            _INTERLEAVER,
            "Mediator.worker Mediator.iteration Mediator.transform Mediator.alive Mediator.start",
        ),
        *_here(_INTERLEAVER, "Mediator.cancel Mediator.respond Mediator.request Mediator.swap Mediator.stop"),
        *_here(_INTERLEAVER, "Mediator.skip"),
        *(
            Name(f"{_INTERLEAVER}.Mediator.{name}", _NO_QUEUES)
            for name in (
                *("event_queue", "response_queue", "lock", "Value"),
                *("send", "end", "exception", "deferred_exception"),
            )
        ),
        *(
            Name(f"{_INTERLEAVER}.Mediator.{name}", _EVENTS_HANDLED)
            for name in [
                "handle",
                "handle_value_event",
                "handle_swap_event",
                "handle_exception_event",
                "handle_barrier_event",
                "handle_end_event",
                "handle_skip_event",
            ]
        ),
        *(Name(f"{_INTERLEAVER}.Mediator.{name}", _NO_HOOKS) for name in ("hooks", "remove_hooks")),
        Name(
            f"{_INTERLEAVER}.Mediator.skip_container",
            "nothing: rows that invokes skip are joined by the batcher",
        ),
        Name(f"{_INTERLEAVER}.Mediator.history", "`Interleaver.calls`: how often each provider was reached"),
        Name(f"{_INTERLEAVER}.Mediator.iteration_tracker", "`Interleaver.calls`, one for all blocks"),
        Name(f"{_INTERLEAVER}.Mediator.user_cache", "`tracer.cache(...)` returns the cache"),
        Name(f"{_INTERLEAVER}.Mediator.set_user_cache", "`tracer.cache(...)`"),
        Name(f"{_INTERLEAVER}.Mediator.all_stop", "`tracer.iter[:n]` bounds the steps of a block"),
        Name(
            f"{_INTERLEAVER}.Mediator.args",
            "`Mediator.intervention` takes no arguments: its variables are cells",
        ),
        Name(f"{_INTERLEAVER}.Mediator.cross_invoker", "`CONFIG.APP.CROSS_INVOKER`"),
        Name(
            f"{_INTERLEAVER}.Mediator.original_globals", "nothing: a block runs on its module's own globals"
        ),
        Name(f"{_INTERLEAVER}.Mediator.frame", "`Mediator.info.variables`, the block's variables as cells"),
        Name(
            f"{_INTERLEAVER}.Mediator.push",
            "nothing: a block's variables are cells, which others see when it waits",
        ),
        Name(
            f"{_INTERLEAVER}.Mediator.pull",
            "nothing: a block's variables are cells, which others see when it waits",
        ),
        # `object` has a __getstate__ of its own.
        Name(
            f"{_INTERLEAVER}.Mediator.__setstate__", "blocks travel as source: `model.trace(..., remote=...)`"
        ),
    ),
}


def table() -> str:
    """Return the page's part that lists the names, as Markdown; one row for all that have the same remark."""
    parts = []
    for title, names in NAMES.items():
        here = [name.path for name in names if not name.instead and not name.note]
        parts.append(f"### {title}\n\nHere: {_listed(here)}.\n")
        parts.append("| name | here | |\n|---|---|---|")
        rows: dict[tuple[str, str], list[str]] = {}
        for name in names:
            if name.instead or name.note:
                key = ("no", name.instead) if name.instead else ("yes", name.note)
                rows.setdefault(key, []).append(name.path)
        parts.extend(f"| {_listed(paths)} | {is_here} | {text} |" for (is_here, text), paths in rows.items())
        parts.append("")
    return "\n".join(parts)


def _listed(paths: list[str]) -> str:
    """Return names in backquotes; those that share a module or class after the first without it."""
    shown, before = [], ""
    for path in paths:
        prefix, _, last = path.rpartition(".")
        shown.append(f"`{last if prefix and prefix == before else path}`")
        before = prefix
    return ", ".join(shown)


def with_table(page: str) -> str:
    """Return the page with its list of names as it has to be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
