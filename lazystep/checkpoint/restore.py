"""Restoring the objects of a state so that a load that fails changes none of them.

What torch itself restores (tensors, generators, plain modules, optimizers) is compared with what was saved
before anything is changed. Other objects run code of their own, which may raise in the middle: they are
restored first, and get back what they had if one of them raises.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError

_MOST = 5  # differences that an error names


def shapes_of(optimizer: torch.optim.Optimizer) -> list[list[list[int] | None]]:
    """The shapes of an optimizer's parameters by group: its state dict does not say them."""
    return [
        [None if nn.parameter.is_lazy(p) else list(p.shape) for p in group["params"]]
        for group in optimizer.param_groups
    ]


def restore(
    path: Path, state: Mapping[str, Any], saved: Mapping[str, Any], shapes: Mapping[str, Any]
) -> None:
    """Restore each object of `state`, or raise `CheckpointError` that names the path, and restore none.

    `shapes`: for each optimizer what `shapes_of` said of the one that was saved.
    """
    found = [
        f"state[{name!r}]: {what}"
        for name, thing in state.items()
        for what in _differences(thing, saved[name], shapes.get(name))
    ]
    if found:
        more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise CheckpointError(
            f"{path} does not fit the state to restore. {'; '.join(found[:_MOST])}{more}. "
            "Nothing was restored."
        )
    before: dict[str, Any] = {}
    try:
        for name in [name for name, thing in state.items() if not _is_checked(thing)]:
            before[name] = copy.deepcopy(state[name].state_dict())
            state[name].load_state_dict(saved[name])
    except Exception as error:
        lost = [f"state[{known!r}]" for known, value in before.items() if not _put_back(state[known], value)]
        raise CheckpointError(
            f"{path} does not fit the state to restore. state[{name!r}], a {type(state[name]).__name__}, "
            f"raised {type(error).__name__}: {error}. Nothing was restored"
            + (f", but {', '.join(lost)} did not take back its own state." if lost else ".")
        ) from error
    for name, thing in state.items():
        if _is_checked(thing):
            _restore_checked(thing, saved[name])


def _put_back(thing: Any, before: Any) -> bool:
    try:
        thing.load_state_dict(before)
    except Exception:
        return False
    return True


def check_random(path: Path, saved: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the generators of this process would not take their states."""
    try:
        torch.Generator().set_state(saved["torch"])
        random.Random().setstate(saved["python"])
        if "numpy" in saved:
            import numpy

            numpy.random.RandomState().set_state(saved["numpy"])
    except Exception as error:
        raise CheckpointError(
            f"{path} has states of random generators that this process does not take: {error}. Nothing was "
            "restored. generators=False leaves the generators as they are."
        ) from error


def restore_random(saved: Mapping[str, Any]) -> None:
    """Set the generators of torch, Python and NumPy."""
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    if "numpy" in saved:
        import numpy

        numpy.random.set_state(saved["numpy"])


def _is_checked(thing: Any) -> bool:
    """Whether `_differences` finds everything at which restoring this object could fail."""
    if isinstance(thing, (torch.Tensor, torch.Generator)):
        return True
    if isinstance(thing, torch.optim.Optimizer):
        return type(thing).load_state_dict is torch.optim.Optimizer.load_state_dict
    return isinstance(thing, nn.Module) and all(map(_is_plain, thing.modules()))


def _is_plain(module: nn.Module) -> bool:
    """Whether torch's code alone restores a module, and that is a copy of each tensor."""
    kind: Any = type(module)
    is_torchs = kind._load_from_state_dict.__module__.startswith("torch.nn.modules.")
    hooks = (
        module._state_dict_hooks,
        module._state_dict_pre_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    )
    return (
        is_torchs
        and kind.load_state_dict is nn.Module.load_state_dict
        and kind.set_extra_state is nn.Module.set_extra_state
        and not any(hooks)
        and not any(nn.parameter.is_lazy(t) for t in (*module.parameters(False), *module.buffers(False)))
    )


def _differences(thing: Any, saved: Any, shapes: Any) -> Iterator[str]:
    """What would keep an object from taking what was saved. Changes nothing, reads no values."""
    if isinstance(thing, (torch.Tensor, torch.Generator)) != isinstance(saved, torch.Tensor):
        kind = "a tensor" if isinstance(saved, torch.Tensor) else f"a {type(saved).__name__}"
        yield f"is a {type(thing).__name__}, but {kind} was saved"
    elif isinstance(thing, torch.Tensor):
        if thing.shape != saved.shape:
            yield f"has the shape {_text(thing)}, but {_text(saved)} was saved"
    elif isinstance(thing, torch.Generator):
        try:
            torch.Generator(thing.device).set_state(saved)
        except Exception as error:
            yield f"is a generator that does not take what was saved: {error}"
    elif isinstance(thing, torch.optim.Optimizer) and _is_checked(thing):
        yield from _differences_of_groups(thing, saved, shapes)
    elif _is_checked(thing):
        own = thing.state_dict()
        for key in own.keys() - saved.keys():
            yield f"{key} was not saved"
        for key in saved.keys() - own.keys():
            yield f"{key} was saved, but is not in the module"
        for key in own.keys() & saved.keys():
            if not isinstance(saved[key], torch.Tensor):
                yield f"{key} is a tensor, but a {type(saved[key]).__name__} was saved"
            elif own[key].shape != saved[key].shape:
                yield f"{key} has the shape {_text(own[key])}, but {_text(saved[key])} was saved"


def _differences_of_groups(optimizer: torch.optim.Optimizer, saved: Any, shapes: Any) -> Iterator[str]:
    own = shapes_of(optimizer)
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        saved["state"].items()
    except (KeyError, TypeError, AttributeError):
        yield "is an optimizer, but the state of none was saved"
        return
    if len(sizes) != len(own):
        yield f"has {len(own)} parameter groups, but {len(sizes)} were saved"
        return
    for n, (group, size) in enumerate(zip(own, sizes, strict=True)):
        if len(group) != size:
            yield f"has {len(group)} parameters in group {n}, but {size} were saved"
        elif shapes is not None:  # earlier releases have not saved them
            for k, (here, there) in enumerate(zip(group, shapes[n], strict=True)):
                if here is not None and there is not None and here != there:
                    shapes_differ = f"of the shape {tuple(here)}, but {tuple(there)} was saved"
                    yield f"has a parameter {k} of group {n} {shapes_differ}"


def _text(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _restore_checked(thing: Any, saved: Any) -> None:
    if isinstance(thing, torch.Generator):
        thing.set_state(saved)
    elif isinstance(thing, torch.Tensor):
        with torch.no_grad():
            thing.copy_(saved)
    else:
        thing.load_state_dict(saved)
