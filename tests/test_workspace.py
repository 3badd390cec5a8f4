"""Memory that is lent twice must not be held by anybody."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from gradlab.workspace import RecyclingWorkspace
from support.laws import law

LARGE = torch.zeros(64 * 1024)


def test_memory_comes_back_only_when_nothing_holds_it() -> None:
    workspace = RecyclingWorkspace()
    held, dropped = workspace.empty_like(LARGE), workspace.zeros_like(LARGE)
    workspace.recycle([held.view(2, -1)[1]])
    again, other = workspace.empty_like(LARGE), workspace.empty_like(LARGE)
    assert again.data_ptr() == dropped.data_ptr()
    assert held.data_ptr() not in (again.data_ptr(), other.data_ptr())
    workspace.recycle([again])
    assert workspace.nbytes == 3 * LARGE.nbytes
    assert {workspace.empty_like(LARGE).data_ptr() for _ in range(2)} == {held.data_ptr(), other.data_ptr()}


def test_what_is_given_back_is_lent_again_at_once_and_kept_for_the_next_iteration() -> None:
    """But not what is held, nor the memory of which others use a part."""
    workspace = RecyclingWorkspace()
    one, other, message = (workspace.empty((2 * LARGE.numel(),), LARGE) for _ in range(3))
    first, second = message.chunk(2)
    workspace.give_back([one.view(2, -1), other, first, first], [other[:5]])
    assert workspace.empty_like(message).data_ptr() == one.data_ptr()
    assert workspace.empty_like(message).data_ptr() not in {one.data_ptr(), other.data_ptr(), message.data_ptr()}
    workspace.give_back([first, second], [])
    assert workspace.empty_like(message).data_ptr() == message.data_ptr()
    used = workspace.nbytes
    workspace.give_back([message], [])
    workspace.recycle([])
    assert workspace.nbytes == used


def test_memory_that_an_iteration_did_not_need_is_given_up() -> None:
    workspace = RecyclingWorkspace()
    workspace.empty_like(LARGE)
    workspace.recycle([])
    workspace.recycle([])
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
        workspace.recycle(kept)
