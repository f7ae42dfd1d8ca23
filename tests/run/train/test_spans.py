"""Spans of a run, as a collector gets them from real ranks through OpenTelemetry's own exporter."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.engine.progress import ProgressMarks
from stretto.run.config.check import find_problems
from stretto.run.config.run_checks import span_exporters
from stretto.run.launch.local import RankFailed
from tiny_job import LLAMA, job
from train_runs import at_step, fail, keep_notes, train

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PIPELINE = ("layout.pp=2", "schedule.name=1f1b", "train.steps=3", "sample.tokens=0", "metrics.spans=true")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "TRACEPARENT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@contextmanager
def collector(variables: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """Receive OTLP over HTTP; the spans that have come, with the attributes of their rank."""
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'stretto[opentelemetry]'")
    message = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    spans = list[SimpleNamespace]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for group in message.ExportTraceServiceRequest.FromString(body).resource_spans:
                process = plain(group.resource.attributes)
                for span in (span for scope in group.scope_spans for span in scope.spans):
                    spans.append(SimpleNamespace(process=process, span=span, **described(span)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield spans
        server.shutdown()


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def described(span: Any) -> Mapping[str, Any]:
    numbers = {name: getattr(span, name).hex() for name in ("trace_id", "span_id", "parent_span_id")}
    return {"name": span.name, "attributes": plain(span.attributes), **numbers}


def test_all_ranks_send_their_steps_and_phases_in_the_trace_of_the_launcher(
    tmp_path: Path, variables: pytest.MonkeyPatch
) -> None:
    overrides = (*PIPELINE, "checkpoint.every=2", "eval.every=2", "eval.batches=1")
    variables.setenv("TRACEPARENT", PARENT)
    variables.setenv("OTEL_RESOURCE_ATTRIBUTES", "cluster=a")
    with collector(variables) as spans:
        config = job(tmp_path, *overrides, model=LLAMA)
        train(config)
    assert {span.trace_id for span in spans} == {PARENT.split("-")[1]}
    (run,) = (span for span in spans if span.name == "train")
    assert run.parent_span_id == PARENT.split("-")[2]
    assert run.attributes.items() >= {
        ("stretto.run", "tiny"),
        ("stretto.layout", "pp2"),
        ("stretto.ranks", 2),
    }
    assert "stretto.version.torch" in run.attributes
    for rank in (0, 1):
        own = [span for span in spans if span.process["stretto.rank"] == rank]
        assert (own[0].process["service.name"], own[0].process["cluster"]) == ("stretto", "a")
        top = [span.name for span in own if span.parent_span_id == run.span_id]
        assert sorted(top) == ["evaluation"] * 2 + ["saving a checkpoint"] * 2 + ["step"] * 3
        steps = {span.attributes["stretto.step"]: span for span in own if span.name == "step"}
        assert [*steps] == [1, 2, 3]
        for step in steps.values():
            phases = [span for span in own if span.parent_span_id == step.span_id]
            assert [span.name for span in phases] == [
                *("the batch", "the forwards and backwards", "the agreement", "the update")
            ]
            assert all(
                step.span.start_time_unix_nano <= phase.span.start_time_unix_nano
                and phase.span.end_time_unix_nano <= step.span.end_time_unix_nano
                for phase in phases
            )
            (reductions,) = (s for s in own if s.parent_span_id == phases[1].span_id)
            assert reductions.name == "the reductions"


def test_without_a_launcher_all_ranks_are_in_one_new_trace_and_a_failed_step_says_so(
    tmp_path: Path, variables: pytest.MonkeyPatch
) -> None:
    variables.setenv("OTEL_SERVICE_NAME", "mine")
    with collector(variables) as spans, pytest.raises(RankFailed):
        train(job(tmp_path, *PIPELINE, model=LLAMA), at_step(2, 0, fail))
    (run,) = (span for span in spans if span.name == "train")
    assert not run.parent_span_id
    assert {span.trace_id for span in spans} == {run.trace_id}
    assert {span.process["service.name"] for span in spans} == {"mine"}
    failed = [s.name for s in spans if s.span.status.code == 2 and s.process["stretto.rank"] == 0]
    assert sorted(failed) == ["step", "train"]


@pytest.mark.parametrize("answers", [False, True])
def test_a_collector_that_is_away_is_reported_once_and_changes_nothing(
    tmp_path: Path, variables: pytest.MonkeyPatch, answers: bool
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'stretto[opentelemetry]'")
    plain = job(tmp_path, *PIPELINE, "metrics.spans=false", "run.name=plain", model=LLAMA)
    train(plain)
    config, notes = job(tmp_path, *PIPELINE, model=LLAMA), tmp_path / "notes"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and never answers
        port = silent.getsockname()[1] if answers else 9
        variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        variables.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        began = time.monotonic()
        train(config, keep_notes(str(notes)))
    assert time.monotonic() - began < 30
    warnings = [line for line in notes.read_text().splitlines() if "spans" in line]
    assert len(warnings) == (1 if answers else 2), warnings
    assert losses(config.run.folder) == losses(plain.run.folder)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_is_not_installed_is_refused_before_the_run(
    tmp_path: Path, variables: pytest.MonkeyPatch
) -> None:
    variables.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    (problem,) = find_problems(job(tmp_path, "metrics.spans=true"))
    assert "metrics.spans is True: OpenTelemetry's exporter zipkin is not installed" in problem.message
    assert not find_problems(job(tmp_path))


@pytest.mark.parametrize(
    ("set_variables", "exporters"),
    [
        ({}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "none"}, []),
    ],
)
def test_the_exporters_are_those_of_the_environment(
    variables: pytest.MonkeyPatch, set_variables: Mapping[str, str], exporters: list[str]
) -> None:
    for name, value in set_variables.items():
        variables.setenv(name, value)
    assert span_exporters() == exporters


def test_an_observer_of_longer_operations() -> None:
    marks, seen = ProgressMarks(), list[str]()

    @contextmanager
    def observer(text: str) -> Iterator[None]:
        seen.append(f"begin {text}")
        yield
        seen.append(f"end {text}")

    with marks.long("one"):
        pass
    marks.observer = observer
    with marks.long("two"):
        seen.append("within")
    assert seen == ["begin two", "within", "end two"]
