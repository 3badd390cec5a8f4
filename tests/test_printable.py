"""Any text can be shown, and what is sound stays as it is."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import strategies as st

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Group
from gradlab.printable import printable, visible
from support.laws import law

HOSTILE = "a\x1b[31m\x07\0b\u202etxt\u200b\u2028\x9b$\\frac{$<b>[red]"


@law(st.text(st.characters()), examples=300)
def test_nothing_is_hidden_and_all_can_be_written(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert all(letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs") for letter in shown)
    assert all(unicodedata.bidirectional(letter)[-1:] not in ("E", "O", "F", "I") or letter in text for letter in shown)
    assert visible(shown) == shown
    assert "\n" not in printable(text, one_line=True)


def test_what_drives_a_terminal_or_turns_text_around_is_an_escape() -> None:
    assert visible(HOSTILE) == r"a\x1b[31m\x07\x00b\u202etxt\u200b\u2028\x9b$\frac{$<b>[red]"
    assert visible("Größe, 10⁻³ → 語\tof\nlines") == "Größe, 10⁻³ → 語\tof\nlines"
    assert visible("\ud800") == r"\ud800"


def test_what_goes_on_without_a_space_is_cut() -> None:
    shown = printable(f"layer {'n' * 9_999}: not there")
    assert shown == f"layer {'n' * 200}... 10000 characters not there"
    assert printable("a" * 11, longest=10) == "aaaaa... 11 characters"
    assert printable("n" * 400) == "n" * 400


def test_an_error_can_be_printed() -> None:
    assert str(GradlabError(f"layer {HOSTILE}")) == f"layer {visible(HOSTILE)}"


def test_a_layer_whose_name_cannot_be_written_is_refused() -> None:
    with pytest.raises(GradlabError, match=r"layer a\\ud800b: a name with half of a UTF-16 pair cannot be written"):
        Layer("a\ud800b", (3,))
    assert Layer("Größe\0", (3,)).name == "Größe\0"
    with pytest.raises(GradlabError, match=r"group a\\ud800b: a name with half of a UTF-16 pair cannot be written"):
        Group("a\ud800b", ("w",), "topk")
