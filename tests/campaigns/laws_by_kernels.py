"""The laws of the contract suite, where Triton's interpreter runs the kernels in place of PyTorch's lines.

python tests/campaigns/laws_by_kernels.py [PYTEST'S OPTIONS]    3 minutes; -k NAME for one codec
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
TESTS = Path(__file__).parents[1]


def main() -> int:
    from gradlab import kernels

    kernels.DEVICES.add("cpu")
    warnings = ("-W", "ignore::RuntimeWarning")  # numpy's, in the interpreter: a division by zero, an overflow
    options = ("-q", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml"), *warnings)
    chosen = f"{TESTS / 'contract' / 'test_contract.py'}"
    names = () if "-k" in sys.argv else ("-k", "lockstep_laws")
    return int(pytest.main([*options, chosen, *names, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
