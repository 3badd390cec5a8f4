"""A Python that has torch already: an executable for jobs, whose processes are forked instead of started anew.

Importing torch takes a core about two seconds, and what DDP then needs of it two more; of a job of two ranks under
torchrun three processes do the first, two the second. `python()` starts one process that has imported what jobs need
(the warm one), and gives the path of an executable that takes Python's own command line: `-u`; `-m MODULE`, `-c CODE`,
a script or a folder; arguments. Each call is a process of its own, forked from the warm one, with the caller's folder,
environment and standard streams. Its signals and its exit status are passed on. torchrun finds the same executable as
its `sys.executable`, so that its ranks are forked, too. pytest's workers are forked as well, and share the processes of
the one that started them (`share`).

What looks at imports themselves, or at what a user's shell starts, uses `sys.executable`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import marshal
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

# torch._dynamo: DistributedDataParallel imports it, with sympy, when the first model is wrapped, in 2 s of every rank.
# What FSDP2 and its checkpoints need is imported once, too, not by every rank of every pool.
FSDP = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.optim")
TORCH = ("torch.distributed.run", "torch._dynamo", *FSDP)
GRADLAB = (
    *("gradlab.runtime.fsdp", "gradlab.runtime.pilot", "gradlab.runtime.outer", "gradlab.capture"),
    *("gradlab.training.trainer", "gradlab.analysis.replay"),
)
# What tests of the analysis import, for pytest's workers.
LIBRARIES = (
    *("scipy.optimize", "scipy.stats", "sklearn.feature_selection", "joblib", "matplotlib.figure"),
    *("matplotlib.backends.backend_pdf", "jinja2", "gradlab.analysis.report.page", "gradlab.cli.main"),
)
SHARED = "GRADLAB_TESTS_PYTHON"  # variable: paths of executables by what they have imported, as JSON
LENGTH = 8  # bytes of a number on the socket
START = Path(__file__).with_name("start_job.py")


def python(*modules: str, on_warning: str = "") -> str:
    """Path of an executable that starts jobs from a process that has imported `modules`, and torch's and gradlab's.

    With `modules`, the warm process is itself forked from the one without. on_warning: what to do with them, as
    PYTHONWARNINGS says it, while importing `modules` and in the jobs. The warm process lives as long as this one.
    """
    if modules or on_warning:
        return _warm(python(), modules or GRADLAB, on_warning)
    return _shared("gradlab") or _warm(torch_python(), GRADLAB)


def torch_python() -> str:
    """Path of such an executable that has imported nothing of gradlab's."""
    return _shared("torch") or _warm(sys.executable, TORCH)


def share() -> None:
    """Start both now, for the processes that this one starts."""
    os.environ[SHARED] = json.dumps({"torch": torch_python(), "gradlab": python(), "started": sys.executable})


def started_python() -> str:
    """Path of the Python that pytest was started with, in workers that are forked from a warm one, too."""
    return _shared("started") or sys.executable


def _shared(name: str) -> str:
    shared: dict[str, str] = json.loads(os.environ.get(SHARED, "{}"))
    return shared.get(name, "")


@functools.cache
def _warm(first: str, modules: tuple[str, ...], on_warning: str = "") -> str:
    folder = tempfile.TemporaryDirectory(prefix="gradlab-")
    executable, address = Path(folder.name) / "python", Path(folder.name) / "socket"
    words = [sys.executable, "-IS", str(START), str(address), str(executable)]
    executable.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    executable.chmod(0o700)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": on_warning}
    command = [first, __file__, "serve", str(address), *modules]
    warm = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)

    def stop() -> None:
        if warm.stdin is not None:
            warm.stdin.close()
        warm.wait(timeout=30)
        folder.cleanup()

    atexit.register(stop)
    return str(executable)


# --- the warm process -------------------------------------------------------------------------------------------------


class Become(BaseException):
    """Thrown in a forked process, caught at the top of the file: it goes on there, with nothing of the server's."""


def serve(address: str, modules: list[str]) -> None:
    """Import, then fork a process for each connection until standard input ends; the caller holds its other end."""
    if options := os.environ.get("PYTHONWARNINGS"):
        warnings._processoptions(options.split(","))  # type: ignore[attr-defined]  # a forked process has not read them
    sys.executable = started_python()  # which some modules keep when they are imported
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what was imported is not looked through by any process's collector: memory stays shared
    children: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener, _told_of_ends() as ends:
        listener.bind(address)
        listener.listen(64)
        while True:
            ready, _, _ = select.select([0, listener, ends, *children.values()], [], [])
            if 0 in ready:
                break
            if ends in ready:
                ends.recv(64)
            for process, connection in list(children.items()):
                if connection in ready:  # whoever asked for it was killed
                    os.kill(process, signal.SIGKILL)
                if _report(process, connection, connection not in ready):
                    children.pop(process).close()
            if listener in ready:
                connection, _ = listener.accept()
                with suppress(ConnectionError):
                    children[_forked(connection, [listener, *children.values()])] = connection


@contextmanager
def _told_of_ends() -> Iterator[socket.socket]:
    """Something to read from when a child has ended; a forked process leaves this context first."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno())
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, before)
        reader.close()
        writer.close()


def _report(process: int, connection: socket.socket, wanted: bool) -> bool:
    """Whether a process has ended; if so, how, to whoever asked for it."""
    ended, status = os.waitpid(process, os.WNOHANG if wanted else 0)
    if ended and wanted:
        with suppress(OSError):
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(LENGTH, "big", signed=True))
    return bool(ended)


def _forked(connection: socket.socket, others: list[socket.socket]) -> int:
    """The process number of a new process, which leaves by Become."""
    head, streams, _, _ = socket.recv_fds(connection, LENGTH, 3)
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size:
        if not (more := connection.recv(size - len(text))):
            raise ConnectionError("whoever asked was killed")
        text += more
    process = os.fork()
    if process:
        connection.sendall(process.to_bytes(LENGTH, "big", signed=True))
        for stream in streams:
            os.close(stream)
        return process
    for other in [connection, *others]:
        other.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    raise Become(marshal.loads(text))


def become(request: dict[str, Any]) -> NoReturn:
    """Run a job as Python does: wait for its threads, call what it left to be called, and end with its exit status.

    The modules are not taken apart, which would copy the memory that is shared with the warm process.
    """
    code = 0
    try:
        _run(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError):  # a worker of pytest has closed it
            stream.flush()
    os._exit(code & 0xFF)


def _run(request: dict[str, Any]) -> None:
    """Do what a command line says."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable, words = request["executable"], list(request["words"])
    asked = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [place for place in asked if place not in sys.path]
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words.pop(0)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        sys.modules.pop(words[1], None)  # runpy warns of a module that was imported already
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif Path(words[0]).is_dir():
        sys.argv, sys.path[0] = words, ""
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        main.__dict__.update(__file__=words[0], __spec__=None, __builtins__=__builtins__)
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


if __name__ == "__main__":
    job: dict[str, Any] | None = None
    try:
        serve(sys.argv[2], sys.argv[3:])
    except Become as forked:
        (job,) = forked.args
    if job is not None:
        become(job)
