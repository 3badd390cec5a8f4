"""A network of limited speed between the ranks of this machine, without rights of an administrator (Linux).

Ranks are started in a network namespace of their own, in which the loopback device, which is all that connects them,
is limited by the kernel's token bucket. Bytes are really sent, and take as long as they take.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from gradlab.analysis.forecast.link import parse_bandwidth
from gradlab.errors import GradlabError

_TOOLS = ("unshare", "ip", "tc")
_MTU, _BURST = 1500, 32  # bytes of a packet, as on Ethernet, and packets that may follow one another at once
_SET_UP = (
    "ip link set lo mtu {mtu} up"
    " && tc qdisc add dev lo root tbf rate {rate}bit burst {burst} latency 200ms"
    ' && exec "$@"'
)


def on_limited_link(command: Sequence[str], rate: str, ranks: int) -> list[str]:
    """Return the command that starts another one where each rank's link has a limited speed.

    Args:
        command: starts `ranks` processes, which talk over the loopback device.
        rate: speed of each rank's link, each way, such as "50mbit".
        ranks: their number; together they send as much, and share one device.

    Raises:
        GradlabError: where namespaces or the tools are missing.
    """
    if problem := why_no_limited_link(rate, ranks):
        raise GradlabError(problem)
    return [*_started(rate, ranks), *command]


def why_no_limited_link(rate: str, ranks: int) -> str:
    """Say why `on_limited_link` can do nothing on this machine; empty: it can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"no link can be limited here: {', '.join(missing)} is missing (iproute2, util-linux)"
    tried = subprocess.run([*_started(rate, ranks), "true"], capture_output=True, text=True, check=False)
    if not tried.returncode:
        return ""
    why = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    return f"no link can be limited here: {why[:200]} (namespaces of users may be switched off)"


def _started(rate: str, ranks: int) -> list[str]:
    made = _SET_UP.format(mtu=_MTU, rate=round(parse_bandwidth(rate) * ranks), burst=_BURST * _MTU)
    return ["unshare", "--map-root-user", "--net", "sh", "-c", made, "sh"]
