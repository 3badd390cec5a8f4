"""Shards of pieces of every layer, against the vector cut by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from gradlab.codec.pieces import Pieces, piece_of, pieces_of
from support.laws import law


@law(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 5), st.integers(0, 99))
def test_what_is_dealt_out_is_found_where_it_was(numels: list[int], world_size: int, seed: int) -> None:
    vector = np.arange(sum(numels)) * 10
    cut = np.split(vector, np.cumsum(numels)[:-1]) if numels else []
    shards = [
        np.concatenate([np.zeros(0, int), *(layer[slice(*piece_of(len(layer), rank, world_size))] for layer in cut)])
        for rank in range(world_size)
    ]
    assert sum(map(len, shards)) == len(vector)
    pieces = Pieces(numels, world_size)
    positions = np.flatnonzero(np.random.default_rng(seed).random(len(vector)) < 0.4)
    dealt = pieces.deal(positions, vector[positions])
    assert len(dealt) == world_size
    back = []
    for rank, (there, values) in enumerate(dealt):
        assert pieces.numel(rank) == len(shards[rank]) == sum(size for (size,) in pieces.shapes(rank))
        assert (shards[rank][there] == values).all()
        assert (np.diff(there) > 0).all()
        assert (vector[pieces.in_vector(rank, there)] == values).all()
        back.append(pieces.in_vector(rank, there))
    assert sorted(np.concatenate(back)) == positions.tolist()


def test_no_piece_is_larger_than_another_by_more_than_an_element() -> None:
    sizes = pieces_of((1000, 7, 64), 6).sizes
    assert sizes.sum(0).tolist() == [1000, 7, 64]
    assert (sizes.max(0) - sizes.min(0)).max() == 1
