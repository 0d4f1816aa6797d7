"""Modules that got another forward, as an attribute of theirs: a function with the module and more
arguments, which can be copied and pickled with it.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

Function = Callable[..., Any]

# What torch.nn.DataParallel calls for a replica, which gets tensors of its own.
_REPLICATE = "_replicate_for_data_parallel"


def replace(module: torch.nn.Module, function: Function, *arguments: Any) -> None:
    """Lets a module, and its replicas, compute function(module, *arguments, ...)."""
    held = vars(module)
    held["forward"] = functools.partial(function, module, *arguments)
    held[_REPLICATE] = functools.partial(_replicate, module, function)


def arguments(module: torch.nn.Module, function: Function) -> tuple[Any, ...] | None:
    """Returns the arguments with which a function is a module's forward, or None if it is not."""
    return _arguments(vars(module).get("forward"), function)


def restore(module: torch.nn.Module, function: Function) -> bool:
    """Gives a module its own forward back where a function replaced it, also where a wrapper keeps
    the replaced one in an attribute. Returns whether anything was done.
    """
    held = vars(module)
    found = [name for name, value in held.items() if _arguments(value, function) is not None]
    for name in found:
        held.pop(_REPLICATE, None)
        if name == "forward":
            del held[name]
        else:
            held[name] = MethodType(type(module).forward, module)
    return bool(found)


def _arguments(value: object, function: Function) -> tuple[Any, ...] | None:
    if isinstance(value, functools.partial) and value.func is function:
        return value.args[1:]
    return None


def _replicate(module: Any, function: Function) -> Any:
    """Returns a replica whose forward computes with the tensors of the replica."""
    replica = getattr(type(module), _REPLICATE)(module)
    held = vars(replica)
    for name, value in list(held.items()):
        given = _arguments(value, function)
        if given is not None:
            held[name] = functools.partial(function, replica, *given)
    held[_REPLICATE] = functools.partial(_replicate, replica, function)
    return replica
