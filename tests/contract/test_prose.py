"""The prose of README and docs keeps the style: short sentences, subject first, the field's words, no fillers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.prose import FILLERS, FORMER_WORDS, arguments, docstrings, faults, inversions, paragraphs, sentences

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_keeps_the_style(page: Path) -> None:
    assert list(faults(page.read_text(encoding="utf-8"))) == []


def test_paragraphs_are_prose_alone() -> None:
    page = (
        "# Title\n\nOne `code just` and\n[a link](b.md).\n\n```\njust code\n```\n\n    just code\n\n"
        "| just | a table |\n\n<!-- just\na comment -->\n- an item\n  of two lines\n1. another\n"
    )
    assert paragraphs(page) == ["One CODE and a link.", "an item of two lines", "another"]


def test_sentences_end_where_readers_see_it() -> None:
    text = 'It is 0.5 of eq. (3), see Vogels et al. 2019. "Yes." *No*: it was not. And CODE? (It is.) i.e. all'
    assert sentences(text) == [
        "It is 0.5 of eq. (3), see Vogels et al. 2019.",
        '"Yes."',
        "No: it was not.",
        "And CODE?",
        "(It is.) i.e. all",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "A sentence of too many words " + "is a sentence that loses its reader " * 8 + "here.",
        "Of more, those that are not its default.",
        "Which one it is follows from it.",
        *(f"This is {word} a sentence." for word in (*FILLERS, *FORMER_WORDS)),
    ],
)
def test_what_the_style_forbids_is_found(text: str) -> None:
    assert len(list(faults(f"A short one. {text}"))) == 1


def test_words_that_are_parts_of_others_and_names_in_code_are_no_fault() -> None:
    assert list(faults('Adjust it, unjustly, `just` as `--simply` says: "unsent norm". What is it? Often one.')) == []


def test_arguments_without_a_noun_and_inverted_sentences_are_counted() -> None:
    """tests/budget.toml holds their numbers by room."""
    module = ast.parse(
        '"""Which it is.\n\nWhat is it? Where it stands, it stays. It is of use.\n\n'
        'size: of a block.\nrank, step: number from 0.\n\nRaises:\n    ValueError: for others.\n"""\n'
        'setting(1, help="that are kept")\nsetting(1, help=f"by {name}")\nsetting(1, unit="bytes", help="of a block")\n'
    )
    nodes = list(ast.walk(module))
    texts = docstrings(nodes)
    assert list(inversions(texts)) == ["Which it is.", "Where it stands, it stays."]
    assert list(arguments(nodes, texts)) == ["that", "by", "of"]
