"""`gradlab watch --serve`: real requests to a real server, over logs and recordings that grow or are hostile."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradlab.cli.watch.command import pause
from gradlab.cli.watch.log import WatchedLog
from gradlab.cli.watch.recording import WatchedTrace
from gradlab.cli.watch.server import ADDRESS, Numbers, PageServer, listen
from gradlab.cli.watch.terminal import BARS, drawn
from gradlab.cli.watch.view import Series, View, Watched, curve_json, height
from gradlab.errors import GradlabError
from support.command_line import Command
from support.recorded import random_gradients, record

HOSTILE = "</script><script>alert(1)</script>\u202e\x1b[31m"
LINES: list[dict[str, Any]] = [
    {"step": 1, "time": 10.0, "loss": 2.5, "payload_bytes": 4e6, "compression_ratio": 1.0},
    {"step": 2, "time": 10.5, "loss": 1.5, "payload_bytes": 1e6, "compression_ratio": 4.0, "rules": ["never_sent: a"]},
]


class Answer:
    """What came back: the status, the headers and the content."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.content = answer.status, answer.headers, answer.read()

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.content)


Ask = Callable[..., Answer]


@contextmanager
def served(watched: Watched) -> Iterator[Ask]:
    """A server on a free port; a function that sends it a request."""
    with listen(watched, 0, "run.jsonl") as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        try:
            yield lambda *words, **more: ask(server, *words, **more)
        finally:
            server.shutdown()
            thread.join()


def ask(server: PageServer, path: str, method: str = "GET", host: str | None = None) -> Answer:
    connection = http.client.HTTPConnection(ADDRESS, server.server_port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"{ADDRESS}:{server.server_port}")
        connection.endheaders()
        return Answer(connection.getresponse())
    finally:
        connection.close()


def log(path: Path, lines: list[dict[str, Any]] = LINES) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def last(view: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value, _ in view["numbers"]}


# --- who is answered, and with what ---------------------------------------------------------------------------------


def test_the_page_is_whole_and_its_policy_allows_nothing_else(tmp_path: Path) -> None:
    with served(WatchedLog(log(tmp_path / "run.jsonl"))) as get:
        page = get("/")
    assert page.status == 200
    text, policy = page.content.decode(), page.headers["Content-Security-Policy"]
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    for tag in ("style", "script"):
        [inside] = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert set(re.findall(r"(?:src|href)=\"([^\"]*)\"", text)) == {"data:,"}
    assert "http://www.w3.org/2000/svg" in text  # a name, and the only address
    assert len(re.findall("https?://", text)) == 1
    assert (page.headers["X-Content-Type-Options"], page.headers["Cache-Control"]) == ("nosniff", "no-store")
    assert "Access-Control-Allow-Origin" not in page.headers
    assert "Python" not in page.headers["Server"]


@pytest.mark.parametrize("path", ["/", "/numbers.json", "/none"])
@pytest.mark.parametrize(
    "host", ["gradlab.example", "127.0.0.1.gradlab.example:80", "127.0.0.2", "localhost:80@x", "[::1]", ""]
)
def test_a_request_for_another_host_is_refused(tmp_path: Path, path: str, host: str) -> None:
    with served(WatchedLog(log(tmp_path / "run.jsonl"))) as get:
        refused = get(path, host=host)
        allowed = get("/numbers.json", host="LocalHost:9000")  # the other end of a tunnel has a port of its own
    assert (refused.status, b"loss" in refused.content) == (403, False)
    assert allowed.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "FETCH"])
def test_all_but_get_is_refused(tmp_path: Path, method: str) -> None:
    with served(WatchedLog(log(tmp_path / "run.jsonl"))) as get:
        refused = get("/numbers.json", method)
    assert (refused.status, refused.headers["Allow"]) == (405, "GET")
    assert b"loss" not in refused.content


@pytest.mark.parametrize("path", ["/run.jsonl", "/../run.jsonl", "/numbers.json/..", "/%2e%2e/", "/?x"])
def test_no_other_path_leads_anywhere(tmp_path: Path, path: str) -> None:
    with served(WatchedLog(log(tmp_path / "run.jsonl"))) as get:
        assert get(path).status == 404


def test_what_is_no_http_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with listen(WatchedLog(log(tmp_path / "run.jsonl")), 0, "run") as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        for sent in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"x" * 70_000 + b"\r\n\r\n"):
            with socket.create_connection((ADDRESS, server.server_port), timeout=30) as connection:
                connection.sendall(sent)
                with connection.makefile("rb") as answer:
                    assert b"loss" not in answer.read()
        # One that says nothing, and goes.
        socket.create_connection((ADDRESS, server.server_port), timeout=30).close()
        assert ask(server, "/numbers.json").status == 200
        server.shutdown()
        thread.join()


# --- what the numbers are -------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_last_line(tmp_path: Path) -> None:
    with served(WatchedLog(log(tmp_path / "run.jsonl"))) as get:
        view = get("/numbers.json").json
    assert view["head"] == "step 2, running, 500 ms a step"
    assert last(view) == {
        **{"loss": "1.500", "payload bytes": "1.00 MB", "compression ratio": "4.000", "step seconds": "500 ms"},
    }
    assert [mean for name, _, mean in view["numbers"] if name == "loss"] == ["2.000"]
    [loss] = [curve for curve in view["curves"] if curve["name"] == "loss"]
    assert (loss["points"], loss["low"], loss["high"]) == ([1.0, 0.0], "1.500", "2.500")
    assert (loss["first_step"], loss["last_step"]) == ("1", "2")
    assert (view["rules"], view["problems"], view["ended"]) == (["never_sent: a"], [], False)


def test_it_follows_a_file_that_grows_and_ends(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl", LINES[:1])
    numbers = Numbers(WatchedLog(path))

    def seen() -> dict[str, Any]:
        numbers._until = 0.0  # as if the answer were old
        return json.loads(numbers.answer())

    assert last(seen())["loss"] == "2.500"
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 2, "time": 10.5, "lo')
        file.flush()
        assert last(seen())["loss"] == "2.500"
        file.write('ss": null}\n')
        file.flush()
        assert last(seen())["loss"] == "not finite"
        file.write('{"step": 3, "time": 11.0, "error": "ValueError: over"}\n')
    assert (seen()["head"], seen()["ended"]) == ("step 2, ended with an error: ValueError: over, 500 ms a step", True)
    log(path, LINES[:1])  # another run, in its place
    assert (last(seen())["loss"], seen()["ended"]) == ("2.500", False)


def test_however_many_ask_it_looks_once(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl", LINES[:1])
    numbers = Numbers(WatchedLog(path))
    first = numbers.answer()
    numbers._until = float("inf")
    log(path)
    assert numbers.answer() is first


def test_a_log_that_is_empty_still_is_served(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").touch()
    with served(WatchedLog(tmp_path / "run.jsonl")) as get:
        view = get("/numbers.json").json
    assert (view["numbers"], view["curves"], view["tables"]) == ([], [], [])


def test_hostile_lines_are_text_or_a_problem(tmp_path: Path) -> None:
    named = {
        "step": 3,
        "time": 1.0,
        HOSTILE: 1.0,
        f"relative_error/{HOSTILE}": 0.5,
        "huge": 10**400,
        "rules": [HOSTILE],
    }
    named |= {"nothing": None, "word": "x", "list": [1], "nested": {"a": 1}, "bytes": 1e308, "x" * 5000: 1.0}
    path = log(tmp_path / "run.jsonl", [*LINES, named])
    numbers = Numbers(WatchedLog(path))
    text = numbers.answer().decode()
    view = json.loads(text)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e]", "".join(every_text(view)))
    assert view["rules"][-1].startswith("</script>")  # as text; the page puts it into no markup
    assert max(map(len, every_text(view))) < 1000
    with open(path, "ab") as file:
        file.write(
            b"\xff\x00 no line\n" + b"[" * 100_000 + b"\n" + json.dumps({"step": 4, "time": 2.0}).encode() + b"\n"
        )
    heads, problems = [], []
    for _ in range(3):  # each look goes on behind the line that the one before could not read
        numbers._until = 0.0
        seen = json.loads(numbers.answer())
        heads.append(seen["head"].partition(",")[0])
        problems += seen["problems"]
    assert heads == ["step 3", "step 3", "step 4"]
    assert all("is no log: expected lines of JSON" in problem for problem in problems)
    assert len(problems) == 3
    path.unlink()
    numbers._until = 0.0
    [gone] = json.loads(numbers.answer())["problems"]
    assert gone.endswith(f"cannot read {path}: No such file or directory")


def test_a_line_of_another_form_is_named_and_what_follows_is_shown(tmp_path: Path, gradlab: Command) -> None:
    path = log(tmp_path / "run.jsonl", [{"step": 5, "rules": 5}, *LINES])
    code, out, err = gradlab("watch", path, "--once")
    assert (code, out) == (2, "")
    assert err == f"gradlab: {path}: step 5: rules is 5, expected null or a list\n"
    log(path, LINES)
    numbers = Numbers(WatchedLog(path))
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 3, "rules": ["a", 7]}) + "\n" + json.dumps({"step": 4, "time": 12.0}) + "\n")
    views = []
    for _ in range(2):
        numbers._until = 0.0
        views.append(json.loads(numbers.answer()))
    assert [problem.partition(": ")[2] for problem in views[0]["problems"]] == [
        f"{path}: step 3: rules[1] is 7, expected a text"
    ]
    assert views[1]["head"].startswith("step 4,")


def every_text(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from every_text(one)


def test_many_numbers_and_many_steps_stay_small(tmp_path: Path) -> None:
    names = [f"number {number}" for number in range(500)]
    lines = [{"step": step, "time": float(step), **dict.fromkeys((*names, "loss"), step)} for step in range(1, 401)]
    with served(WatchedLog(log(tmp_path / "run.jsonl", lines))) as get:
        view = get("/numbers.json").json
    assert len(view["curves"]) == 24
    assert {len(curve["points"]) for curve in view["curves"]} == {160}


@given(st.lists(st.one_of(st.none(), st.floats(-1e308, 1e308)), min_size=1, max_size=400))
def test_a_curve_lies_between_its_lowest_and_its_highest(values: list[float | None]) -> None:
    curve = curve_json(Series("x", range(len(values)), values))
    points = [point for point in curve["points"] if point is not None]
    assert len(curve["points"]) == (0 if curve["without_line"] else min(len(values), 160))
    assert all(0 <= point <= 1 for point in points)
    if len(values) <= 160 and not curve["without_line"]:
        assert [point is None for point in curve["points"]] == [value is None for value in values]
        known = [value for value in values if value is not None]
        if known and height(max(known), min(known), max(known)) == 1:
            assert (min(points), max(points)) == (0, 1)
    json.dumps(curve, allow_nan=False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.0, 0.0, 0.0], "constant"),
        ([1.0, 1.00000001, 1.0], "constant"),
        ([1.0, 1.01], ""),
        ([None, 2.0, None, 2.0], "constant where known"),
        ([None, 2.0, None, 2.5], ""),
        ([2.0], "one value so far"),
        ([None, None], "never finite"),
    ],
)
def test_what_does_not_change_has_words_in_place_of_a_line(values: list[float | None], words: str) -> None:
    series = Series("x", range(len(values)), values)
    curve = curve_json(series)
    assert (curve["without_line"], bool(curve["points"])) == (words, not words)
    terminal = io.StringIO()
    Console(file=terminal, width=120).print(drawn(View("run", "step 1", series=[series])))
    row = terminal.getvalue().splitlines()[-1].rstrip()
    assert not words or row.endswith(words)
    assert any(bar in row for bar in BARS) != bool(words)


def test_a_recording_is_served_too(tmp_path: Path) -> None:
    record(tmp_path / "trace", random_gradients(0, 12, 2)).close()
    with served(WatchedTrace(tmp_path / "trace")) as get:
        view = get("/numbers.json").json
    assert view["head"] == "12 steps on all 2 ranks, closed"
    assert last(view)["loss"] == "0.08333"
    assert [row[0] for row in view["tables"][0]["rows"]] == ["0", "1"]
    assert view["ended"]


# --- the command ----------------------------------------------------------------------------------------------------


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    path = log(tmp_path / "run.jsonl")

    def listen_to_interrupts() -> None:  # a shell's background job, as the tests may be, is told to ignore them
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [sys.executable, "-m", "gradlab", "watch", str(path), "--serve", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_interrupts
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(rf"{re.escape(str(path))}: http://127.0.0.1:(\d+)/ \(Ctrl-C ends it\)\n", line)
        assert found, line
        connection = http.client.HTTPConnection(ADDRESS, int(found[1]), timeout=30)
        connection.request("GET", "/numbers.json")
        assert json.loads(connection.getresponse().read())["head"].startswith("step 2")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "gradlab: interrupted\n")


def test_a_port_in_use_is_one_line(tmp_path: Path, gradlab: Command) -> None:
    path = log(tmp_path / "run.jsonl")
    with listen(WatchedLog(path), 0, "run") as server:
        code, _, err = gradlab("watch", path, "--serve", "--port", server.server_port)
    assert (code, err) == (
        2,
        f"gradlab: port {server.server_port} of 127.0.0.1 cannot be had: something else listens there; "
        "give another by --port, or --port 0 for any free one\n",
    )


def test_options_that_contradict_are_one_line(tmp_path: Path, gradlab: Command) -> None:
    path = log(tmp_path / "run.jsonl")
    for words, said in (
        (("--serve", "--once"), "--serve shows a page until Ctrl-C: leave --once and --json out"),
        (("--serve", "--json"), "--serve shows a page until Ctrl-C: leave --once and --json out"),
        (("--port", "80"), "--port 80 is of the page: give --serve too"),
    ):
        assert gradlab("watch", path, *words)[::2] == (2, f"gradlab: {said}\n")
    (tmp_path / "other").write_text("no log\n")
    code, _, err = gradlab("watch", tmp_path / "other", "--serve")
    assert (code, err.count("\n")) == (2, 1)
    assert "is no log" in err


def test_only_this_machine_is_listened_on(tmp_path: Path) -> None:
    with listen(WatchedLog(log(tmp_path / "run.jsonl")), 0, "run") as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"


def test_looking_takes_a_tenth_of_the_time_at_most() -> None:
    assert (pause(0.0), pause(0.01), pause(2.0)) == (0.5, 0.5, 20.0)


def test_a_wrong_log_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    for text in ("no log\n", "an artifact has no end of a line"):
        (tmp_path / "run.jsonl").write_text(text)
        with pytest.raises(GradlabError, match="is no log"):
            WatchedLog(tmp_path / "run.jsonl")
