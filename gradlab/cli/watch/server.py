"""A view as a page on this machine alone: one HTML document, and the numbers that its script asks for.

Only 127.0.0.1 is listened on. A page of another site may still make a browser send requests there, under a name of its
own that it lets point to 127.0.0.1 (DNS rebinding); so requests for any other host than this one are refused. Nothing
can be changed by a request, and nothing of a file can act as markup: the script sets texts alone, and the policy
allows no script and no style but the page's own, by their hashes.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from socketserver import TCPServer
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gradlab.cli.watch.view import Watched, page_json, text_of
from gradlab.errors import GradlabError
from gradlab.version import VERSION

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")  # with any port: through an SSH tunnel it is another one
NUMBERS = "/numbers.json"
_FRESH_SECONDS = 0.5  # that an answer is given again, however many pages ask
_SHARE = 0.1  # of a core's time that looking takes at most
_IDLE_SECONDS = 10.0  # that a connection may say nothing


def serve(watched: Watched, port: int, title: str) -> None:
    """Serve a page until Ctrl-C, and print its address.

    Args:
        watched: what it shows.
        port: to listen on; 0: any free one.
        title: of the page.

    Raises:
        GradlabError: if the port cannot be had.
    """
    with listen(watched, port, title) as server:
        print(f"{text_of(title)}: http://{ADDRESS}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def listen(watched: Watched, port: int, title: str) -> PageServer:
    """Return a server that listens already. Arguments and errors as of `serve`."""
    try:
        return PageServer(port, Document.of(title), Numbers(watched))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "something else listens there"
        elif error.errno == errno.EACCES:
            why = "it needs rights that this process lacks"
        else:
            why = error.strerror or str(error)
        raise GradlabError(
            f"port {port} of {ADDRESS} cannot be had: {why}; give another by --port, or --port 0 for any free one"
        ) from None


@dataclass(frozen=True)
class Document:
    """The page, and the policy that it is served with."""

    html: bytes
    policy: str

    @classmethod
    def of(cls, title: str) -> Document:
        """Put the page together."""
        here, report = resources.files("gradlab.cli.watch"), resources.files("gradlab.analysis.report")
        style = report.joinpath("base.css").read_text(encoding="utf-8")
        style += here.joinpath("watch.css").read_text(encoding="utf-8")
        script = here.joinpath("watch.js").read_text(encoding="utf-8")
        source = here.joinpath("watch.html.jinja").read_text(encoding="utf-8")
        template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
        html = template.render(title=text_of(title), style=Markup(style), script=Markup(script), version=VERSION)
        return cls(html.encode(), policy(style, script))


def policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy of a page with one style and one script, and requests to its own server."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    of_style, of_script = (f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; style-src {of_style}; script-src {of_script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Numbers:
    """What the page asks for, read anew when it is old.

    Args:
        watched: that is looked at.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._lock = threading.Lock()  # requests come in threads
        self._problem = ""
        self._answer, self._until = b"", 0.0

    def answer(self) -> bytes:
        """Return the view as JSON. What went wrong in a look stands among its problems."""
        with self._lock:
            began = time.monotonic()
            if began < self._until:
                return self._answer
            try:
                self._watched.look()
            except (GradlabError, OSError) as error:
                self._problem = f"{time.strftime('%H:%M:%S')}: {error}"  # which may have been put right since
            view = page_json(self._watched.view())
            view["problems"] += [text_of(self._problem)] if self._problem else []
            self._answer = json.dumps({**view, "ended": self._watched.ended}, allow_nan=False).encode()
            now = time.monotonic()
            self._until = now + max(_FRESH_SECONDS, (now - began) / _SHARE)
            return self._answer


class PageServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1.

    Args:
        port: 0: any free one.
        document: the page.
        numbers: what its script asks for.
    """

    daemon_threads = True
    allow_reuse_port = False  # of two that watch, the second is to be told

    def __init__(self, port: int, document: Document, numbers: Numbers) -> None:
        self.document, self.numbers = document, numbers
        super().__init__((ADDRESS, port), Handler)

    def server_bind(self) -> None:
        """Bind, without asking a name server what this machine is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.socket.getsockname()[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that left in the middle of an answer."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET for the page and its numbers, and refuses the rest."""

    server: PageServer
    server_version, sys_version = "gradlab", ""
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer with the page, or with its numbers."""
        if not is_this_machine(self.headers.get("Host")):
            self._answer(HTTPStatus.FORBIDDEN, f"expected a request for the host {' or '.join(HOSTS)}\n".encode())
        elif self.path == "/":
            self._answer(HTTPStatus.OK, self.server.document.html, "text/html")
        elif self.path == NUMBERS:
            self._answer(HTTPStatus.OK, self.server.numbers.answer(), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, f"there is / and {NUMBERS}\n".encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is not GET, or no HTTP, in one line."""
        if code == HTTPStatus.NOT_IMPLEMENTED:  # as http.server has it of every method without a do_...
            code = HTTPStatus.METHOD_NOT_ALLOWED
        self._answer(HTTPStatus(code), f"{HTTPStatus(code).phrase}: expected GET\n".encode())

    def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain") -> None:
        self.close_connection = True
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": self.server.document.policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        } | ({"Allow": "GET"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {})
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""


def is_this_machine(host: str | None) -> bool:
    """Say whether a Host header names this machine, whatever the port.

    >>> [is_this_machine(host) for host in ("127.0.0.1:8421", "localhost", "gradlab.example:8421", None)]
    [True, True, False, False]
    """
    name, _, port = (host or "").partition(":")
    return name.lower() in HOSTS and (port == "" or (port.isascii() and port.isdigit()))
