"""Tasks for real ranks: all-to-alls in two hops."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradlab.analysis.forecast.link import transfers
from gradlab.collectives import AllToAll, Gather, Request
from gradlab.ddp.groups import group_like
from gradlab.plan import Plan
from gradlab.runtime import Communicator, Exchange
from gradlab.runtime.engine import driver
from gradlab.runtime.network import relay
from gradlab.runtime.network.communicator import CommunicationError
from support.prescribed import Prescribed, gradients


def _requests(rank: int, ranks: int) -> tuple[Request, ...]:
    """Parts of other sizes for each rank, gathers of other sizes of each, some empty."""
    lengths = tuple(7 * (source % 3) for source in range(ranks))
    return (
        Gather(torch.arange(float(lengths[rank])) + rank, lengths=lengths),
        AllToAll(tuple(torch.full((to,), 10.0 * rank + to, dtype=torch.float64) for to in range(ranks))),
        AllToAll(tuple(torch.full((5,), 10 * rank + to, dtype=torch.uint8) for to in range(ranks))),
    )


def sent_and_forecast(group: dist.ProcessGroup) -> dict[str, Any]:
    """Answers and bytes, directly and in two hops; and what the ranks choose by measuring."""
    communicator = Communicator(group)
    rank, ranks = communicator.rank, communicator.world_size
    requests, answers, sent, forecast = _requests(rank, ranks), [], [], []
    for below in (0, 2**40):
        communicator.relay_below = below
        for some in (requests, requests[:1], requests[1:]):
            answers.append(communicator.issue(some).answers())
            sent.append(communicator.take_counts()[1])
            forecast.append(sum(one.wire_bytes for one in transfers(some, rank, ranks, below)))
    flat = [torch.cat([one.double() for of_one in part for one in of_one]) for part in answers]
    with mock.patch.multiple(relay, LEAST_RANKS=2), mock.patch.object(relay, "_LARGE", 1000):
        below = relay.measured(communicator)
    return {
        "equal": all(torch.equal(one, other) for one, other in zip(flat[:3], flat[3:], strict=True)),
        "sent": sent,
        "forecast": forecast,
        "below": below,
        "counts": list(communicator.take_counts()),
    }


def trained(group: dist.ProcessGroup) -> dict[str, Any]:
    """Means of two steps of a run, directly and in two hops, and what its table says of them."""
    shapes = {"a": (40, 30), "b": (7, 11)}
    plan = Plan.uniform(Prescribed(shapes), "qsgd")
    means, tables = [], []
    for below in (0, 2**40):
        with mock.patch.object(driver, "measured", return_value=below):
            run = Exchange(plan, Prescribed(shapes).named_parameters(), group, deterministic=True)
        for step in range(2):
            found = gradients(shapes, dist.get_rank(group), step)
            run.step(found)
            means.append(torch.cat([mean.reshape(-1) for mean in found.values()]))
        tables.append("all-to-alls whose parts are below 1,099,511,627,776 B go in two hops" in run.table())
    return {"equal": torch.equal(torch.cat(means[:2]), torch.cat(means[2:])), "told": tables}


def gone_between_hops(group: dist.ProcessGroup) -> str:
    """The error of a rank whose peer is gone after the first hop; none of the peer itself."""
    own = group_like(group, timedelta(seconds=8), torch.device("cpu"))
    communicator = Communicator(own, owned=True)
    communicator.relay_below = 2**40
    work: Any = communicator.all_to_all(torch.ones(4 * 5), [5] * 4)[1]
    message = ""
    if communicator.rank == 0:
        work._messages.wait()
    else:
        try:
            communicator.wait(work)
        except CommunicationError as error:
            message = str(error)
    del own, work
    communicator.close()
    return message
