"""Have a warm process (warm_python.py) fork a job, pass signals on to it, and end as it ended.

Usage: start_job.py SOCKET EXECUTABLE WORDS. Every rank and command of a test is started by this, so that it imports
nothing that takes longer than 5 ms: `json`, `signal` and `socket` would take 50.
"""

from __future__ import annotations

import _signal as signal
import _socket as socket
import marshal
import os
import sys
import time

LENGTH = 8  # bytes of a number on the socket
LOOK_EVERY = 0.01  # seconds, for a warm process that is not there yet
LONGEST_IMPORT = 120.0  # seconds


def start(address: str, executable: str, words: list[str]) -> None:
    request = {"words": words, "executable": executable, "folder": os.getcwd(), "environment": dict(os.environ)}
    data = marshal.dumps(request)
    connection = socket.socket(socket.AF_UNIX)
    _connect(connection, address)
    streams = b"".join(stream.to_bytes(4, sys.byteorder) for stream in (0, 1, 2))
    length = len(data).to_bytes(LENGTH, "big")
    connection.sendmsg([length], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(data)
    process = _number(connection)

    def pass_on(signum: int, _frame: object) -> None:
        try:  # noqa: SIM105  # contextlib takes 10 ms
            os.kill(process, signum)
        except ProcessLookupError:
            pass

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, pass_on)
    code = _number(connection)
    if code < 0:  # killed by a signal, as whoever waits for this process has to see
        try:  # noqa: SIM105
            signal.signal(-code, signal.SIG_DFL)
        except OSError:
            pass
        os.kill(os.getpid(), -code)
    os._exit(code)


def _connect(connection: socket.socket, address: str) -> None:
    """Wait for the warm process, which may still be importing."""
    until = time.monotonic() + LONGEST_IMPORT
    while True:
        try:
            return connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):  # not bound, not listening
            if time.monotonic() > until:
                raise
            time.sleep(LOOK_EVERY)


def _number(connection: socket.socket) -> int:
    data = b""
    while len(data) < LENGTH:
        if not (more := connection.recv(LENGTH - len(data))):
            raise ConnectionError("the warm process has ended")
        data += more
    return int.from_bytes(data, "big", signed=True)


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2], sys.argv[3:])
