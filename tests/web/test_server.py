"""The studio's server: who gets an answer, to what, and with which headers."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from command_line import CommandLine
from stretto.web.answers import Question
from stretto.web.server import LARGEST_QUESTION, StudioServer


@dataclass
class Client:
    """What a program of this machine may send to the server."""

    port: int
    token: str
    ended: threading.Event

    def send(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any, str]:
        """Send a request of the page itself, with these headers changed; return status, headers and text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        default = {"host": f"127.0.0.1:{self.port}", "cookie": f"stretto-{self.port}={self.token}"}
        if body is not None:
            default |= {"content-type": "application/json", "content-length": str(len(body))}
        for name, value in {**default, **{k.replace("_", "-"): v for k, v in headers.items()}}.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders(body)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, reply.headers, text

    def ask(self, question: Any, **headers: str) -> tuple[int, str]:
        status, _, text = self.send("/ask", "POST", json.dumps(question).encode(), **headers)
        return status, text


def forever(ended: threading.Event) -> Any:
    """A question whose answer never ends by itself; `ended` is set when it is ended."""

    def watch(question: Question) -> Iterator[dict[str, Any] | None]:
        try:
            yield {"first": True}
            while True:
                time.sleep(0.01)
                yield None
        finally:
            ended.set()

    return watch


def failing(question: Question) -> dict[str, Any]:
    raise KeyError("planted")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    ended = threading.Event()
    server = StudioServer({"forever": forever(ended), "failing": failing})
    running = uvicorn.Server(uvicorn.Config(server.app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [server._socket]})
    thread.start()
    yield Client(server.port, server.address.partition("=")[2], ended)
    running.should_exit = running.force_exit = True
    thread.join()


def test_the_address_sets_a_cookie_that_opens_the_page(client: Client) -> None:
    status, headers, text = client.send(f"/?token={client.token}", cookie="")
    assert status == 200
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert 'location.replace("/" + (location.hash || "#runs"))' in text
    status, headers, text = client.send("/", cookie=headers["set-cookie"].partition(";")[0])
    assert status == 200
    assert 'data-backend="studio"' in text


def test_a_ticket_opens_the_page_once() -> None:
    """What stands on the browser's command line, where other users can read it, opens nothing later."""
    server = StudioServer({})
    running = uvicorn.Server(uvicorn.Config(server.app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [server._socket]})
    thread.start()
    token, ticket = (text.partition("=")[2] for text in (server.address, server.ticket_address()))
    client = Client(server.port, token, threading.Event())
    assert ticket != token
    status, headers, _ = client.send(f"/?token={ticket}", cookie="")
    assert status == 200
    assert client.send("/", cookie=headers["set-cookie"].partition(";")[0])[0] == 200
    assert client.send(f"/?token={ticket}", cookie="")[0] == 403
    running.should_exit = running.force_exit = True
    thread.join()


def test_every_reply_has_the_headers(client: Client) -> None:
    for path, cookie in (("/", None), ("/app.js", None), ("/none", None), ("/", "no=1")):
        _, headers, _ = client.send(path, **({} if cookie is None else {"cookie": cookie}))
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("path", ["/", "/app.js", "/ask", "/none"])
@pytest.mark.parametrize("cookie", ["", "stretto-1=x", "stretto-{port}=wrong", "stretto-{port}=ü"])
def test_nothing_is_served_without_the_token(client: Client, path: str, cookie: str) -> None:
    status, headers, text = client.send(path, cookie=cookie.format(port=client.port))
    assert status == 403
    assert "set-cookie" not in headers
    assert len(text.splitlines()) == 1


def test_a_wrong_token_sets_no_cookie(client: Client) -> None:
    for method in ("GET", "POST"):
        status, headers, _ = client.send("/?token=wrong", method, cookie="")
        assert status == 403
        assert "set-cookie" not in headers


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1"])
def test_other_names_of_this_machine_are_refused(client: Client, host: str) -> None:
    """DNS rebinding: the attacker's name resolves to 127.0.0.1, and the browser sends its name."""
    status, _, _ = client.send("/", host=host.format(port=client.port))
    assert status in (400, 403)
    # without any name the server closes the connection before a body has arrived, which resets it
    question = json.dumps({"ask": "questions"}).encode() if host else b""
    status, _, _ = client.send("/ask", "POST", question, host=host.format(port=client.port))
    assert status in (400, 403)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:{port}"]
)
def test_other_origins_are_refused(client: Client, origin: str) -> None:
    status, _ = client.ask({"ask": "questions"}, origin=origin.format(port=client.port))
    assert status == 403


def test_the_page_s_own_origin_is_answered(client: Client) -> None:
    status, text = client.ask({"ask": "questions"}, origin=f"http://127.0.0.1:{client.port}")
    assert status == 200
    assert {"schedules", "timeline", "forever"} <= {*json.loads(text)["answer"]["questions"]}


@pytest.mark.parametrize(
    "path",
    [
        *("/../page.py", "/%2e%2e/page.py", "/..%2fpage.py", "//etc/passwd", "/%2fetc%2fpasswd"),
        *("/vendor/../../page.py", "/index.html", "/vendor", "/vendor/", "/app.js%00", "/\\app.js"),
    ],
)
def test_files_that_are_not_of_the_front_end_do_not_exist(client: Client, path: str) -> None:
    status, _, text = client.send(path)
    assert status in (400, 404)
    assert "import" not in text


def test_files_of_the_front_end(client: Client) -> None:
    for path, kind in (("/app.js", "text/javascript"), ("/vendor/uplot.css", "text/css")):
        status, headers, text = client.send(path)
        assert (status, headers["content-type"].partition(";")[0]) == (200, kind)
        assert text


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "POST"])
def test_other_methods_are_refused(client: Client, method: str) -> None:
    assert client.send("/", method)[0] == 405
    assert client.send("/app.js", method)[0] == 405
    assert client.send("/ask", "GET")[0] == 404


def test_questions_are_json_of_a_limited_size(client: Client) -> None:
    assert client.send("/ask", "POST", b"{}", content_type="text/plain")[0] == 415
    assert client.send("/ask", "POST", b"{")[0] == 400
    assert client.send("/ask", "POST", b"\xff")[0] == 400
    assert client.send("/ask", "POST", b"[" * 100_000)[0] == 400
    assert client.send("/ask", "POST", b" " * (LARGEST_QUESTION + 1))[0] == 413
    status, text = client.ask({"ask": "nothing"})
    assert (status, "error" in json.loads(text)) == (200, True)


def test_a_question_that_fails_is_answered_with_an_error(client: Client) -> None:
    for question in ({"ask": "failing"}, {"ask": "timeline"}, {"ask": "timeline", "programs": 3}):
        status, text = client.ask(question)
        assert status == 200
        assert json.loads(text.splitlines()[-1])["error"]["message"]


def test_an_aborted_request_ends_its_answer(client: Client) -> None:
    body = b'{"ask": "forever"}'
    head = f"POST /ask HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nContent-Type: application/json\r\n"
    head += f"Cookie: stretto-{client.port}={client.token}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while b'"first"' not in received:
            received += connection.recv(4096)
        assert not client.ended.is_set()
    assert client.ended.wait(10)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_signals_end_the_command(tmp_path: Path, number: int) -> None:
    """While an answer is being watched, too."""
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # which nohup lets children ignore
    code += "from stretto.cli.main import main; main()"
    command = [sys.executable, "-c", code, "studio", str(tmp_path), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(.+)", address).groups()  # pyright: ignore
        ask = Client(int(port), token, threading.Event()).ask
        watching = threading.Thread(target=ask, args=({"ask": "runs"},))
        watching.start()
        time.sleep(0.5)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=20)
        watching.join(20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, rest) == (0, "")


def test_without_the_extra_one_line_names_it(
    stretto: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "stretto.web.server")
    error = stretto.error("studio", tmp_path)
    assert error == (
        "error: stretto studio needs uvicorn, which is not installed\nhint: pip install 'stretto[studio]'\n"
    )


def test_a_folder_or_port_that_is_not_there(stretto: CommandLine, tmp_path: Path) -> None:
    assert "is no folder" in stretto.error("studio", tmp_path / "none")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert f"--port {taken.getsockname()[1]}" in stretto.error(
            "studio", tmp_path, "--port", taken.getsockname()[1]
        )
