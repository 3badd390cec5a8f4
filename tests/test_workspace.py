"""Memory that is lent twice must not be held by anybody."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import strategies as st

from gradlab.workspace import RecyclingWorkspace
from support.laws import law

LARGE = torch.zeros(2**18)  # 1 MiB, the least that is lent


def test_memory_comes_back_only_when_no_tensor_is_in_it() -> None:
    workspace = RecyclingWorkspace()
    held, dropped = workspace.empty_like(LARGE), workspace.zeros_like(LARGE)
    part, array, addresses = held.view(2, -1)[1], held[5:].numpy(), (held.data_ptr(), dropped.data_ptr())
    del held, dropped
    again, other = workspace.empty_like(LARGE), workspace.empty_like(LARGE)
    assert again.data_ptr() == addresses[1]
    assert other.data_ptr() not in addresses
    assert workspace.nbytes == 3 * LARGE.nbytes
    del part
    assert workspace.empty_like(LARGE).data_ptr() not in addresses
    del array
    assert workspace.empty_like(LARGE).data_ptr() == addresses[0]


def test_what_comes_back_is_lent_again_at_once_and_kept_for_the_next_iteration() -> None:
    """But memory of which others use a part does not come back."""
    workspace = RecyclingWorkspace()
    one, message = (workspace.empty((2 * LARGE.numel(),), LARGE) for _ in range(2))
    (first, second), addresses = message.chunk(2), [one.data_ptr(), message.data_ptr()]
    del one, first
    used = workspace.empty_like(message)
    assert used.data_ptr() == addresses[0]
    del message
    assert workspace.empty_like(used).data_ptr() not in addresses
    del second
    assert workspace.empty_like(used).data_ptr() == addresses[1]
    taken = workspace.nbytes
    workspace.recycle()
    assert workspace.nbytes == taken


def test_recycled_memory_begins_where_new_memory_does_and_holds_every_dtype() -> None:
    """Kernels may give other last bits elsewhere."""
    workspace = RecyclingWorkspace()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        for _ in range(2):
            tensor = workspace.empty((3, 2**17), torch.empty(0, dtype=dtype)).fill_(7)
            assert tensor.dtype == dtype
            assert tensor.data_ptr() % 64 == 0
            assert bool((tensor == 7).all())
            del tensor


def test_threads_share_memory_that_each_gives_up() -> None:
    workspace = RecyclingWorkspace()

    def work(number: int) -> bool:
        whole = True
        for _ in range(200):
            mine = workspace.empty_like(LARGE).fill_(number)
            whole = whole and bool((mine == number).all())
        return whole

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert workspace.nbytes <= 8 * LARGE.nbytes


def test_memory_that_an_iteration_did_not_need_is_given_up() -> None:
    workspace = RecyclingWorkspace()
    workspace.empty_like(LARGE)
    workspace.recycle()
    workspace.recycle()
    assert workspace.nbytes == 0


@law(st.lists(st.lists(st.sampled_from([10, 20_000, 50_000]), max_size=6), max_size=6), st.randoms())
def test_states_survive_any_sequence_of_iterations(iterations, random) -> None:
    """What an iteration keeps holds its values through the next one, whatever is written meanwhile."""
    workspace, kept = RecyclingWorkspace(), []
    for number, sizes in enumerate(iterations):
        made = [workspace.empty((size,), LARGE).fill_(number) for size in sizes]
        assert all(bool((tensor == number - 1).all()) for tensor in kept)
        assert len({tensor.data_ptr() for tensor in (*made, *kept)}) == len(made) + len(kept)
        kept = [tensor for tensor in made if random.random() < 0.5]
        del made
        workspace.recycle()
