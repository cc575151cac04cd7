"""The envoy of a module: it looks like the module, and reads and writes its values during a trace."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, ClassVar, Self

import torch

from nnsight_engine.core.saves import Place
from nnsight_engine.envoys import values
from nnsight_engine.envoys.display import NoSuchModuleError, as_html, as_text, names_of
from nnsight_engine.envoys.eproperty import another_models, eproperty
from nnsight_engine.envoys.module_options import (
    Aliases,
    EnvoyMap,
    Rename,
    by_alias,
    check_aliases,
    check_envoys,
    check_reached,
    envoy_class,
)
from nnsight_engine.envoys.operations import ForwardSource, SourceEnvoy
from nnsight_engine.envoys.probes import Probes
from nnsight_engine.envoys.source.definition import SourceNotAvailableError
from nnsight_engine.envoys.tracers import interleaving
from nnsight_engine.envoys.tracers.interleaving import Edit, EditingTracer, InterleavingTracer, ScanningTracer
from nnsight_engine.envoys.tree import EnvoyTree
from nnsight_engine.envoys.values import (
    CallValues,
    named_arguments,
    names_input,
    unknown_arguments_error,
)
from nnsight_engine.interleaving.batching import Batchable, Batcher
from nnsight_engine.interleaving.events import Events
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.tracing.frames import for_user, users_line, users_stacklevel
from nnsight_engine.tracing.tracer import SITES, Backend, Session, Tracer, refuse_statement

_ENVOYS_OWN = frozenset({"path", "interleaver", "interleaving", "interleave", "fake_value"})

interleaving.install()
values.install()

_METHODS = (FunctionType, MethodType, BuiltinFunctionType)


class Envoy(CallValues, EnvoyTree, Batchable, Place):
    """Represents a module and its submodules.

    Inside a trace, ``output``, ``input`` and ``inputs`` wait for the module's values and can be assigned.
    Any other attribute is looked up on the module itself.

    Attributes:
        path: Path of the module, ``model.layers.3``; prefix of the names of its values.
        interleaver: The interleaver that the values of the tree pass through.
    """

    _added_later: ClassVar[tuple[str, ...]] = ()
    """Names of the modules that a class adds to the root when the tree has been built."""

    path: str | None
    interleaver: Interleaver
    _module: torch.nn.Module
    _root: Envoy
    _is_root: bool
    _interleaver: Interleaver
    _alias: Aliases | None
    _envoys: EnvoyMap
    _children: list[Envoy]
    _names: list[str]
    _source: ForwardSource | None
    _sources: list[ForwardSource]
    _default_mediators: list[Edit]
    _fake: dict[str, Any]
    _by_module: dict[int, Envoy]
    _added: dict[tuple[str, str], torch.nn.Module]
    _probes: Probes | None

    def __init__(
        self,
        module: torch.nn.Module,
        interleaver: Interleaver | None = None,
        path: str = "model",
        rename: Rename | None = None,
        envoys: EnvoyMap = None,
        root: Envoy | None = None,
    ) -> None:
        """Create the envoy of ``module`` and the tree below it.

        Args:
            module: The module.
            interleaver: The interleaver, shared by the whole tree; a new one by default.
            path: Path of the module.
            rename: Aliases of modules, see ``module_options``.
            envoys: Envoy classes of the submodules.
            root: The envoy at the top of the tree; this one by default.
        """
        state = self.__dict__
        state["path"] = path
        state["_module"] = module
        state["_root"] = root if root is not None else self
        state["_is_root"] = root is None
        state["interleaver"] = state["_interleaver"] = (
            interleaver if interleaver is not None else Interleaver()
        )
        state["_alias"] = Aliases(rename) if rename else None
        state["_envoys"] = envoys
        state["_children"] = []
        state["_names"] = []
        state["_source"] = None
        state["_default_mediators"] = []
        state["_fake"] = {}
        if root is None:
            check_envoys(envoys, Envoy)
            state["_by_module"] = {id(module): self}
            state["_probes"] = None
            state["_sources"] = []
            # Modules added by the user; code that runs traces elsewhere has to send them.
            state["_added"] = {}
        for name, child in module.named_children():
            self._add_envoy(child, name)
        check_aliases(self)
        if root is None:
            self._check_names()

    # Values; `output`, `input` and `inputs` are in CallValues.

    @property
    def source(self) -> SourceEnvoy:
        """The calls inside the module's forward, each with ``input`` and ``output``; print it to list them.

        Raises:
            SourceNotAvailableError: The forward is not written in Python, or cannot be rewritten.
        """
        forward = self._source
        if forward is None:
            forward = ForwardSource(self._module, str(self.path), self._root)
            self.__dict__["_source"] = forward
            self._root._sources.append(forward)
        if self._interleaver.interleaving and forward.install():
            forward.source.count_from(self._interleaver.calls.get(f"{self.path}.input", 0))
        return forward.source

    def skip(self, value: Any) -> None:
        """Use ``value`` as the module's output, without running the module.

        Modules inside it do not run either, so their values cannot be read. With several invokes, every
        one must skip it.
        """
        mediator = self._running("skip")
        interleaver = mediator.interleaver or self._interleaver
        provider = f"{self.path}.input"
        mediator.send_event(Events.SKIP, provider, interleaver.call_number(provider), value)
        interleaver.suspect(f"{self.path} was skipped {users_line()}")

    def next(self, step: int = 1) -> Self:
        """Move this block's requests on to the next call of each module (the next generated token).

        A request for a step that never runs ends the block with a warning.
        """
        mediator = self._running("next")
        if step < 1:
            raise ValueError(f"steps go forward: next() takes a positive number, got {step}")
        current = mediator.iteration if mediator.iteration is not None else self._interleaver.step
        mediator.iteration, mediator.moved_on = current + step, True
        return self

    def _running(self, method: str) -> Mediator:
        """Return the mediator of the running block; raise the error for ``method`` called outside of one."""
        mediator = self._interleaver.current
        if mediator is None:
            raise for_user(
                another_models(self)
                or ValueError(
                    f"{self.path}.{method}() is called inside a trace that has an input, or inside an invoke"
                )
            )
        return mediator

    def fake_value(self, prop: eproperty) -> tuple[bool, Any]:
        """Return whether a scan stored a value for ``prop``, and the value, made of fake tensors."""
        key = str(prop.key)
        if key not in self._fake:
            return False, None
        value = self._fake[key]
        return True, prop._preprocess(self, value) if prop._preprocess is not None else value

    @property
    def _fake_output(self) -> Any:
        return self._fake.get("output")

    @property
    def _fake_inputs(self) -> Any:
        return self._fake.get("input")

    # Running.

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Call the module.

        Inside a block this applies the module to a value of the block, separately from the model's run:
        no ``output`` is affected. ``hook=True`` makes such a call count as one of the model's, for
        modules that the model itself never calls.
        """
        interleaver = self._interleaver
        if interleaver.current is not None and not hook:
            return interleaver.applied(str(self.path), self._apply_to_values, args, kwargs)
        interleaver.called_directly(str(self.path))
        if interleaver.current is None:
            return self._with_edits(lambda: self._module(*args, **kwargs))
        interleaver.listener = get_ident()
        try:
            return self._module(*args, **kwargs)
        finally:
            interleaver.listener = 0

    def trace(
        self,
        *args: Any,
        fn: Callable[..., Any] | None = None,
        backend: Backend | None = None,
        scan: bool = False,
        validate: bool = False,
        tracer_cls: type[InterleavingTracer] = InterleavingTracer,
        **kwargs: Any,
    ) -> InterleavingTracer:
        """Open a trace: ``with model.trace(input) as tracer:``.

        Args:
            *args: The input; without one, the block defines invokes.
            fn: The function to run; the module itself by default.
            backend: Runs the compiled block; in this process by default.
            scan: The same as ``validate``.
            validate: Run the block on fake tensors first, so that wrong shapes fail before the real run.
            tracer_cls: The class of the trace.
            **kwargs: Further arguments of the module or of ``fn``.

        Raises:
            WithBlockNotFoundError: The caller is not a ``with`` statement.
            TypeError: The module takes no argument of such a name.
        """
        refuse_statement(sys._getframe(1), "trace")
        self._root._check_runs("trace")
        # Arguments without an input are for invokes, whose own arguments are not known yet.
        has_input = self._has_input(args, kwargs)
        if has_input and fn is None and tracer_cls.__init__ is InterleavingTracer.__init__:
            self._check_arguments(kwargs)
        function = fn if fn is not None else self._run_module
        return tracer_cls(function, self, *args, backend=backend, validate=validate or scan, **kwargs)

    def scan(self, *args: Any, fn: Callable[..., Any] | None = None, **kwargs: Any) -> ScanningTracer:
        """Open a trace on fake tensors, which determines every shape and computes nothing."""
        refuse_statement(sys._getframe(1), "scan")
        self._root._check_runs("scan")
        if fn is None and self._has_input(args, kwargs):
            self._check_arguments(kwargs)
        return ScanningTracer(fn if fn is not None else self._run_module, self, *args, **kwargs)

    def edit(self, *, inplace: bool = False, backend: Backend | None = None) -> EditingTracer:
        """Store a block that runs in every later trace: ``with model.edit() as edited:``.

        Args:
            inplace: Edit this model instead of a copy that shares its modules.
            backend: Receives the compiled block; stored in this process by default.
        """
        refuse_statement(sys._getframe(1), "edit")
        self._root._check_runs("edit")
        if not self._is_root:
            raise ValueError(
                f"edits are stored on the whole model: call edit() on its root, not on {self.path}"
            )
        return EditingTracer(self, inplace=inplace, backend=backend)

    def clear_edits(self) -> None:
        """Remove the edits of this model."""
        self._default_mediators.clear()

    def session(self, *, backend: Backend | None = None) -> Session:
        """Group traces, with values passed from one to the next: ``with model.session():``."""
        refuse_statement(sys._getframe(1), "session")
        self._root._check_runs("session")
        return Session(self, backend=backend)

    def _apply_to_values(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module to values of a block; subclasses override this for other kinds of modules."""
        return self._module.forward(*args, **kwargs)

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the default function of a trace."""
        return self._module(*args, **kwargs)

    def _has_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether these arguments of a trace are an input, so that its block is the only invoke."""
        return bool(args) or names_input(type(self._module), kwargs)

    def _check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError if nothing takes an argument of a trace. Classes with own inputs override it."""
        if type(self)._prepare_input is not Batchable._prepare_input:
            return
        known_names, takes_others = named_arguments(type(self._module))
        unknown = [] if takes_others else [name for name in kwargs if name not in known_names]
        if unknown:
            raise unknown_arguments_error(
                unknown, known_names, f"{type(self._module).__name__}.forward of {self.path}"
            )

    def _example_input(self) -> dict[str, Any] | None:
        """Return example arguments for a run that determines the model's calls; None if unknown."""
        return None

    def _new_local_part(self) -> Tracer:
        """Return the tracer of ``with tracer.local():``; a trace in this process runs its block in place."""
        return Tracer()

    def _shallow_copy(self) -> Self:
        """Return an envoy of the same module and tree with its own list of edits."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.__dict__["_default_mediators"] = list(self._default_mediators)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the envoy at the same place in a copy of tree and modules; ValueError if it has edits."""
        if self._default_mediators:
            raise ValueError(
                "edits name the model that they edit and are not copied: call clear_edits() before"
            )
        if not self._is_root and id(self._root) not in memo:
            copy.deepcopy(self._root, memo)
            copied_envoy: Self = memo[id(self)]
            return copied_envoy
        copied = memo[id(self)] = object.__new__(type(self))
        fresh: dict[str, Any] = {
            "_source": None,
            "_sources": [],
            "_fake": {},
            "_probes": None,
            "_by_module": {},
        }
        for name, value in self.__dict__.items():
            copied.__dict__[name] = fresh[name] if name in fresh else copy.deepcopy(value, memo)
        if self._is_root:
            copied._by_module.update((id(envoy._module), envoy) for envoy in copied._walk())
        return copied

    @property
    def interleaving(self) -> bool:
        """Whether a trace of this model is running."""
        return bool(self._interleaver.interleaving)

    def interleave(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` together with the blocks that the interleaver was given."""
        root = self._root
        root._check_runs("interleave")
        probes = root._probes
        if probes is None:
            modules = [(envoy._module, str(envoy.path)) for envoy in root._by_module.values()]
            probes = root.__dict__["_probes"] = Probes(modules, self._interleaver)
        probes.install()
        for source in root._sources:
            source.install()
        try:
            root._before_run()
            return self._interleaver.run(lambda: function(*args, **kwargs))
        finally:
            root._after_run()
            for source in root._sources:
                source.remove()
            probes.remove()

    def _with_edits(self, run: Callable[[], Any]) -> Any:
        """Run a call outside of traces, together with the edits of this model if it has any."""
        if not self._default_mediators:
            return run()
        with self._interleaver.exclusive:
            if self._interleaver.interleaving:  # the model calls itself
                return run()
            self._interleaver.initialize(
                [edit.mediator(self._interleaver) for edit in self._default_mediators]
            )
            return self.interleave(run)

    def _check_runs(self, method: str) -> None:
        """Raise if blocks cannot run the model of this tree; called on the root, with the method used."""

    def _before_run(self) -> None:
        """Prepare for a run, real or on fake tensors; called on the root for every run in its tree."""

    def _after_run(self) -> None: ...

    def _prepare_run(self, batcher: Batcher) -> None:
        """Prepare for a run on real values; a model that loads lazily is loaded here."""

    # The tree.

    def _rename(self, rename: Rename | None) -> None:
        """Replace the aliases of the tree; on TypeError or ValueError, they are not changed."""
        previous_aliases = self._alias
        aliases = Aliases(rename) if rename else None
        envoys = list(self._walk())
        try:
            for envoy in envoys:
                envoy.__dict__["_alias"] = aliases
            for envoy in envoys:
                check_aliases(envoy)
        except (TypeError, ValueError):
            for envoy in envoys:
                envoy.__dict__["_alias"] = previous_aliases
            raise

    def _check_names(self) -> None:
        """Raise ValueError if an alias of the tree refers to nothing; called on the root."""
        check_reached(self, self._added_later)

    def _drop_inspection_state(self) -> None:
        """Drop rewritten forwards and scanned values; a server does so between traces."""
        for envoy in self._walk():
            envoy.__dict__["_source"] = None
            envoy._fake.clear()
        self._root._sources.clear()

    def _add_envoy(self, module: torch.nn.Module, name: str) -> Envoy:
        """Add the envoy of a child; a module that is in the tree already keeps its envoy."""
        envoys_by_module = self._root._by_module
        envoy = envoys_by_module.get(id(module))
        if envoy is None:
            path = f"{self.path}.{name}"
            envoy = envoy_class(self._envoys, module, path, self._alias, Envoy)(
                module,
                interleaver=self._interleaver,
                path=path,
                rename=self._alias.rename if self._alias is not None else None,
                envoys=self._envoys,
                root=self._root,
            )
            envoys_by_module[id(module)] = envoy
            self._root.__dict__["_probes"] = None
        if name in self._names:
            self._children[self._names.index(name)] = envoy
        else:
            if hasattr(type(self), name) or name in _ENVOYS_OWN or (name[0] == "_" and name in self.__dict__):
                self._make_room(name)
            self._children.append(envoy)
            self._names.append(name)
        self.__dict__[name] = envoy
        return envoy

    def _make_room(self, name: str) -> None:
        """Move an attribute that a child is called like to ``nns_<name>``; ValueError if it is needed."""
        if name.startswith("_") or name in _ENVOYS_OWN:
            raise ValueError(
                f"a module cannot be called {name!r}: {type(self).__name__} needs that name itself"
            )
        if f"nns_{name}" in dir(type(self)):
            return
        warnings.warn(
            f"{type(self._module).__name__} has a module called `{name}`, so `.{name}` is that module. "
            f"What an envoy offers under this name is at `.nns_{name}`.",
            stacklevel=users_stacklevel(),
        )
        original = inspect.getattr_static(type(self), name)

        def child(envoy: Envoy) -> Any:
            return envoy.__dict__[name]

        class_with_child = type(
            f"{type(self).__name__}.Preserved",
            (type(self),),
            {name: property(child), f"nns_{name}": original},
        )
        object.__setattr__(self, "__class__", class_with_child)

    def __getattr__(self, name: str) -> Any:
        """Look a name up among the aliases, then on the module."""
        state = self.__dict__
        module = state.get("_module")
        if module is None:
            raise AttributeError(name)
        aliased = by_alias(self, name)
        if aliased is not None:
            return aliased
        try:
            value = getattr(module, name)
        except AttributeError:
            raise NoSuchModuleError(self, name) from None
        if isinstance(value, torch.nn.Module):
            return self._add_envoy(value, name)
        if isinstance(value, _METHODS):
            return self._traceable(name, value)
        if isinstance(value, torch.Tensor):
            return self._interleaver.whole_tensor(str(self.path), name, value)
        return value

    def _traceable(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of a module's method: a ``with`` statement traces it, other code calls it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if SITES.feeds_with(sys._getframe(1)):
                return self.trace(*args, fn=self._traced(name, method), **kwargs)
            interleaver = self._interleaver
            if interleaver.current is not None:
                return interleaver.applied(
                    str(self.path), lambda *a, **k: self._call_method(name, method, a, k), args, kwargs, name
                )
            interleaver.called_directly(str(self.path))
            return self._with_edits(lambda: self._call_method(name, method, args, kwargs))

        call.__name__, call.__doc__ = name, method.__doc__
        return call

    def _traced(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        own_version = getattr(type(self), f"__nnsight_{name}__", None)
        return MethodType(own_version, self) if own_version is not None else method

    def _call_method(
        self,
        name: str,  # noqa: ARG002 - a hook for subclasses
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a method of the module that does not open a trace; subclasses may prepare the arguments."""
        return method(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Add a module to the tree, or set the attribute on the envoy."""
        if isinstance(value, torch.nn.Module) and name != "_module":
            self._add_envoy(value, name)
            self._root._added[str(self.path), name] = value
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __dir__(self) -> list[str]:
        return names_of(self)

    def _update(self, module: torch.nn.Module) -> None:
        """Replace the module by another of the same structure, for example by one with loaded weights."""
        root = self._root
        root._by_module.pop(id(self._module), None)
        root._by_module[id(module)] = self
        root.__dict__["_probes"] = None
        self.__dict__["_module"] = module
        if self._source is not None:
            try:
                self._source.rebind(module)
            except SourceNotAvailableError:
                root._sources.remove(self._source)
                self.__dict__["_source"] = None
        children = dict(module.named_children())
        for name, envoy in zip(tuple(self._names), tuple(self._children), strict=True):
            if name in children:
                envoy._update(children.pop(name))
        for name, child in children.items():
            self._add_envoy(child, name)


__all__ = ["Envoy", "EnvoyMap", "eproperty"]
