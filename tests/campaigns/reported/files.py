"""Reports of HDF5 files: without locks, while they are written, after a kill, and read by several."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import torch

from campaigns.reported import Workplace, report
from gradlab.capture import TraceWriter, repair
from gradlab.errors import GradlabError
from gradlab.trace import Trace, check
from support.recorded import LAYERS, LINEAR, random_gradients, record

STEPS = 8
RECORDS = "import sys; from support.recorded import *; record(Path(sys.argv[1]), random_gradients(0, 8, 2))"


def without_locks(work: Workplace, number: int) -> dict[str, str]:
    """Return an environment in which `flock` fails with an error, as on such a file system."""
    source, library = work.folder / "flock.c", work.folder / "flock.so"
    source.write_text(f"#include <errno.h>\nint flock(int a, int b) {{ errno = {number}; return -1; }}\n", "utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def refusal(path: Path) -> str:
    """Return why a trace is not read."""
    try:
        Trace(path).read(LINEAR.name, 0)
    except GradlabError as refused:
        return str(refused)
    raise AssertionError(f"{path} was read")


def ran(environment: dict[str, str], *words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@report("h5py/h5py#1082", "files cannot be created over NFS: no locks available")
def no_locks(work: Workplace) -> str:
    """A trace recorded and checked where `flock` fails with ENOLCK."""
    environment, path = without_locks(work, errno.ENOLCK), work.folder / "t"
    ran(environment, "-c", RECORDS, path)
    ran(environment, "-m", "gradlab.cli.main", "trace", "check", path)
    return f"mended: {len(Trace(path).steps)} of {STEPS} steps are there; before, an OSError on recording"


@report("metno/hdf5-rust#175", "files on a read-only file system cannot be opened, as they cannot be locked")
def read_only(work: Workplace) -> str:
    """`trace check` where `flock` fails with EROFS."""
    record(work.folder / "t", random_gradients(0, STEPS, 2))
    ran(without_locks(work, errno.EROFS), "-m", "gradlab.cli.main", "trace", "check", work.folder / "t")
    return "mended: sound; before, every segment was called damaged or truncated, and exit code 2"


@report("h5py/h5py#1807", "a file of a process that crashed cannot be opened again")
def crashed(work: Workplace) -> str:
    """A recording whose process ends without closing it."""
    path = work.folder / "t"
    append = "for i in range(40): w.append(0, i, random_gradients(i, 1, 1)[0][0])"
    writer = f"w = TraceWriter(Path({str(path)!r}), LAYERS, 1, segment_bytes=1)"
    ran(dict(os.environ), "-c", f"import os\nfrom support.recorded import *\n{writer}\n{append}\nos._exit(0)")
    assert "gradlab trace repair" in refusal(path)
    kept = check(path).ranks[0].steps
    repair(path)
    with Trace(path, allow_empty=True) as trace:
        assert len(trace.steps) == kept > 0
    return f"held: one line names `gradlab trace repair`, which keeps all {kept} committed steps"


@report("silx-kit/silx#3519", "finished scans cannot be read while another process has the file open for writing")
def growing(work: Workplace) -> str:
    """`trace check` of a recording that is still open, from another process."""
    path = work.folder / "t"
    with TraceWriter(path, LAYERS, 1, segment_bytes=1) as writer:
        for index in range(40):
            writer.append(0, index, random_gradients(index, 1, 1)[0][0])
        code = f"from gradlab.trace import check; r = check({str(path)!r}).ranks[0]; print(r.steps, len(r.problems))"
        steps, problems = map(int, ran(dict(os.environ), "-c", code).split())
    assert steps >= 16
    assert problems == 0
    return f"held: {steps} of 40 steps are read while it is recorded, the rest is not committed yet"


@report("PyTables/PyTables#790", "two threads that only read crash each other")
def threads(work: Workplace) -> str:
    """Six threads read all layers and ranks of one open trace."""
    trace, wrong = record(work.folder / "t", random_gradients(0, STEPS, 4)), []
    expected = {(layer.name, rank): trace.read(layer.name, rank) for layer in LAYERS for rank in range(4)}

    def reader() -> None:
        for _ in range(50):
            wrong.extend(key for key, values in expected.items() if not np.array_equal(trace.read(*key), values))

    running = [threading.Thread(target=reader) for _ in range(6)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert not wrong
    return f"held: {6 * 50 * len(expected)} reads, all right"


class Steps(torch.utils.data.Dataset):
    """One layer's gradients by step."""

    def __init__(self, path: Path) -> None:
        self.trace = Trace(path)

    def __len__(self) -> int:
        return len(self.trace.steps)

    def __getitem__(self, step: int) -> np.ndarray:
        return self.trace.read(LINEAR.name, 0, step, step + 1)[0]


def loaded(work: Workplace, method: str) -> bool:
    """Return whether a DataLoader's worker reads what this process does."""
    path = work.folder / "t"
    record(path, random_gradients(0, STEPS, 2)).close()
    steps = Steps(path)
    loader = torch.utils.data.DataLoader(steps, batch_size=STEPS, num_workers=1, multiprocessing_context=method)
    return np.array_equal(next(iter(loader)).numpy(), steps.trace.read(LINEAR.name, 0))


@report("cta-observatory/dl1-data-handler#66", "a reader of HDF5 cannot be used in the workers of a DataLoader")
def spawned(work: Workplace) -> str:
    """A data set that holds an open Trace, in a DataLoader whose worker is spawned."""
    assert loaded(work, "spawn")
    return "mended: all steps are right; before, TypeError: h5py objects cannot be pickled"


@report("h5py/h5py#934", "processes forked with a file open read garbage, or fail")
def forked(work: Workplace) -> str:
    """The same data set, in a worker that is forked after the files were opened."""
    assert loaded(work, "fork")
    return "held: all steps are right"


@report("DaanVanVugt/h5pickle#14", "a file that was closed and opened again cannot be read")
def reopened(work: Workplace) -> str:
    """A trace is read, closed, read again, closed twice, and opened once more."""
    trace = record(work.folder / "t", random_gradients(0, STEPS, 2))
    before = trace.read(LINEAR.name, 1)
    trace.close()
    again = trace.read(LINEAR.name, 1)
    trace.close()
    trace.close()
    with Trace(work.folder / "t") as other:
        assert np.array_equal(before, again)
        assert np.array_equal(before, other.read(LINEAR.name, 1))
    return "held: a closed trace opens its files again, the values are the same"


@report("h5py/h5py#2340", "after a while a file is truncated, and the traceback says nothing of which")
def truncated(work: Workplace) -> str:
    """A segment is cut at 40 lengths, from nothing to all but one byte."""
    record(work.folder / "t", random_gradients(0, STEPS, 1)).close()
    whole = (work.folder / "t" / "rank-00000" / "000000.h5").read_bytes()
    for number in range(40):
        shutil.copytree(work.folder / "t", cut := work.folder / str(number))
        (file := cut / "rank-00000" / "000000.h5").write_bytes(whole[: len(whole) * number // 40 - (number == 39)])
        assert str(file) in (line := refusal(cut)), line
        assert "\n" not in line
    return "held: 40 times one line that names the file"
