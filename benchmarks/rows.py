"""Command lines of benchmarks, their rows in files of one line of JSON each, and tables in Markdown."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# What a process that makes rows is given: the time at which it ends. Its exit code, where a row says what failed.
_UNTIL, _FAILED, _NO_GPU = "GRADLAB_BENCHMARK_UNTIL", 4, 3


def options(text: str | None, /, *places: tuple[str, Collection[str]], **named: Any) -> argparse.Namespace:
    """Read a benchmark's command line, with the text of --help.

    Args:
        places: names of arguments without a flag, each with the words that it may be.
        named: default of each option, which also says its type. A type: there is no default. False: a flag. A mapping:
            one of its keys, the first by default. A list: several of its words, or other numbers. A tuple: others too,
            or of a type none.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, words in places:
        parser.add_argument(name, choices=list(words))
    for name, default in named.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **_option(default))
    return parser.parse_args()


def _option(default: Any) -> dict[str, Any]:
    if default is False:
        return {"action": "store_true"}
    if isinstance(default, type):
        return {"type": default}
    if isinstance(default, Mapping):
        return {"choices": list(default), "default": next(iter(default))}
    if isinstance(default, tuple) and isinstance(default[0], type):
        return {"nargs": "+", "type": default[0], "default": []}
    if isinstance(default, list | tuple):
        kind = type(default[0])
        among = {"choices": default} if kind is str and isinstance(default, list) else {}
        return {"nargs": "+", "default": list(default), "type": kind, **among}
    return {"type": type(default), "default": default}


def read(path: Path | None) -> list[Row]:
    """Return the rows of a file; none if there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def has(rows: Sequence[Row], key: Row) -> bool:
    return any(key.items() <= row.items() for row in rows)


def missing(path: Path | None, keys: Iterable[Row]) -> Iterator[Row]:
    """Yield the keys of which a file has no row when their turn comes."""
    return (key for key in keys if not has(read(path), key))


def fill(path: Path | None, keys: Iterable[Row], make: Callable[[Row], Row], unshown: Collection[str] = ()) -> None:
    """Make the rows that a file lacks, add them to it, and print them. make: gives a key's other values."""
    for key in missing(path, keys):
        add(path, key | make(key), unshown)


def on_card(doc: str | None, seconds: float, rows: str, **more: Any) -> argparse.Namespace:
    """Read the command line of a benchmark of one GPU. Without a GPU the process ends with exit code 3."""
    named = {"rows": Path(rows), "out": Path, "device": {"cuda": 0, "cpu": 0}, "tiny": False, "table": False}
    chosen = options(doc, seconds=seconds, **named, **more)
    if not chosen.table:
        import torch

        torch.set_num_threads(1)
        if chosen.device == "cuda" and not torch.cuda.is_available():
            print(f"no GPU: torch {torch.__version__} sees no CUDA device, and nothing was measured")
            sys.exit(_NO_GPU)
    if chosen.tiny:  # no figures
        chosen.rows = chosen.rows.with_stem(f"{chosen.rows.stem}-tiny")
    chosen.rows.parent.mkdir(parents=True, exist_ok=True)
    return chosen


def fill_until(
    chosen: argparse.Namespace, keys: Iterable[Row], make: Callable[[Row, float], Row], longest: float
) -> None:
    """Make the rows that a file lacks, in order, until `chosen.seconds` have passed.

    A process of its own makes them, the same command again. Another one follows it after a key that raised, that ended
    the process, or that took too long: its row says so ("failed"), and it is not tried again.

    Args:
        chosen: options with the file `rows`, the folder `out` or None, which gets a copy after each row, and `seconds`.
        keys: keys of all rows.
        make: function of a key and of the time at which it should return; gives the key's other values.
        longest: seconds that a key may take.
    """
    keys = list(keys)
    if _UNTIL in os.environ:
        _serve(chosen, keys, make, longest)
        return
    until, code = time.time() + chosen.seconds, _FAILED
    while code and time.time() < until and (left := next(missing(chosen.rows, keys), None)):
        code = subprocess.run(
            [sys.executable, *sys.argv], env=os.environ | {_UNTIL: str(until)}, check=False
        ).returncode
        if code < 0:  # a signal's
            left = next(missing(chosen.rows, keys), left)
            _add_copied(chosen, left | {"failed": f"its process ended with exit code {code}"})
        elif code not in (0, _FAILED):
            sys.exit(code)


def _serve(chosen: argparse.Namespace, keys: Sequence[Row], make: Callable[[Row, float], Row], longest: float) -> None:
    until = float(os.environ[_UNTIL])

    def fail(key: Row, why: str) -> None:
        _add_copied(chosen, key | {"failed": why[:300]})
        os._exit(_FAILED)  # whatever else is left in this process would only wait

    for key in missing(chosen.rows, keys):
        if time.time() >= until:
            break
        alarm = threading.Timer(longest, fail, (key, f"stuck: it took more than {longest:.0f} s"))
        alarm.daemon = True
        alarm.start()
        try:
            _add_copied(chosen, key | make(key, until))
        except Exception as error:
            traceback.print_exc()
            fail(key, f"{type(error).__name__}: {error}")
        alarm.cancel()
    sys.exit()


def _add_copied(chosen: argparse.Namespace, row: Row) -> None:
    add(chosen.rows, row, ("quartiles",))
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(chosen.rows, chosen.out)


def show(chosen: argparse.Namespace, text: str) -> None:
    """Print a table, and write it beside the copy of the rows."""
    print(text)
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / f"{chosen.rows.stem}.md").write_text(text + "\n")


def keep(path: Path | None, row: Row) -> Row:
    """Append a row to a file, if there is one, and return it."""
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def add(path: Path | None, row: Row, unshown: Collection[str] = ()) -> None:
    """Append a row to a file, and print it without what is too long for a line."""
    keep(path, row)
    print(json.dumps({key: value for key, value in row.items() if key not in unshown}), flush=True)


def finite(value: float | None) -> float | None:
    """Return the value; None if it is not finite, as JSON knows no NaN."""
    return value if value is not None and math.isfinite(value) else None


def mean(rows: Iterable[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return rows by what a key says of them, in order."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
