"""The network of a forecast: links, numbers of nodes, and the processors of each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.profile import NOT_MEASURED, Profile
from gradlab.analysis.forecast.simulator import Node
from gradlab.errors import GradlabError

#: Most nodes of a forecast: the fabricated answers of one exchange hold something of each.
MOST_NODES = 16384


@dataclass(frozen=True)
class Network:
    """Links and numbers of nodes: a forecast is made for every pair of them.

    links: at least one. They may differ in speed alone.
    nodes: numbers of nodes, from 1 to `MOST_NODES`; at least one.
    node: several ranks to a node, which `links` connect; None: one rank each.
    profile: the measured times of a step; `NOT_MEASURED` makes a forecast of the exchange alone.
    cores: processor cores per rank, for its two threads, computing and codecs. With one core or less the threads take
        turns. Below one core codecs take as many times longer as ranks share a core.
    bucket_cap_mb: DDP's bucket size in MiB. None: DDP's default.

    >>> from gradlab.analysis import Network
    >>> from gradlab.analysis.forecast.link import Link
    >>> network = Network(links=[Link(1e9, 1e-4)], nodes=(4, 64))
    >>> network.dense, network.speed
    ('plain DDP', 1.0)

    Raises:
        GradlabError: for an impossible number of nodes or cores, or no links or nodes at all.
    """

    links: Sequence[Link] = (Link(1e9, 1e-4), Link(2.5e10, 1e-4))
    nodes: Sequence[int] = (8,)
    profile: Profile = NOT_MEASURED
    cores: float = 2.0
    bucket_cap_mb: float | None = None
    node: Node | None = None

    def __post_init__(self) -> None:
        if not self.nodes or not self.links:
            raise GradlabError("nothing to predict: name at least one number of nodes and one bandwidth")
        for count in self.nodes:
            if not 1 <= count <= MOST_NODES:
                raise GradlabError(f"nodes = {count}, expected 1 to {MOST_NODES}")
        if not 0 < self.cores < math.inf:
            raise GradlabError(f"cores = {self.cores:g} per rank, expected above 0")

    @property
    def dense(self) -> str:
        """Name of the uncompressed step, for labels."""
        return "plain DDP" if self.node is None else "the fastest dense way"

    @property
    def speed(self) -> float:
        """Speed of computing and of codecs while both run, see `gradlab.analysis.forecast.simulator.Clock`."""
        return min(1.0, max(1.0, self.cores) / 2)

    @property
    def crowding(self) -> float:
        """How many times longer codecs take where several ranks share a core; those timed in a run shared it then."""
        codec = self.profile.codec
        return 1.0 if codec is not None and codec.engine else max(1.0, 1 / self.cores)
