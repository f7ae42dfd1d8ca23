"""An optimiser of the user's: a `FragmentOptimizer` in a file, tried before ranks start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil, prod

import torch
from torch import nn

from stretto.engine.optim.base import FragmentOptimizer, decay_groups
from stretto.engine.parallel.fragment import ParameterFragment, unsharded_fragments
from stretto.errors import StrettoError
from stretto.job.optimiser import Optimiser
from stretto.user_file import find_function

_STEP = "step"
_TRIED = {"layer.weight": (3, 2), "layer.bias": (3,)}  # parameters of the first update, by plain name
_TYPES = {4: torch.float32, 8: torch.float64}  # of what is updated, by its bytes


def build_user_optimizer(fragments: Iterable[ParameterFragment], config: Optimiser) -> FragmentOptimizer:
    """Return an object of the user's class `optim.name`, which is called with the groups of parameters, the
    fragments, `lr`, and the keyword arguments `optim.arguments`.

    Raises:
        StrettoError: there is no such class, it is no `FragmentOptimizer`, or it takes other arguments.
    """
    function, fragments = find_function(config.name, "optim.name=mine.py:AdaBelief"), list(fragments)
    rule = function.load()
    if not (isinstance(rule, type) and issubclass(rule, FragmentOptimizer)):
        fix = f"class {function.name}(stretto.FragmentOptimizer), as in examples/my_parts.py"
        raise StrettoError(f"{config.name} must be a class derived from FragmentOptimizer", hint=fix)
    groups = decay_groups(fragments, config.weight_decay, config.no_decay)
    return function(groups, fragments, lr=config.lr, **config.arguments)


@lru_cache(maxsize=16)
def try_optimizer(config: Optimiser) -> Optimiser:
    """Update a small matrix and a vector with the user's class, so that its mistakes are found before ranks
    start; return the settings with the size of its states.

    Raises:
        StrettoError: as `build_user_optimizer`; the update fails, or changes nothing; or a state has a shape
            of its own and is not listed as `replicated`.
    """
    named = [(name, nn.Parameter(torch.ones(shape))) for name, shape in _TRIED.items()]
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    fragments = unsharded_fragments(named)
    optimizer = build_user_optimizer(fragments, config)
    try:
        optimizer.step()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        fix = "try it on one nn.Parameter with a gradient"
        raise StrettoError(f"the first update of {config.name} fails: {reason}", hint=fix) from error
    for fragment in fragments:
        parameter = fragment.parameter
        if bool((parameter == 1).all()):
            rule = f"an update of {config.name} leaves {fragment.name} as it was"
            raise StrettoError(rule, hint="change fragment.parameter in place, under no_grad")
        for state, value in optimizer.state[parameter].items():
            if value.shape != parameter.shape and state != _STEP and state not in optimizer.replicated:
                rule = f"has shape {list(value.shape)}, and its parameter {list(parameter.shape)}"
                fix = f"replicated = frozenset({{{state!r}}}) if all ranks compute the same, else that shape"
                raise StrettoError(f"state {state} of {config.name} {rule}", hint=fix)
    return replace(config, state_size=partial(_state_size, config))


def _state_size(config: Optimiser, name: str, shape: tuple[int, ...], elements: int, element: int) -> int:
    """Return the bytes of the states of a parameter's elements; see `job.optimiser.StateSize`."""
    divided, complete = _state_bytes(config, name, shape, element)
    return ceil(divided * elements / max(1, prod(shape))) + complete


@lru_cache(maxsize=65536)
def _state_bytes(config: Optimiser, name: str, shape: Sequence[int], element: int) -> tuple[int, int]:
    """Return the bytes of the states of a whole parameter that every rank has its part of, and of those that
    it has all of.
    """
    parameter = nn.Parameter(torch.empty(shape, dtype=_TYPES[element], device="meta"))
    (fragment,) = unsharded_fragments([(name, parameter)])
    optimizer = build_user_optimizer([fragment], config)
    state = optimizer.new_state(fragment)
    size = {key: value.numel() * value.element_size() for key, value in state.items()}
    complete = sum(size[key] for key in state if key == _STEP or key in optimizer.replicated)
    return sum(size.values()) - complete, complete
