"""What the agent of a TrainJob tells the cluster of the run's progress."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from launch_checks import check_schema
from stretto.run.launch import progress
from stretto.run.launch.progress import PROGRESS, SERVER, TOKEN, newest, report_progress, status

RECORD = {"step": 75, "loss": 2.5, "tokens_per_s": 1e4, "step_time_s": 0.5, "mfu": None}


class Controller(HTTPServer):
    """Stands in for Kubeflow's: remembers what it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.told: list[tuple[str | None, dict[str, Any]]] = []
        self.code = 200


class Handler(BaseHTTPRequestHandler):
    server: Controller  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.told.append((self.headers["Authorization"], body))
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def controller() -> Generator[Controller]:
    with Controller() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def environment(folder: Path, controller: Controller) -> dict[str, str]:
    (folder / "token").write_text("abc\n")
    return {
        SERVER: f"http://127.0.0.1:{controller.server_port}/status",
        TOKEN: str(folder / "token"),
        PROGRESS: f"300 {folder}",
        "PET_NODE_RANK": "0",
    }


def test_the_newest_step_is_reported(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(RECORD)}\n")
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    with report_progress(environment(tmp_path, controller)):
        time.sleep(0.2)
    ((authorization, body),) = controller.told  # once, as no other step has ended
    assert authorization == "Bearer abc"
    found = body["trainerStatus"]
    assert found["progressPercentage"] == 25
    assert found["estimatedRemainingSeconds"] == 112
    assert {"name": "loss", "value": "2.5"} in found["metrics"]


def test_status_is_as_published() -> None:
    job = {"spec": {"runtimeRef": {"name": "a"}}, "status": {"trainerStatus": status(RECORD, 300)}}
    check_schema(job, "trainjob")


@pytest.mark.parametrize("changes", [{"PET_NODE_RANK": "1"}, {SERVER: ""}, {PROGRESS: ""}])
def test_others_report_nothing(changes: dict[str, str], tmp_path: Path, controller: Controller) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(RECORD)}\n")
    with report_progress(environment(tmp_path, controller) | changes):
        pass
    assert controller.told == []


def test_a_cluster_that_does_not_listen_does_no_harm(
    tmp_path: Path,
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    controller.code = 403
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(RECORD)}\n")
    with report_progress(environment(tmp_path, controller)):
        while len(controller.told) < 3:
            pass
    assert capsys.readouterr().err.count("the cluster was not told of the progress: HTTP Error 403") == 1


def test_broken_lines_are_passed_over(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert newest(metrics) is None
    metrics.write_text('{"step": 1}\n{"step": 2}\n{"st\n{"step": 3')
    assert newest(metrics) == {"step": 2}
    metrics.write_text("")
    assert newest(metrics) is None
