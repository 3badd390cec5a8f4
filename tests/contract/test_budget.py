"""The house stays within `tests/budget.toml`: what comes takes the place of something."""

from __future__ import annotations

from support.budget import BUDGET, counted, excesses, lowered, read

REMEDY = (
    "Take away as much elsewhere in the room. If that cannot be, raise the figure by hand and say in the commit "
    "message what else went. After a removal: python tests/support/budget.py --write"
)


def test_nothing_is_above_its_figure() -> None:
    counts, figures = counted(), read(BUDGET.read_text(encoding="utf-8"))
    assert not (above := excesses(counts, figures)), "\n".join([*above, REMEDY])
    assert not (gone := sorted(figures.keys() - counts.keys())), f"tests/budget.toml has figures of nothing: {gone}"


def test_figures_fall_and_never_rise() -> None:
    text = "# why\n[code]\ncli = 6\ncli = 7\ncodec = 7\ngone = 7\n"
    counts = {("code", "cli"): 5, ("code", "codec"): 9, ("code", "new"): 1}
    assert lowered(text, counts) == "# why\n[code]\ncli = 5\ncodec = 7\ngone = 0\n"
    assert excesses(counts, read(text)) == [
        "[code] codec: 9, 2 above its figure",
        "[code] new: 1, 1 above its figure",
    ]
