"""OpenTelemetry spans of a run: the run, every step of every rank and its phases, in one trace.

Rank 0 has the span of the run, whose parent is that of TRACEPARENT, if there is one; it is the parent of the
steps of all ranks. A thread of OpenTelemetry's SDK sends the spans: a collector that does not answer delays
no step, and what its queue cannot take is dropped.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from importlib.metadata import entry_points
from types import TracebackType
from typing import Any, Self, TypeVar

from stretto.engine.parallel.control import gather_json, run_on_all, run_on_first, this_rank, world_size
from stretto.engine.pipeline import Recorder
from stretto.engine.pipeline.rank_buffers import Call
from stretto.engine.pipeline.recorder import REDUCTIONS
from stretto.engine.progress import PROGRESS
from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.layout.ranges import rank_ranges
from stretto.run.config.run_checks import SPAN_EXPORTERS, span_exporters
from stretto.run.launch.restart import restart_count
from stretto.run.train.task import Task
from stretto.run.train.trackers import code_version
from stretto.versions import __version__

T = TypeVar("T")
_CLOSE_S = 5.0  # how long the end of the run waits for the collector


class _Phases(Recorder):
    """Makes a span of each phase of a step; the actions of the pipeline between them get none."""

    def __init__(self, task: Task, span: Callable[[str], AbstractContextManager[object]]) -> None:
        super().__init__(task.device)
        self._span = span

    def record(self, label: str, call: Call, wait: Call | None) -> None:
        if wait is not None:
            wait()
        if label == REDUCTIONS:
            self.timed(label, call)
        else:
            call()

    def timed(self, label: str, call: Callable[[], T]) -> T:
        with self._span(label):
            return call()


class _Warnings(logging.Handler):
    """Takes what OpenTelemetry logs, which would be printed again and again, and has the first of it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage()


class Spans:
    """The spans of this rank. Used in a `with` that also ends those of a failed run. Collective.

    Args:
        run: its name.
        layout: of the ranks, or None for a recommender.

    Raises:
        StrettoError: an exporter cannot be opened.
    """

    def __init__(self, run: str, layout: Layout | None) -> None:
        self._warnings, self._reported = _Warnings(), False
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._warnings)
        logger.propagate = False
        self._provider = run_on_all(_open_provider)
        self._tracer = self._provider.get_tracer("stretto", __version__)
        self._run, self._step = ExitStack(), ExitStack()
        self._task: Task | None = None
        self._phases: _Phases | None = None
        context = import_module("opentelemetry.context")
        propagator = import_module("opentelemetry.trace.propagation.tracecontext")
        propagator = propagator.TraceContextTextMapPropagator()

        def attach(carrier: Mapping[str, str]) -> None:
            """Make the span that a carrier describes, if it does, the parent of what follows."""
            self._run.callback(context.detach, context.attach(propagator.extract(carrier)))

        def start_run() -> dict[str, str]:
            """On rank 0: start the span of the run; return what makes it the parent of the other ranks'."""
            names = ("traceparent", "tracestate")
            attach({name: os.environ[name.upper()] for name in names if name.upper() in os.environ})
            attributes = {"run": run, "ranks": world_size(), "attempt": restart_count()}
            attributes |= {} if layout is None else {"layout": layout.describe()}
            attributes |= {f"version.{name}": value for name, value in code_version().items()}
            self._run.enter_context(self.span("train", **attributes))
            carrier = dict[str, str]()
            propagator.inject(carrier)
            return carrier

        carrier = run_on_first(start_run)
        if this_rank():
            attach(carrier)
        PROGRESS.observer = self.span

    def span(self, name: str, **attributes: str | int) -> AbstractContextManager[object]:
        """Return the span of a block, inside the one that is open."""
        named = {f"stretto.{key}": value for key, value in attributes.items()}
        return self._tracer.start_as_current_span(name, attributes=named)

    def observe(self, task: Task) -> None:
        """Make spans of the phases of this task's steps."""
        self._task, self._phases = task, _Phases(task, self.span)

    def begin(self, step: int) -> None:
        """Begin the span of a step."""
        assert self._task is not None
        self._step.enter_context(self.span("step", step=step))
        if self._task.recorder is None:  # otherwise the step is profiled
            self._task.recorder = self._phases

    def program(self) -> AbstractContextManager[object]:
        """Return the span of the forwards and backwards of a step."""
        return self.span("the forwards and backwards")

    def end(self, ending: bool) -> None:
        """End the span of a step; report the first failure to send one."""
        assert self._task is not None
        self._step.close()
        if self._task.recorder is self._phases:
            self._task.recorder = None
        if self._warnings.first is not None and not self._reported:
            self._reported = True
            self._task.log(f"warning: spans are late or lost; training continues ({self._warnings.first})")

    def finish(self) -> None:
        """End the span of the run, send those that wait, and report ranks that could not. Collective."""
        assert self._task is not None
        self._close(None, None, None)
        reasons = dict(enumerate(gather_json(self._warnings.first)))
        failed = [rank for rank, reason in reasons.items() if reason and not (rank == 0 and self._reported)]
        if failed:
            ranks = f"rank{'s' * (len(failed) > 1)} {', '.join(rank_ranges(failed))}"
            reason = "too" if self._reported else f"({reasons[failed[0]]})"
            self._task.log(f"warning: spans of {ranks} are late or lost {reason}")

    def _close(self, *error: Any) -> None:
        PROGRESS.observer = nullcontext
        self._step.__exit__(*error)
        self._run.__exit__(*error)
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_CLOSE_S)
        if sending.is_alive():
            self._warnings.first = self._warnings.first or f"no answer within {_CLOSE_S:.0f} s"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._close(kind, error, trace)


def _open_provider() -> Any:
    """Return the SDK's provider of tracers, with the exporters of OpenTelemetry's environment variables."""
    api, sdk = import_module("opentelemetry.trace"), import_module("opentelemetry.sdk.trace")
    processor = import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor
    resource = import_module("opentelemetry.sdk.resources").Resource
    process = resource.create({"host.name": socket.gethostname(), "stretto.rank": this_rank()})
    if process.attributes["service.name"].startswith("unknown_service"):
        process = process.merge(resource({"service.name": "stretto"}))
    provider = sdk.TracerProvider(resource=process, shutdown_on_exit=False)
    for name in span_exporters():
        (exporter,) = entry_points(group=SPAN_EXPORTERS, name=name)
        try:
            provider.add_span_processor(processor(exporter.load()()))
        except Exception as error:  # of any class: of a user's environment variables
            raise StrettoError(
                f"metrics.spans: OpenTelemetry's exporter {name} cannot be opened: {error}",
                hint="see the variables OTEL_..., or metrics.spans=false",
            ) from error
    api.set_tracer_provider(provider)  # for spans of hooks
    return provider
