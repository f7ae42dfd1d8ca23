"""Compile functions of tensors with `torch.compile`, and count, time and limit the compilations.

A function is compiled as one graph, once for each combination of shapes, dtypes and gradients of its
arguments; all callers share it. Modules are never traced, so graphs depend only on a function's arguments,
and equal layers share them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from stretto.engine.progress import PROGRESS

BACKEND = "inductor"
LIMIT = 16  # graphs of one function
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def one_thread(backend: str) -> None:
    """Compile in this process unless the environment sets a number of threads: each rank would otherwise
    start a pool of processes for a few kernels.
    """
    if backend == BACKEND and _THREADS not in os.environ:
        from torch._inductor import config

        config.compile_threads = 1


class _TooMany(Exception):
    """A function has reached its limit of graphs."""


class Compiler:
    """Compiles functions for one model.

    Args:
        backend: backend of `torch.compile`, by default `BACKEND`.
        limit: maximum number of graphs of a function, which then runs uncompiled; `news` reports this.

    Attributes:
        graphs: number of compiled graphs by function name. A backward is part of its forward's graph.
        seconds: time of all compilations, including backwards.
    """

    def __init__(self, backend: str | None = None, limit: int = LIMIT) -> None:
        from torch._dynamo.callback import callback_handler  # takes seconds to import

        self.graphs = Counter[str]()
        self.seconds = 0.0
        self.limit = limit
        self._backend = backend = backend or BACKEND
        self._functions = dict[tuple[Callable[..., Any], bool], Callable[..., Any]]()
        self._fresh = list[str]()  # graphs not yet reported by `news`
        self._given_up = list[str]()
        self._reported = 0.0
        self._started = 0.0
        self._callbacks = callback_handler
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        one_thread(backend)

    def close(self) -> None:
        """Stop listening to compilations."""
        self._callbacks.remove_start_callback(self._start)
        self._callbacks.remove_end_callback(self._end)

    def __call__(self, function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        """Return the function, compiled at its first call; all callers get the same object.

        Args:
            function: its arguments are tensors or tuples of tensors, and constants, which select a graph.
            dynamic: compile one graph for all sizes.
        """
        compiled = self._functions.get((function, dynamic))
        if compiled is None:
            compiled = self._functions[function, dynamic] = self._compiled(function, dynamic)
        return compiled

    def _compiled(self, function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        from torch._dynamo.exc import BackendCompilerFailed

        assert isinstance(function, FunctionType)
        name, eager = function.__name__, False
        # torch caches graphs by code object: a copy separates them from those of other models
        copied = FunctionType(
            function.__code__.replace(),
            function.__globals__,
            name,
            function.__defaults__,
            function.__closure__,
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        from torch._dynamo import config, lookup_backend

        build = lookup_backend(self._backend)
        config.recompile_limit = max(
            config.recompile_limit, self.limit + 1
        )  # the limit of this class is reached first

        def backend(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
            if self.graphs[name] == self.limit:
                raise _TooMany
            self.graphs[name] += 1
            use = "" if torch.is_grad_enabled() else " without gradients"
            self._fresh.append(f"{name} of {_described(inputs)}{use}")
            return build(graph, inputs)

        compiled = torch.compile(copied, backend=backend, fullgraph=True, dynamic=dynamic)

        def call(*arguments: Any) -> Any:
            nonlocal eager
            if eager:
                return function(*arguments)
            try:
                return compiled(*arguments)
            except BackendCompilerFailed as error:
                if not isinstance(error.inner_exception, _TooMany):
                    raise
                eager = True
                self._given_up.append(
                    f"{name} runs uncompiled from now on: it has reached the limit of {self.graphs[name]} "
                    f"graphs, and was called with {_described(arguments)}"
                )
                return function(*arguments)

        return call

    def _start(self, _: Any) -> None:
        PROGRESS.begin_long()
        self._started = perf_counter()

    def _end(self, _: Any) -> None:
        PROGRESS.end_long()
        self.seconds += perf_counter() - self._started

    def news(self) -> str | None:
        """Return a line about the compilations since the last call, or None."""
        first, took = self._reported == 0.0, self.seconds - self._reported
        fresh, given_up = self._fresh, self._given_up
        self._reported = self.seconds
        self._fresh, self._given_up = [], []
        lines = list[str]()
        if fresh and first:
            names = ", ".join(sorted(self.graphs))
            lines.append(f"compiled {names} for all blocks: {len(fresh)} graphs in {took:.1f} s")
        elif fresh:
            lines.append(f"compiled {len(fresh)} more graphs in {took:.1f} s: {'; '.join(fresh)}")
        return "; ".join(lines + given_up) or None


def _described(arguments: Sequence[Any]) -> str:
    """Return dtypes and shapes of the tensors, such as `float32 [2, 8, 64]`."""
    flat = [part for x in arguments for part in (x if isinstance(x, tuple) else (x,))]
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in flat if isinstance(t, Tensor)
    )
