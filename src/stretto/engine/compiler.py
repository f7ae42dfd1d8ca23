"""Functions of tensors through `torch.compile`, with compilations counted, timed and bounded.

A function is compiled as one graph, once for each combination of shapes, types and gradients that it is
called with; all of its callers share the result. Modules are never traced: graphs are told apart by what the
function is called with alone, so that layers that are alike share them.
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
    """Let this process compile by itself, unless the environment says otherwise: each rank would start a pool
    of processes for a handful of kernels.
    """
    if backend == BACKEND and _THREADS not in os.environ:
        from torch._inductor import config

        config.compile_threads = 1


class _TooMany(Exception):
    """A function has as many graphs as are kept."""


class Compiler:
    """Compiles functions for one model.

    Args:
        backend: of `torch.compile`; None: `BACKEND`.
        limit: graphs of one function; beyond, it runs as it is, and `news` says so.

    Attributes:
        graphs: how many graphs were compiled, by the name of their function. A backward is part of its
            forward's graph.
        seconds: that compiling took, backwards included.
    """

    def __init__(self, backend: str | None = None, limit: int = LIMIT) -> None:
        from torch._dynamo.callback import callback_handler  # takes seconds to import

        self.graphs = Counter[str]()
        self.seconds = 0.0
        self.limit = limit
        self._backend = backend = backend or BACKEND
        self._functions = dict[tuple[Callable[..., Any], bool], Callable[..., Any]]()
        self._fresh = list[str]()  # what `news` has not told yet
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
        """The function, compiled when it is first called; the same for all who ask for it.

        Args:
            function: of tensors, in tuples or not, and of constants by which its graphs are told apart.
            dynamic: one graph for all sizes.
        """
        compiled = self._functions.get((function, dynamic))
        if compiled is None:
            compiled = self._functions[function, dynamic] = self._compiled(function, dynamic)
        return compiled

    def _compiled(self, function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        from torch._dynamo.exc import BackendCompilerFailed

        assert isinstance(function, FunctionType)
        name, eager = function.__name__, False
        # graphs are kept with a code object: of its own, another model's neither count nor serve here
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
        config.recompile_limit = max(config.recompile_limit, self.limit + 1)  # ours comes first

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
                    f"{name} runs uncompiled from now on: {self.graphs[name]} graphs of it are the most that "
                    f"are kept, and it was called with {_described(arguments)}"
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
        """What was compiled since the last call, in one line; None: nothing."""
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
    """Types and shapes of the tensors, as `float32 [2, 8, 64]`."""
    flat = [part for x in arguments for part in (x if isinstance(x, tuple) else (x,))]
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in flat if isinstance(t, Tensor)
    )
