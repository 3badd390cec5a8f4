"""The text workloads: files and splits, words and characters, samples, the transformer, learning, the whole loop."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlab import datasets
from gradlab.datasets.text_files import every_window, read_texts, windows
from gradlab.datasets.tokens import build_alphabet, build_vocabulary, encode_characters, encode_words
from gradlab.datasets.transformer import Transformer, TransformerSize, initialized
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from support.command_line import Command

LEVELS = ("text_bytes", "text_chars", "text_words")
SMALL = TransformerSize(vocabulary=50, context=12, width=16, layers=2, heads=2)
# Words with spaces and ends of line between them, as a file may have them.
words = st.text(st.characters(exclude_categories=["Cs", "Z", "C"]), min_size=1, max_size=4)
lines = st.lists(st.lists(words, max_size=5).map(" ".join), max_size=12).map("\n".join)


def _workload(level: str, context: int) -> datasets.Workload:
    if level == "text_bytes":
        return datasets.TextBytes(context=context)
    if level == "text_chars":
        return datasets.TextChars(context=context)
    return datasets.TextWords(context=context, vocabulary=20)


def _folder(path: Path, train: bytes, test: bytes) -> Path:
    path.mkdir()
    for name, content in {"train.txt": train, "valid.txt": b"never read", "test.txt": test}.items():
        (path / name).write_bytes(content)
    return path


# --- words and vocabularies ---------------------------------------------------------------------------------------


def test_a_vocabulary_has_the_most_frequent_words_first_and_equal_ones_by_code_point() -> None:
    text = "b a b\n<unk> c\tä a <unk> <unk> <eos>\n"
    assert build_vocabulary(text, 9) == {"<unk>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4, "ä": 5}
    assert list(build_vocabulary(text, 4)) == ["<unk>", "<eos>", "a", "b"]
    with pytest.raises(GradlabError, match="vocabulary of 2 tokens: expected at least 3"):
        build_vocabulary(text, 2)


def test_every_word_and_every_end_of_line_is_a_token() -> None:
    vocabulary = {"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}
    assert encode_words(" a  b \n\n c a", vocabulary).tolist() == [2, 3, 1, 1, 0, 2]
    assert encode_words("a <unk>\r\nb\n", vocabulary).tolist() == [2, 0, 1, 3, 1]
    assert encode_words("", vocabulary).tolist() == []


@given(text=lines, limit=st.integers(3, 12))
def test_encoding_follows_its_definition(text: str, limit: int) -> None:
    """Against an oracle that reads the text word by word."""
    vocabulary = build_vocabulary(text, limit)
    tokens = encode_words(text, vocabulary)
    spelled = [word for line in text.split("\n") for word in [*line.split(), "<eos>"]][:-1]
    counts = Counter(word for word in spelled if word not in ("<unk>", "<eos>"))
    assert [vocabulary.get(word, 0) for word in spelled] == tokens.tolist()
    assert len(vocabulary) == min(limit, 2 + len(counts))
    rarest = min((counts[word] for word in vocabulary if word in counts), default=0)
    assert all(counts[word] <= rarest for word in counts if word not in vocabulary)
    assert build_vocabulary(text, limit) == vocabulary


@given(text=st.text(min_size=1, max_size=60), other=st.text(max_size=20), limit=st.integers(2, 12))
def test_characters_are_numbered_by_code_point_and_the_rarest_are_one_token(text: str, other: str, limit: int) -> None:
    """Against an oracle that looks up one character at a time."""
    alphabet, counts = build_alphabet(text, limit), Counter(text)
    assert list(alphabet) == sorted(set(alphabet))
    assert len(alphabet) == (len(counts) if len(counts) <= limit else limit - 1)
    rarest = min(counts[character] for character in alphabet)
    assert all(counts[character] <= rarest for character in counts if character not in alphabet)
    oracle = [alphabet.index(c) if c in alphabet else len(alphabet) for c in text + other]
    assert encode_characters(text + other, alphabet).tolist() == oracle
    assert max(encode_characters(text, alphabet)) < limit


# --- files, splits and samples ------------------------------------------------------------------------------------


@given(content=st.binary(min_size=1, max_size=300))
def test_a_file_is_split_at_nine_tenths_and_nothing_is_lost(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("text") / "a"
    file.write_bytes(content)
    train, test = read_texts(str(file))
    assert train.content + test.content == content
    assert len(train.content) == 9 * len(content) // 10
    train, test = read_texts(str(file), "characters")
    assert train.content + test.content == content
    assert len(train.content) >= 9 * len(content) // 10
    assert all(0x80 <= byte < 0xC0 for byte in content[9 * len(content) // 10 : len(train.content)])
    assert not 0x80 <= (test.content or b"a")[0] < 0xC0
    train, test = read_texts(str(file), "words")
    assert train.content + test.content == content
    assert len(train.content) >= 9 * len(content) // 10
    assert test.content[:1] in (b"", b" ", b"\t", b"\r", b"\n")
    assert not set(content[9 * len(content) // 10 : len(train.content)]) & set(b" \t\r\n")


@given(length=st.integers(0, 60), context=st.integers(1, 12))
def test_rows_follow_each_other_or_begin_anywhere(length: int, context: int) -> None:
    tokens = np.arange(100, 100 + length)
    for cut in (windows, every_window):
        if length <= context:
            with pytest.raises(GradlabError, match=f"here: {length} tokens, expected at least {context + 1}"):
                cut(tokens, context, "here")
            continue
        x, y = cut(tokens, context, "here")
        stride = context if cut is windows else 1
        starts = range(100, 100 + length - context, stride)
        assert x.tolist() == [list(range(start, start + context)) for start in starts]
        assert torch.equal(y, x + 1)
        assert x.dtype == torch.int64
        assert x.untyped_storage().nbytes() <= 8 * length  # one copy, however many rows


def test_characters_of_a_file_are_the_first_nine_tenths_at_every_place_and_the_rest_in_rows(tmp_path: Path) -> None:
    """The split and the numbers are those of nanoGPT's data/shakespeare_char/prepare.py."""
    text = "to be, or not to be\nthät is\n" * 7
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = datasets.TextChars(context=4).load(str(tmp_path / "a.txt"))
    numbers = [sorted(set(text)).index(character) for character in text]
    cut = len(data.train_x) + 4
    assert abs(cut - 0.9 * len(text)) <= 7  # at nine tenths of the bytes, of which "ä" has two
    assert data.train_x.tolist() == [numbers[at : at + 4] for at in range(cut - 4)]
    assert data.train_y[:, -1].tolist() == numbers[4:cut]
    assert data.test_x.flatten().tolist() == numbers[cut:][: data.test_x.numel()]


def test_bytes_of_a_folder_are_its_two_splits(tmp_path: Path) -> None:
    train, test = bytes(range(256)) * 2, b"\xff\xfe not UTF-8 at all"
    data = datasets.TextBytes(context=8).load(str(_folder(tmp_path / "a", train, test)))
    assert bytes(data.train_x.flatten().tolist()) == train[: 63 * 8]
    assert bytes(data.train_y.flatten().tolist()) == train[1 : 63 * 8 + 1]
    assert bytes(data.test_x.flatten().tolist()) == test[:16]


def test_words_are_those_of_the_training_split_alone(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "a", b"a b a c\na b a\n", "a ü b a\nd d d d d\n".encode())
    data = datasets.TextWords(context=2, vocabulary=5).load(str(folder))
    assert data.train_x.flatten().tolist() == [2, 3, 2, 4, 1, 2, 3, 2]
    assert data.train_y.flatten().tolist() == [3, 2, 4, 1, 2, 3, 2, 1]
    assert data.test_x.flatten().tolist() == [2, 0, 3, 2, 1, 0, 0, 0, 0, 0]
    smaller = datasets.TextWords(context=2, vocabulary=4).load(str(folder))
    assert smaller.train_x.flatten().tolist() == [2, 3, 2, 0, 1, 2, 3, 2]


@pytest.mark.parametrize("level", LEVELS)
def test_a_limit_changes_no_token(level: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("the cat sat on the mat and the dog did not\n" * 30)
    workload = _workload(level, 6)
    whole, part = workload.load(str(file)), workload.load(str(file), train_limit=3, test_limit=2)
    assert torch.equal(part.train_x, whole.train_x[:3])
    assert torch.equal(part.test_y, whole.test_y[:2])
    assert torch.equal(whole.train_x, workload.load(str(file)).train_x)
    with pytest.raises(GradlabError, match="train_limit is 0"):
        workload.load(str(file), train_limit=0)


# --- bad input ----------------------------------------------------------------------------------------------------


def _refused(level: str, path: Path | None) -> str:
    with pytest.raises(GradlabError) as caught:
        _workload(level, 6).load(None if path is None else str(path))
    assert "\n" not in str(caught.value)
    assert path is None or str(caught.value).startswith(str(path))
    return str(caught.value)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_no_text_is_refused(level: str, tmp_path: Path) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_bytes(b"")
    short.write_text("a b c")
    assert f"workload {level} needs a path: a text file, or a folder with train.txt and test.txt" in _refused(
        level, None
    )
    assert "no such file, expected a text file, or a folder" in _refused(level, tmp_path / "gone")
    assert "not a regular file" in _refused(level, Path("/dev/zero"))
    assert "is empty, expected text" in _refused(level, empty)
    assert "tokens, expected at least 7: a context of 6 and its successor" in _refused(level, short)
    folder = _folder(tmp_path / "a", b"a b c d e f g h " * 9, b"")
    assert "test.txt: is empty" in _refused(level, folder)
    (folder / "test.txt").write_text("a b c")
    assert "test.txt: " in _refused(level, folder)
    (folder / "test.txt").unlink()
    assert "test.txt: no such file, expected a text file, or a folder with" in _refused(level, folder)


@pytest.mark.parametrize("level", LEVELS)
def test_a_file_with_no_white_space_near_its_end_leaves_nothing_to_test_words_on(level: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a " * 40 + "b" * 60)
    if level == "text_words":
        assert "(last 10 %): 0 tokens, expected at least 7" in _refused(level, file)
    else:
        assert len(_workload(level, 6).load(str(file)).test_x) == 2


def test_words_need_utf8_and_bytes_do_not(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"some text in an old encoding: " + b"caf\xe9 " * 40)
    for level in ("text_words", "text_chars"):
        problem = "(first 90 %): not UTF-8 at byte 33: words and characters need it; text_bytes takes any bytes"
        assert problem in _refused(level, file)
    assert 0xE9 in _workload("text_bytes", 6).load(str(file)).train_x


def test_an_oversized_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradlab.datasets.text_files.MAX_TEXT_BYTES", 100)
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 101)
    assert "more than 100 bytes; give a part of it" in _refused("text_bytes", file)
    assert "cannot be read" in _refused("text_bytes", tmp_path / ("x" * 300))


def test_an_impossible_transformer_is_refused() -> None:
    for changes, message in (
        ({"vocabulary": 0}, "vocabulary is 0, expected at least 1"),
        ({"context": 0}, "context is 0"),
        ({"layers": -1}, "layers is -1"),
        ({"heads": 3}, "width 16 cannot be shared by 3 heads"),
    ):
        with pytest.raises(GradlabError, match=message):
            dataclasses.replace(SMALL, **changes)


# --- the transformer ----------------------------------------------------------------------------------------------


def _tokens(seed: int, batch: int = 3, length: int = SMALL.context) -> torch.Tensor:
    return torch.randint(SMALL.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def _scattered(seed: int) -> Transformer:
    """Weights so large that every path through the model shows; in double precision, so that rounding does not."""
    model = initialized(SMALL, seed).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


@settings(deadline=None, max_examples=12)
@given(place=st.integers(0, SMALL.context - 1), other=st.integers(1, SMALL.vocabulary - 1), seed=st.integers(0, 50))
def test_a_changed_token_changes_nothing_before_it(place: int, other: int, seed: int) -> None:
    model, before = _scattered(seed), _tokens(seed)
    after = before.clone()
    after[:, place] = (after[:, place] + other) % SMALL.vocabulary
    with torch.no_grad():
        a, b = model(before), model(after)
    assert a.shape == (3, SMALL.context, SMALL.vocabulary)
    assert torch.allclose(a[:, :place], b[:, :place], atol=1e-9)
    # And all that follows sees it: nothing is masked that should not be.
    assert ((a - b).abs().amax(dim=(0, 2))[place:] > 1e-9).all()


def test_a_longer_row_is_refused() -> None:
    with pytest.raises(GradlabError, match="13 tokens in a row: this transformer has 12 positions"):
        _scattered(0)(_tokens(0, length=13))


def test_the_order_of_tokens_matters() -> None:
    """Positions are in use: without them the last token would see a bag of words."""
    model, tokens = _scattered(0), _tokens(0)
    swapped = tokens[:, [1, 0, *range(2, SMALL.context)]]
    with torch.no_grad():
        assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-3


def test_attention_is_the_softmax_of_the_past() -> None:
    """One block's attention beside the formula, position by position and head by head."""
    attention = _scattered(1).blocks[0].attention  # type: ignore[union-attr]
    x = torch.randn(2, 5, SMALL.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        query, key, value = attention.qkv(x).split(SMALL.width, dim=2)  # type: ignore[operator, union-attr]
        mixed, size = torch.zeros_like(x), SMALL.width // SMALL.heads
        for head in range(SMALL.heads):
            part = slice(head * size, (head + 1) * size)
            for t in range(5):
                scores = (key[:, : t + 1, part] @ query[:, t, part, None]).squeeze(2) / math.sqrt(size)
                mixed[:, t, part] = (scores.softmax(1)[:, :, None] * value[:, : t + 1, part]).sum(1)
        oracle = attention.out(mixed)  # type: ignore[operator, union-attr]
        assert torch.allclose(attention(x), oracle, atol=1e-9)  # type: ignore[operator]


@pytest.mark.parametrize("level", LEVELS)
def test_a_new_model_gives_every_token_about_the_same_chance(level: str) -> None:
    workload = datasets.get(level)
    assert isinstance(workload, (datasets.TextBytes, datasets.TextChars, datasets.TextWords))
    vocabulary, generator = workload.size.vocabulary, torch.Generator().manual_seed(0)
    x, y = (torch.randint(vocabulary, (2, workload.size.context), generator=generator) for _ in range(2))
    with torch.no_grad():
        logits = workload.model(0)(x)
    assert logits.shape == (*x.shape, vocabulary)
    assert workload.loss(logits, y).item() == pytest.approx(math.log(vocabulary), abs=0.1)


def test_gradients_are_dense_and_the_embedding_is_also_the_output_layer() -> None:
    model, tokens = initialized(SMALL, 0), _tokens(0)
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and not gradient.is_sparse for gradient in gradients.values())
    unseen = sorted(set(range(SMALL.vocabulary)) - set(tokens.flatten().tolist()))
    assert unseen
    assert gradients["tokens.weight"][unseen].abs().amax(1).min() > 0  # type: ignore[index]
    roles = Counter(layer.role for layer in layers_of(model))
    assert roles == {"embedding": 2, "linear": 8, "bias": 8 + 5, "normalization": 5}


# --- learning -----------------------------------------------------------------------------------------------------


def _periodic(path: Path) -> Path:
    """A text whose next byte is certain once its verse is known: four verses in a random order."""
    verses = ["the rain in spain\n", "falls mainly on\n", "a plain so plain\n", "that none complain\n"]
    order = np.random.default_rng(0).integers(0, 4, 400)
    path.write_text("".join(verses[index] for index in order), encoding="utf-8")
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("level", LEVELS)
def test_the_transformer_learns_more_than_frequencies(level: str, tmp_path: Path) -> None:
    """Better than the best model that looks at no past: the entropy of the tokens' frequencies."""
    workload = _workload(level, 16)
    data = workload.load(str(_periodic(tmp_path / "a.txt")))
    shares = torch.bincount(data.test_y.flatten()).double() / data.test_y.numel()
    nats = float(torch.special.entr(shares).sum())
    frequencies = workload.metric.of_mean(nats)
    model, recipe = workload.model(0), dataclasses.replace(workload.recipe, steps=60, warmup_steps=10)
    optimizer = datasets.build_optimizer(recipe, model.parameters())
    for step, indices in enumerate(datasets.batches(len(data.train_x), recipe.batch_size, 0, 1, 0, recipe.steps)):
        optimizer.param_groups[0]["lr"] = datasets.learning_rate_at(recipe, step)
        optimizer.zero_grad()
        workload.loss(model(data.train_x[indices]), data.train_y[indices]).backward()
        optimizer.step()
    assert workload.score(model, data.test_x, data.test_y) < 0.6 * frequencies


@pytest.mark.parametrize("on", ["--emulate", pytest.param("--ranks", marks=pytest.mark.thorough)])
def test_clipping_and_weight_decay_of_a_recipe_are_the_same_on_ranks_and_on_emulated_nodes(
    gradlab: Command, tmp_path: Path, on: str
) -> None:
    """nanoGPT's recipe, by characters: on two emulated nodes or ranks, and by one process with both batches."""
    text = _periodic(tmp_path / "a.txt")
    words = ["train", "text_chars", "--data", text, "--steps", 6, "--batch-size", 2, "--json"]
    code, out, err = gradlab(*words, on, 2, "--capture", tmp_path / "trace")
    assert code == 0, err
    run = json.loads(out)
    assert run["metric"] == {"name": "nats per character", "better": "lower", "form": "number"}
    oracle, data = datasets.get("text_chars"), datasets.get("text_chars").load(str(text))
    assert run["losses"] == pytest.approx(_losses_of_nanogpt(oracle, data), rel=1e-4)


def _losses_of_nanogpt(workload: datasets.Workload, data: datasets.Data) -> list[float]:
    """Six steps of one process with the batch of both ranks, as nanoGPT's train.py makes them."""
    model = workload.model(0)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99)), []
    for step, indices in enumerate(datasets.batches(len(data.train_x), 4, 0, 1, 0, 6)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 6
        loss = workload.loss(model(data.train_x[indices]), data.train_y[indices])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_every_workload_is_in_the_help_of_train(gradlab: Command) -> None:
    shown = " ".join(gradlab("train", "--help")[1].split())
    assert all(name in shown for name in datasets.names())
