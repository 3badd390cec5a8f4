"""The prose of Markdown pages: paragraphs without code and tables, sentences, and what the house's style forbids."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

MOST_WORDS = 45  # of a sentence
# Words that say nothing, or that tell readers what they must find easy.
FILLERS = ("simply", "just", "obviously", "clearly", "of course", "basically", "easily", "please note", "note that")
# What this project called things once, where the field has a word: a default, a residual norm, a compression error.
FORMER_WORDS = ("habit", "habits", "what waits under feedback", "unsent")
# Openings of sentences that put what they are about behind it: "Of more, those that are not its habit."
INVERSION = re.compile(r"(?:Of|What|Where|Which|From which|There it is)\b")
# First words of an argument's text that is no noun phrase: "of all layers" in place of "number of layers".
PREPOSITIONS = re.compile(r"(?:of|that|by|as|where|in|with|to|from|for|on|what|which|whose),?", re.IGNORECASE)
ENTRY = re.compile(r"^ *(?!\w+Error: )\*{0,2}\w+(?:, \*{0,2}\w+)*: (\S+)", re.MULTILINE)
ABBREVIATIONS = ("e.g", "i.e", "etc", "vs", "eq", "Fig", "Figs", "et al", "al", "cf")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
BULLET = re.compile(r"(?:[-*+]|\d+\.)\s+")


def paragraphs(page: str) -> list[str]:
    """List a page's paragraphs and list items, each in one line, without code blocks, tables, headings and comments.

    Inline code becomes "CODE", as its words are no prose, and a link its text.
    """
    page = COMMENT.sub("", FENCE.sub("\n", page))
    found: list[list[str]] = [[]]
    for line in page.splitlines():
        text = line.strip()
        if line.startswith("    ") and not found[-1]:  # indented code
            continue
        if not text or text.startswith(("#", "|", "![", ">")) or set(text) <= set("-=* "):
            found.append([])
        elif BULLET.match(text):
            found.append([BULLET.sub("", text, count=1)])
        else:
            found[-1].append(text)
    return [without_code(" ".join(lines)) for lines in found if lines]


def without_code(text: str) -> str:
    """Replace inline code by "CODE" and links by their texts."""
    return re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", text))


def without_emphasis(text: str) -> str:
    return re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text)


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph after full stops, question marks and exclamation marks that end a sentence."""
    found, begin = [], 0
    for end in re.finditer(r"[.?!][)\"'*_]*\s+(?=[\"'(*_]|[A-Z0-9])", paragraph):
        before = paragraph[begin : end.start()].rpartition(" ")[2].lstrip("(")
        if before not in ABBREVIATIONS and not re.fullmatch(r"[A-Z]", before):
            found.append(without_emphasis(paragraph[begin : end.end()].strip()))
            begin = end.end()
    return [*found, without_emphasis(paragraph[begin:].strip())] if paragraph[begin:].strip() else found


def faults(page: str) -> Iterator[str]:
    """Find what a page's prose should not have: one line per fault."""
    for sentence in [one for paragraph in paragraphs(page) for one in sentences(paragraph)]:
        count = len(re.findall(r"\b[A-Za-z]{2}", sentence.replace("CODE", "")))
        if count > MOST_WORDS:
            yield f"{count} words, at most {MOST_WORDS}: {sentence}"
        if opens_badly(sentence):
            yield f"the subject comes first: {sentence}"
        spoken = re.sub(r'"[^"]*"', "", sentence)  # a name in quotation marks is shown somewhere by that name
        for word in (*FILLERS, *FORMER_WORDS):
            if re.search(rf"\b{word}\b", spoken, re.IGNORECASE):
                yield f"{word!r}: {sentence}"


def opens_badly(sentence: str) -> bool:
    return bool(INVERSION.match(sentence)) and not sentence.endswith("?")


def inversions(texts: Sequence[str]) -> Iterator[str]:
    """Sentences of a module's docstrings that open badly."""
    for text in texts:
        yield from filter(opens_badly, (one for paragraph in paragraphs(text) for one in sentences(paragraph)))


def arguments(nodes: Sequence[ast.AST], texts: Sequence[str]) -> Iterator[str]:
    """First words of arguments' texts that are no noun phrases, in docstrings and in a `help=` that follows no unit."""
    calls = ({key.arg: key.value for key in node.keywords} for node in nodes if isinstance(node, ast.Call))
    helps = (keys["help"] for keys in calls if "help" in keys and "unit" not in keys)
    begin = (text.values[0] if isinstance(text, ast.JoinedStr) else text for text in helps)
    words = (str(text.value).split(" ")[0] for text in begin if isinstance(text, ast.Constant))
    yield from filter(PREPOSITIONS.fullmatch, (*words, *(word for text in texts for word in ENTRY.findall(text))))


def docstrings(nodes: Sequence[ast.AST]) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]


LEAVES = {ast.Name, ast.Constant, ast.Load, ast.Store}


def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """Walk a tree as `ast.walk` does, in a fifth of its time, and leave out names and constants."""
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes += [one for one in value if type(one) not in LEAVES and isinstance(one, ast.AST)]
            elif type(value) not in LEAVES and isinstance(value, ast.AST):
                nodes.append(value)
    return nodes
