"""A link that is limited carries no more than its speed, and where none can be made that is said."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradlab.errors import GradlabError
from gradlab.training.launch import launch
from gradlab.training.limited_link import on_limited_link, why_no_limited_link
from gradlab.training.settings import TrainSettings
from support.command_line import Command

_SEND = """
import socket, threading, time
listening = socket.create_server(("127.0.0.1", 0))
def send():
    with socket.create_connection(listening.getsockname()) as one:
        one.sendall(bytes(500_000))
threading.Thread(target=send).start()
came, began, count = listening.accept()[0], time.perf_counter(), 0
while part := came.recv(65536):
    count += len(part)
print(count, time.perf_counter() - began)
"""
limits = pytest.mark.skipif(bool(why_no_limited_link("1mbit", 2)), reason=why_no_limited_link("1mbit", 2))


@limits
def test_bytes_take_as_long_as_the_ranks_links_allow() -> None:
    """Two links of 2 Mbit/s: half a megabyte, less what may go at once, takes at least a second between them."""
    command = on_limited_link([sys.executable, "-c", _SEND], "2mbit", 2)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, seconds = done.stdout.split()
    assert int(count) == 500_000
    assert float(seconds) > 0.8 * 8 * (500_000 - 48_000) / 4e6


@pytest.mark.thorough  # ranks import torch anew, in a network of their own
@limits
def test_a_run_trains_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 374 kB, which each of two ranks sends once. Forked ranks would stay in this network."""
    monkeypatch.setattr("gradlab.training.launch.interpreter", lambda: sys.executable)
    settings = TrainSettings("digits", steps=4, link="20mbit", train_limit=200)
    report = launch(settings)
    assert len(report["losses"]) == 4
    assert report["step_seconds"] > 0.8 * 8 * (374_000 - 48_000) / 20e6


def test_a_machine_without_the_tools_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "unshare, ip, tc is missing" in why_no_limited_link("1mbit", 2)
    with pytest.raises(GradlabError, match="no link can be limited here"):
        on_limited_link(["true"], "1mbit", 2)


def test_a_link_that_is_none_is_refused(gradlab: Command) -> None:
    for words, error in (
        (["-s", "link=fast"], "bandwidth 'fast': expected bits per second"),
        (["-s", "link=1mbit", "--ranks", "1"], "a link is between real ranks"),
    ):
        code, out, err = gradlab("train", "digits", *words)
        assert (code, out) == (2, "")
        assert error in err
