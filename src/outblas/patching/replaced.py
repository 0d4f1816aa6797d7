"""Modules that compute by another forward: that of a class derived from theirs.

All modules of a class share the derived one, so that one compiled program serves them. Copies,
replicas and files of a module have it too; nothing in it refers to a particular module.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Function = Callable[..., Any]
Module = torch.nn.Module

# The attribute of a derived class with its `_Replacement`, and that of a module with the first
# arguments of the function.
_REPLACES = "_outblas_replaces"
_ARGUMENTS = "_outblas_arguments"


class _Replacement(NamedTuple):
    """What a derived class stands for: `original` is the forward of `kind`, `function` is called in
    its place, and `moved` after `_apply`.
    """

    kind: type[Any]
    original: Function
    function: Function
    moved: Function | None


def irreplaceable(module: Module) -> str | None:
    """Returns why the forward of a module cannot be replaced, or None: the module has one of its
    own, or its class makes, copies or saves modules in a way of its own, as those of graphs and
    scripts do.
    """
    if "forward" in vars(module):
        return "its forward was replaced"
    kind = type(module)
    is_usual = (
        kind.__new__ is object.__new__
        and kind.__reduce__ is object.__reduce__
        and (kind.__reduce_ex__ is object.__reduce_ex__ or _replacement(kind) is not None)
        and not hasattr(kind, "__deepcopy__")
        and type(kind) is type
        and "__init_subclass__" not in {name for base in kind.__mro__[:-1] for name in vars(base)}
    )
    return None if is_usual else f"no class can be derived from {kind_of(module).__name__}"


def replace(
    module: Module, function: Function, *arguments: Any, moved: Function | None = None
) -> None:
    """Lets a module, its copies and its replicas compute function(module, *arguments, ...), and
    call moved(module, *arguments) after `to`, `half` and all else that passes `_apply`.
    """
    replacement = _replacement(type(module))
    if replacement is None or replacement.function is not function:
        kind = type(_restore(module))
        become(module, _derived(kind, function, moved))
    vars(module)[_ARGUMENTS] = arguments


def arguments(module: Module, function: Function) -> tuple[Any, ...] | None:
    """Returns the arguments with which a function is a module's forward, or None if it is not."""
    replacement = _replacement(type(module))
    if replacement is None or replacement.function is not function:
        return None
    first: tuple[Any, ...] | None = vars(module).get(_ARGUMENTS)
    return first


def kind_of(module: Module) -> type[Any]:
    """Returns the class of a module as it is without a replaced forward."""
    replacement = _replacement(type(module))
    return type(module) if replacement is None else replacement.kind


def compute(module: Module, *args: Any, **kwargs: Any) -> Any:
    """Computes what a module computes without a replaced forward."""
    return kind_of(module).forward(module, *args, **kwargs)


def restore(model: Module) -> dict[str, Function]:
    """Gives the modules of a model their own classes back. Returns the functions that replaced
    their forwards, by the name of the module.
    """
    functions = {}
    for name, module in model.named_modules():
        if replacement := _replacement(type(module)):
            functions[name or "(root)"] = replacement.function
            _restore(module)
    return functions


def _restore(module: Any) -> Any:
    """Gives a module its own class back, and returns it."""
    vars(module).pop(_ARGUMENTS, None)
    if _replacement(type(module)) is None:
        return module
    kinds = [base for base in type(module).__mro__ if _REPLACES in vars(base)]
    become(module, rebased(type(module), {base: vars(base)[_REPLACES].kind for base in kinds}))
    return module


def _replacement(kind: type) -> _Replacement | None:
    """Returns what a class, or one that it is derived from, replaces."""
    return getattr(kind, _REPLACES, None)


def _derived(kind: type[Any], function: Function, moved: Function | None) -> type:
    """Returns the class of modules of a class that compute by a function."""
    original = kind.forward
    replacement = _Replacement(kind, original, function, moved)
    for other in kind.__subclasses__():
        if vars(other).get(_REPLACES) == replacement:
            return other

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = getattr(self, _ARGUMENTS, None)  # a wrapper may call this after `restore`
        if arguments is None or kind.forward is not original:  # the class has another forward
            return kind.forward(self, *args, **kwargs)
        return function(self, *arguments, *args, **kwargs)

    def reduce_ex(self: Any, protocol: int) -> Any:
        reduced = object.__reduce_ex__(self, 2)
        if type(self) is not derived:  # but one that torch derived in its turn
            return reduced
        return _empty, (kind, function, moved), *reduced[2:]

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind._apply(self, *args, **kwargs)
        if moved is not None and _ARGUMENTS in vars(self):
            moved(self, *vars(self)[_ARGUMENTS])
        return result

    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": reduce_ex,
        "__prepare_scriptable__": _restore,  # scripts are compiled from the class's own forward
        "forward": forward,
        _REPLACES: replacement,
        _ARGUMENTS: None,
    }
    if moved is not None:
        members["_apply"] = apply
    derived = type(kind.__name__, (kind,), members)
    return derived


def _empty(kind: type, function: Function, moved: Function | None) -> Any:
    """Returns a module without a state, as `copy` and `pickle` begin with."""
    return object.__new__(_derived(kind, function, moved))


# ---- classes of modules
def rebased(kind: type, others: dict[type, type]) -> type:
    """Returns a class with other classes in the place of some that it is derived from. The class
    itself is not changed, because modules of other models may share it.
    """
    if kind not in others:
        bases = tuple(rebased(base, others) for base in kind.__bases__)
        members = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
        others[kind] = kind if bases == kind.__bases__ else type(kind.__name__, bases, members)
    return others[kind]


def become(module: Module, kind: type) -> None:
    """Changes the class of a module in a way that compiled code notices.

    The guards of torch 2.11 do not check a module whose dictionaries are all unchanged.
    """
    module.__class__ = kind
    held, name = vars(module), "_class_has_changed"
    held[name] = True
    del held[name]
