"""The studio's server: the front end and the answers to its questions, for the user of this machine alone.

It listens on the loopback interface. Other users of the machine, and pages of other origins that the user's
browser shows, can reach that too: every request needs the token that the address begins with (afterwards a
cookie), and must name this server as its host and, if it comes from a page, as its origin. A name that an
attacker resolves to 127.0.0.1 (DNS rebinding) fails the check of the host.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress
from importlib.resources.abc import Traversable
from threading import Event
from types import FrameType
from typing import Any

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.errors import StrettoError
from stretto.view.page import FRONT, STUDIO_POLICY, studio_page
from stretto.web.answers import ALONE, Question, Questions, reply_lines

HOST = "127.0.0.1"
LARGEST_QUESTION = 4 << 20  # bytes; a program of 64 ranks and 256 microbatches as text has 1 MiB
STREAMS = 64  # questions that are answered at the same time, a thread for each

_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".md": "text/plain"}
_HEADERS = {
    "content-security-policy": f"{STUDIO_POLICY}; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# After a redirect by the server, browsers would send no strict cookie if the link was on another site. A
# script in the page redirects instead, and keeps what follows the # of the address.
_ENTRANCE = """<!doctype html><title>Stretto</title>
<script>location.replace("/" + (location.hash || "#runs"))</script>"""


class StudioServer:
    """The server of a studio; its address is known before it serves.

    Args:
        questions: those that the studio answers besides `ALONE`.
        port: 0 for any.
        ended: set when the server ends, for answers that watch files.

    Raises:
        StrettoError: the port is in use.
    """

    def __init__(self, questions: Questions, port: int = 0, ended: Event | None = None) -> None:
        self._questions: Questions = {**ALONE, **questions, "questions": self._names}
        self._ended = ended or Event()
        self._token, self._tickets = secrets.token_urlsafe(24), set[str]()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port))
            self._socket.listen()  # connections wait until it serves
        except OSError as error:
            raise StrettoError(f"--port {port}: {error.strerror}", hint="give --port 0 for any") from None
        self.port: int = self._socket.getsockname()[1]
        self._files = dict(_front_files(FRONT))
        self._page = studio_page()
        routes = [
            Route("/", self._index),
            Route("/ask", self._answer, methods=["POST"]),
            Route("/{path:path}", self._file),
        ]
        guard = Middleware(_Guard, port=self.port, token=self._token, tickets=self._tickets)
        self.app = Starlette(routes=routes, middleware=[guard])

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        return f"http://{HOST}:{self.port}/?token={self._token}"

    def ticket_address(self) -> str:
        """Return an address that can be opened once, for a browser's command line, which others can read."""
        ticket = secrets.token_urlsafe(24)
        self._tickets.add(ticket)
        return f"http://{HOST}:{self.port}/?token={ticket}"

    def serve(self) -> None:
        """Answer requests until Ctrl-C or SIGTERM, which then take effect."""
        config = uvicorn.Config(
            self.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        end = server.handle_exit

        def handle_exit(sig: int, frame: FrameType | None) -> None:
            self._ended.set()
            end(sig, frame)

        server.handle_exit = handle_exit
        server.run(sockets=[self._socket])

    def _names(self, question: Question) -> dict[str, Any]:
        return {"questions": [*self._questions]}

    async def _index(self, request: Request) -> Response:
        return HTMLResponse(self._page)

    async def _file(self, request: Request) -> Response:
        """Serve a file of the front end: it has these files and no others, whatever a path may spell."""
        path: str = request.path_params["path"]
        if path not in self._files:
            return PlainTextResponse("there is no such file", 404)
        return Response(self._files[path], media_type=_TYPES.get(path[path.rfind(".") :], "text/plain"))

    async def _answer(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return PlainTextResponse("a question is application/json", 415)
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > LARGEST_QUESTION:
                return PlainTextResponse(f"a question has at most {LARGEST_QUESTION} bytes", 413)
        try:
            text = content.decode()
            json.loads(text)
        except (ValueError, RecursionError):
            return PlainTextResponse("the question is not JSON", 400)
        lines = self._lines(reply_lines(text, self._questions))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def _lines(self, replies: Generator[str]) -> AsyncIterator[str]:
        """Yield the lines of an answer, each computed on a thread; a request that is aborted ends them."""
        to_thread.current_default_thread_limiter().total_tokens = STREAMS
        try:
            while not self._ended.is_set():
                if (line := await run_in_threadpool(next, replies, None)) is None:
                    break
                yield f"{line}\n"
        finally:
            with suppress(ValueError):  # a line is still being computed: it is the last
                replies.close()


class _Guard:
    """Refuses requests that are not of the user's own page, and adds the headers of every reply."""

    def __init__(self, app: ASGIApp, port: int, token: str, tickets: set[str]) -> None:
        self._app, self._token = app, token
        self._tickets = tickets
        self._hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
        self._cookie = f"stretto-{port}"  # browsers share cookies between the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        reply = self._reply(Request(scope)) or self._app
        await reply(scope, receive, send_with_headers)

    def _reply(self, request: Request) -> Response | None:
        """Return a refusal, or the reply to the address with the token; None for a request to be answered."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self._hosts:
            return PlainTextResponse("this server is 127.0.0.1, and answers under no other name", 403)
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse("pages of other origins get no answer", 403)
        if "token" in request.query_params:
            secret = request.query_params["token"]
            valid = secret in self._tickets or self._is_token(secret)
            self._tickets.discard(secret)
            if request.method != "GET" or not valid:
                return PlainTextResponse("the token is wrong: open the address that the studio printed", 403)
            entrance = HTMLResponse(_ENTRANCE)
            entrance.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return entrance
        if not self._is_token(request.cookies.get(self._cookie, "")):
            return PlainTextResponse("open the address that the studio printed, with its token", 403)
        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())


def _front_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of the front end, by which it is asked for."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _front_files(entry, f"{prefix}{entry.name}/")
        elif entry.name != "index.html":  # a template
            yield f"{prefix}{entry.name}", entry.read_bytes()
