"""The trace format: what is written is read back, and whatever is wrong with a trace is one clear line."""

import contextlib
import errno
import fcntl
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gradlab.capture import TraceWriter, repair
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.trace import Trace, check
from gradlab.trace.rank import runs
from gradlab.trace.schema import (
    CHUNK_COLUMNS,
    PART,
    Manifest,
    RankIndex,
    chunk_shape,
    dataset_name,
    rank_folder,
    read_document,
    read_manifest,
    segment_name,
    write_document,
    write_index,
    write_manifest,
)
from gradlab.trace.segment import SegmentReader
from support.golden_trace import GOLDEN, golden_gradient

LAYERS = (
    Layer("conv/one.weight", (4, 3, 2, 2), "convolution"),
    Layer("scale", ()),
    Layer("none", (0, 5)),
    Layer("wide", (2, 20_000), "linear"),
)


def gradient(layer: Layer, rank: int, index: int) -> np.ndarray:
    """The gradient that `write_trace` writes: a function of layer, rank and iteration alone."""
    generator = np.random.default_rng([LAYERS.index(layer), rank, index])
    return generator.standard_normal(layer.shape).astype(np.float32)


def write_trace(path: Path, indices: list[list[int]], dtype: str = "float32", segment_bytes: int = 1) -> Path:
    with TraceWriter(
        path, LAYERS, len(indices), dtype=dtype, segment_bytes=segment_bytes, metadata={"seed": 3}
    ) as writer:
        for rank, steps in enumerate(indices):
            for index in steps:
                writer.append(
                    rank,
                    index,
                    {layer.name: gradient(layer, rank, index) for layer in LAYERS},
                    loss=index + rank / 10,
                    learning_rate=0.5,
                    loss_scale=2.0,
                    accumulation=3,
                    unused=["scale"] if index % 2 else [],
                )
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "t", [list(range(20)), list(range(20))])


@pytest.fixture
def trace_path(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "t")
    return tmp_path / "t"


def test_what_is_written_is_read_back(template: Path) -> None:
    with Trace(template) as trace:
        assert trace.layers == LAYERS
        assert trace.world_size == 2
        assert trace.metadata["seed"] == 3
        assert trace.steps.tolist() == list(range(20))
        seen = 0
        for step in trace.iterate():
            for rank in range(2):
                for layer in LAYERS:
                    np.testing.assert_array_equal(step.gradients[rank][layer.name], gradient(layer, rank, step.index))
            np.testing.assert_array_equal(step.loss, [step.index, step.index + 0.1])
            assert (step.learning_rate, step.loss_scale.tolist()) == (0.5, [2.0, 2.0])
            assert step.accumulation.tolist() == [3, 3]
            assert step.unused[0].tolist() == [False, bool(step.index % 2), False, False]
            seen += 1
        assert seen == 20


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=25), min_size=1, max_size=3), st.data())
def test_positions_count_in_the_steps_that_all_ranks_hold(
    tmp_path: Path, held: list[set[int]], data: st.DataObject
) -> None:
    path = tmp_path / "t"
    shutil.rmtree(path, ignore_errors=True)
    write_trace(path, [sorted(steps) for steps in held])
    common = sorted(set.intersection(*held))
    with Trace(path, allow_empty=True) as trace:
        assert trace.steps.tolist() == common
        assert trace.rank_steps == tuple(map(len, held))
        start = data.draw(st.integers(0, len(common)))
        stop = data.draw(st.integers(start, len(common)))
        for rank in range(len(held)):
            for layer in LAYERS:
                expected = [gradient(layer, rank, index).reshape(-1) for index in common[start:stop]]
                values = trace.read(layer.name, rank, start, stop)
                np.testing.assert_array_equal(values, np.reshape(expected, (stop - start, layer.numel)))
            assert trace.scalars(rank)["index"].tolist() == common


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 200), unique=True, max_size=60).map(sorted),
    st.lists(st.integers(1, 80), min_size=4, max_size=8),
)
@example([3, 5, 6], [60, 60, 60, 60])
def test_runs_read_every_row_once_and_in_order(rows: list[int], sizes: list[int]) -> None:
    starts = np.cumsum([0, *sizes, 201])
    numbers = []
    for segment, first, last in runs(np.array(rows, dtype=np.int64), starts):
        assert last <= starts[segment + 1] - starts[segment]
        numbers += [starts[segment] + row for row in range(first, last)]
    assert numbers == rows


def test_rows_without_gaps_in_one_segment_are_one_read() -> None:
    assert list(runs(np.arange(5, 300), np.array([0, 1000]))) == [(0, 5, 300)]


def test_columns_and_mean(template: Path) -> None:
    layer = LAYERS[3]
    with Trace(template) as trace:
        both = np.array(
            [[gradient(layer, rank, index).reshape(-1) for index in range(20)] for rank in range(2)], np.float64
        )
        picked = slice(CHUNK_COLUMNS - 7, CHUNK_COLUMNS + 9)
        np.testing.assert_array_equal(trace.read("wide", 1, 3, 19, picked), both[1, 3:19, picked])
        expected = both.mean(axis=0).astype(np.float32)
        np.testing.assert_array_equal(trace.mean("wide"), expected)
        np.testing.assert_array_equal(trace.mean("wide", 2, 18, picked), expected[2:18, picked])


def test_iterate_reads_the_layers_and_positions_that_are_asked_for(template: Path) -> None:
    with Trace(template) as trace:
        steps = list(trace.iterate(5, 8, layers=["scale"]))
    assert [step.position for step in steps] == [5, 6, 7]
    assert all(list(rank) == ["scale"] for step in steps for rank in step.gradients)
    assert all(isinstance(step.gradients[0]["scale"], np.ndarray) for step in steps)
    assert steps[0].gradients[0]["scale"].shape == ()


def test_a_trace_opened_for_some_layers_reads_these_and_refuses_the_others(template: Path) -> None:
    with Trace(template) as whole, Trace(template, only=["wide"]) as trace:
        assert trace.layers == whole.layers
        np.testing.assert_array_equal(trace.read("wide", 1), whole.read("wide", 1))
        with pytest.raises(GradlabError, match="opened for other layers alone, not for 'scale'"):
            trace.read("scale", 0)


def test_a_pickled_trace_opens_the_files_itself(template: Path) -> None:
    with Trace(template, only=["wide"], average_ranks=2) as trace:
        expected = trace.read("wide", 0)
        with pickle.loads(pickle.dumps(trace)) as copy:  # noqa: S301 (as a DataLoader does, whose workers are not forked)
            np.testing.assert_array_equal(copy.read("wide", 0), expected)
            assert (copy.world_size, copy.source) == (1, trace.source)
            with pytest.raises(GradlabError, match="opened for other layers alone"):
                copy.read("scale", 0)


@pytest.mark.parametrize("suffix", ["", PART])
def test_a_file_that_cannot_be_locked_is_read(trace_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """HDF5's lock is refused because it is held; where a file system has none, the error is another one."""
    path = trace_path / rank_folder(0) / segment_name(0)
    os.rename(path, whole := path.with_name(path.name + suffix))
    manifest = read_manifest(trace_path)
    with open(whole, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(GradlabError, match="unable to lock file"):
            SegmentReader(whole, manifest, 0, 0, swmr=bool(suffix))
        monkeypatch.setattr("gradlab.trace.segment._NO_LOCKS", {errno.EAGAIN})
        reader = SegmentReader(whole, manifest, 0, 0, swmr=bool(suffix))
        np.testing.assert_array_equal(reader.read(LAYERS[1], 0, 1)[0], gradient(LAYERS[1], 0, 0).reshape(-1))
        reader.close()


@pytest.mark.parametrize(("dtype", "reference"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_narrow_types_round_as_torch_does(tmp_path: Path, dtype: str, reference: torch.dtype) -> None:
    write_trace(tmp_path / "t", [[0, 1]], dtype)
    with Trace(tmp_path / "t") as trace:
        assert trace.dtype == dtype
        values = trace.read("wide", 0, 1, 2)
    expected = torch.from_numpy(gradient(LAYERS[3], 0, 1)).to(reference).float().reshape(1, -1)
    np.testing.assert_array_equal(values, expected.numpy())
    segment = h5py.File(tmp_path / "t" / "rank-00000" / "000000.h5")
    assert segment["gradients/wide"].attrs.get("logical_dtype") == (b"bfloat16" if dtype == "bfloat16" else None)
    segment.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_elements_that_are_not_finite_are_kept_and_counted(tmp_path: Path, dtype: str) -> None:
    """The largest finite ones are none of them."""
    values = np.array([1.0, np.inf, -np.inf, np.nan, 3e4], np.float32)
    with TraceWriter(tmp_path / "t", [Layer("x", (5,))], 1, dtype=dtype) as writer:
        writer.append(0, 0, {"x": values})
        writer.append(0, 1, {"x": np.full(5, 6e4 if dtype == "float16" else 3e38, np.float32)})
    with Trace(tmp_path / "t") as trace:
        assert trace.scalars(0)["non_finite"].tolist() == [3, 0]
        np.testing.assert_array_equal(np.isnan(trace.read("x", 0, 0, 1)[0]), np.isnan(values))
        np.testing.assert_array_equal(np.isinf(trace.mean("x", 0, 1)[0]), np.isinf(values))


def test_the_digest_is_of_this_recording(tmp_path: Path, template: Path) -> None:
    with Trace(template) as trace, Trace(template) as again:
        first = trace.digest
        assert again.digest == first
    write_trace(tmp_path / "t", [list(range(20)), list(range(20))])
    with Trace(tmp_path / "t") as other:
        assert other.digest != first


@settings(deadline=None)
@given(st.integers(1, 10**7))
def test_chunks_cover_a_layer_with_little_padding(numel: int) -> None:
    rows, columns = chunk_shape(numel)
    assert rows == 16
    assert columns <= CHUNK_COLUMNS
    pieces = -(-numel // CHUNK_COLUMNS)
    assert 0 <= pieces * columns - numel < pieces


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=6), unique=True))
def test_every_layer_name_is_one_link_of_its_own(names: list[str]) -> None:
    links = [dataset_name(name) for name in names]
    assert len(set(links)) == len(names)
    assert not any("/" in link or "\0" in link or link == "." for link in links)


def test_check_finds_nothing_wrong_with_a_sound_trace(template: Path) -> None:
    report = check(template)
    assert report.ok
    assert [(rank.steps, rank.segments, rank.closed) for rank in report.ranks] == [(20, 2, True)] * 2
    assert report.common_steps == 20


# --- asked wrongly ---------------------------------------------------------------------------------------------


def test_an_unknown_layer_names_close_ones(template: Path) -> None:
    with Trace(template) as trace, pytest.raises(GradlabError, match=r"no layer 'conv/one.wight'.*conv/one.weight"):
        trace.read("conv/one.wight", 0)


def test_a_rank_or_range_that_is_not_there_is_refused(template: Path) -> None:
    with Trace(template) as trace:
        for ask in (
            lambda: trace.read("scale", 2),
            lambda: trace.scalars(-1),
            lambda: trace.read("scale", 0, 0, 21),
            lambda: trace.mean("scale", -1),
            lambda: trace.read("wide", 0, columns=slice(0, 10, 2)),
            lambda: next(trace.iterate(5, 3)),
        ):
            with pytest.raises(GradlabError):
                ask()


@pytest.mark.parametrize(
    "append",
    [
        lambda writer: writer.append(0, 0, {}),
        lambda writer: writer.append(0, 0, {"x": np.zeros(4)}),
        lambda writer: writer.append(1, 0, {"x": np.zeros(3)}),
        lambda writer: [writer.append(0, 5, {"x": np.zeros(3)}) for _ in range(2)],
    ],
)
def test_the_writer_refuses_what_does_not_fit(tmp_path: Path, append: Callable[[TraceWriter], object]) -> None:
    with TraceWriter(tmp_path / "t", [Layer("x", (3,))], 1) as writer, pytest.raises(GradlabError):
        append(writer)


def test_metadata_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(GradlabError, match="metadata cannot be written as JSON"):
        TraceWriter(tmp_path / "t", LAYERS, 1, metadata={"x": float("nan")})
    assert not (tmp_path / "t").exists()


def test_the_writer_overwrites_nothing_unasked(trace_path: Path) -> None:
    with pytest.raises(GradlabError, match="not empty; nothing is overwritten"):
        TraceWriter(trace_path, LAYERS, 1)
    TraceWriter(trace_path, LAYERS, 1, overwrite=True).close()
    assert sorted(file.name for file in trace_path.iterdir()) == ["manifest.json", "rank-00000"]


# --- wrong traces: each gives one line ---------------------------------------------------------------------------


def refused(path: Path, match: str) -> None:
    """`Trace` refuses it in one line, and `check` agrees that it is not sound."""
    with pytest.raises(GradlabError, match=match) as caught:
        Trace(path)
    assert "\n" not in str(caught.value)
    with contextlib.suppress(GradlabError):  # for a manifest that cannot be read, in the same words
        report = check(path)
        assert not report.ok
        assert not any("\n" in problem for problem in report.problems)
        assert not report.closed or any(re.search(match, problem) for problem in report.problems)


def rewrite(path: Path, **changes: object) -> None:
    """Write a manifest or an index anew, with its checksum right and some fields changed."""
    kind = json.loads(path.read_text(encoding="utf-8"))["format"]
    body = read_document(path, kind)
    write_document(
        path, kind, {key: value for key, value in body.items() if key not in ("format", "version")} | changes
    )


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_foreign_folder(tmp_path: Path) -> None:
    refused(tmp_path / "t", "no such folder")
    refused(tmp_path, "not a gradlab trace, there is no manifest.json")
    (tmp_path / "manifest.json").write_text('{"format": "something else"}')
    refused(tmp_path, "not written by gradlab")
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    refused(tmp_path, "not JSON")


def test_a_truncated_manifest(trace_path: Path) -> None:
    content = (trace_path / "manifest.json").read_bytes()
    for part in (0.0, 0.3, 0.99):
        (trace_path / "manifest.json").write_bytes(content[: int(len(content) * part)])
        refused(trace_path, "manifest.json is not JSON: expected a .gradlab-trace. document, whole")


def test_any_flipped_bit_of_a_manifest(trace_path: Path) -> None:
    content = (trace_path / "manifest.json").read_bytes()
    same = json.loads(content)
    for position in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        (trace_path / "manifest.json").write_bytes(flipped)
        if _is_same_json(flipped, same):  # white space, say
            continue
        with pytest.raises(GradlabError) as caught:
            Trace(trace_path)
        assert "\n" not in str(caught.value)


def _is_same_json(content: bytearray, same: object) -> bool:
    try:
        return bool(json.loads(content) == same)
    except ValueError:
        return False


def test_a_newer_manifest(trace_path: Path) -> None:
    replace_text(trace_path / "manifest.json", '"version": 1', '"version": 2')
    refused(trace_path, r"written by a newer gradlab \(version 2, this one reads 1\): upgrade")
    replace_text(trace_path / "manifest.json", '"version": 2', '"version": 0')
    refused(trace_path, "version is 0, expected 1")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"world_size": 0}, "'world_size' is 0"),
        ({"world_size": "2"}, "'world_size' is '2'"),
        ({"dtype": "float64"}, "'dtype' is 'float64'"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [{"name": "a", "shape": [2**30, 2**30]}]}, "not a layer description"),
        ({"layers": [{"name": "a", "shape": [1] * 65}]}, "not a layer description"),
        ({"layers": [{"name": "a", "shape": [1]}] * 2}, "names a layer twice"),
        ({"layers": [{"name": "a", "shape": [-1]}]}, "not a layer description"),
        ({"run": "../../x"}, "'run' is"),
        ({"metadata": 3}, "'metadata' is 3"),
        ({"world_size": 3}, "ranks disagree, the manifest has 3, but no rank-00002"),
        ({"world_size": 1}, "ranks disagree, the manifest has 1, but rank-00001 is there"),
        ({"run": "0" * 32}, "disagrees with the manifest, it is of another run"),
        ({"layers": [LAYERS[0].to_json()]}, "does not belong to this trace: its layers is"),
        ({"dtype": "float16"}, "does not belong to this trace: its dtype is"),
    ],
)
def test_a_manifest_that_says_something_else(trace_path: Path, change: dict[str, object], match: str) -> None:
    rewrite(trace_path / "manifest.json", **change)
    refused(trace_path, match)


def test_ranks_of_different_runs(trace_path: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "other", [list(range(20)), list(range(20))])
    shutil.rmtree(trace_path / "rank-00001")
    shutil.copytree(tmp_path / "other" / "rank-00001", trace_path / "rank-00001")
    refused(trace_path, "rank-00001 disagrees with the manifest")
    shutil.copy(trace_path / "rank-00000" / "index.json", trace_path / "rank-00001" / "index.json")
    rewrite(trace_path / "rank-00001" / "index.json", rank=1)
    refused(trace_path, "does not belong to this trace: its run is")


def test_an_index_that_is_missing_damaged_or_wrong(trace_path: Path) -> None:
    index = trace_path / "rank-00001" / "index.json"
    good = index.read_bytes()
    index.unlink()
    refused(trace_path, r"not closed \(rank 1\); run `gradlab trace repair")
    index.write_bytes(good[:50])
    refused(trace_path, "index.json is not JSON: expected a .gradlab-trace-rank. document, whole")
    index.write_bytes(good)
    rewrite(index, segments=[{"number": 0, "steps": 16}, {"number": 1, "steps": 3}])
    refused(trace_path, "4 committed steps, its index says 3")
    rewrite(index, segments=[{"number": 1}])
    refused(trace_path, "not an index of segments")
    rewrite(index, segments=[{"number": 1, "steps": 4}, {"number": 0, "steps": 16}])
    refused(trace_path, "iterations are not in ascending order")
    rewrite(index, segments=[{"number": 0, "steps": 16}])
    refused(trace_path, "000001.h5: there, though the index of rank 1 does not name it")


def test_an_empty_trace(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest := Manifest(2, LAYERS))
    for rank in range(2):
        (tmp_path / f"rank-0000{rank}").mkdir()
        write_index(tmp_path, RankIndex(manifest.run, rank, ()))
    refused(tmp_path, r"empty trace, no step is common to all ranks \(steps per rank: 0, 0\)")
    with Trace(tmp_path, allow_empty=True) as trace:
        assert trace.read("wide", 0).shape == (0, 40_000)
        assert trace.mean("wide").shape == (0, 40_000)
        assert list(trace.iterate()) == []


def test_only_folders_of_ranks_count_as_ranks(trace_path: Path) -> None:
    (trace_path / "rank-notes").write_text("what I thought of rank 1")
    Trace(trace_path).close()
    assert check(trace_path).ok
    (trace_path / "rank-00002").mkdir()
    refused(trace_path, "ranks disagree, the manifest has 2, but rank-00002 is there")


def test_steps_that_only_some_ranks_hold_are_remarked_upon(tmp_path: Path, template: Path) -> None:
    lines = "ranks hold 3 to 5 steps each; the 3 that all", "ranks hold 3 steps each; the 2 that all"
    held = [[list(range(5)), list(range(3))], [[0, 1, 2], [1, 2, 3]]]
    for number, (steps, line) in enumerate(zip(held, lines, strict=True)):
        report = check(write_trace(tmp_path / str(number), steps))
        assert report.ok
        with Trace(tmp_path / str(number)) as trace, Trace(template) as whole:
            assert trace.remarks == report.remarks == (f"{line} ranks hold are read, the others are not",)
            assert whole.remarks == ()


@pytest.mark.parametrize("held", [[[], []], [[0, 1], [2, 3]], [[0], []]])
def test_ranks_without_a_common_step(tmp_path: Path, held: list[list[int]]) -> None:
    write_trace(tmp_path / "t", held)
    refused(tmp_path / "t", "empty trace, no step is common to all ranks")


def test_a_segment_that_is_missing_cut_or_no_file(trace_path: Path) -> None:
    segment = trace_path / "rank-00000" / "000000.h5"
    content = segment.read_bytes()
    for kept in (0, 100, 5000, 200_000):
        segment.write_bytes(content[:kept])
        refused(trace_path, "000000.h5: not a readable HDF5 file, or truncated")
    segment.unlink()
    os.mkfifo(segment)  # a pipe would be waited for
    refused(trace_path, "000000.h5: not a file")
    segment.unlink()
    refused(trace_path, "000000.h5: missing")
    assert "000000.h5: missing" in check(trace_path).problems[0]


def test_a_flipped_bit_in_the_data_is_found(trace_path: Path) -> None:
    segment = trace_path / "rank-00001" / "000000.h5"
    content = bytearray(segment.read_bytes())
    content[content.index(gradient(LAYERS[3], 1, 5).tobytes()[:1000]) + 40] ^= 4
    segment.write_bytes(content)
    report = check(trace_path)
    assert [len(rank.problems) for rank in report.ranks] == [0, 1]
    assert "layer 'wide' at iteration 5 is damaged (checksum)" in report.problems[0]
    with Trace(trace_path) as trace:
        trace.read("scale", 1)
        with pytest.raises(GradlabError, match="iteration 5 is damaged"):
            trace.read("wide", 1)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_anywhere_is_found_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Oracle: the values read are those written, or it is a GradlabError. Wrong values are the one failure."""
    path = tmp_path / "t"
    if not path.exists():
        with TraceWriter(path, [Layer("x", (50,)), Layer("y", (3,))], 1) as writer:
            for index in range(20):
                writer.append(0, index, {"x": np.full(50, index), "y": np.full(3, -index)}, loss=index)
        shutil.copy(path / "rank-00000" / "000000.h5", tmp_path / "sound.h5")
    content = bytearray((tmp_path / "sound.h5").read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    (path / "rank-00000" / "000000.h5").write_bytes(content)
    sound = check(path).ok
    with contextlib.nullcontext() if sound else contextlib.suppress(GradlabError), Trace(path) as trace:
        np.testing.assert_array_equal(trace.read("x", 0), np.repeat(np.arange(20.0), 50).reshape(20, 50))
        np.testing.assert_array_equal(trace.scalars(0)["loss"], np.arange(20.0))


def test_no_text_lies_where_hdf5_has_no_checksum(tmp_path: Path) -> None:
    """A flipped bit in a global heap ("GCOL") can keep HDF5 reading for ever."""
    with TraceWriter(tmp_path / "t", [Layer("x", (50,))], 1, dtype="bfloat16") as writer:
        writer.append(0, 0, {"x": np.ones(50)})
    assert b"GCOL" not in (tmp_path / "t" / "rank-00000" / "000000.h5").read_bytes()


def edit(trace_path: Path, change: Callable[[h5py.File], object]) -> None:
    with h5py.File(trace_path / "rank-00000" / "000000.h5", "r+") as file:
        change(file)


def replaced(name: str, make: Callable[[h5py.File, str, h5py.Dataset], object]) -> Callable[[h5py.File], object]:
    """Put something else in the place of a data set."""

    def change(file: h5py.File) -> None:
        old = file[name]
        file.move(name, "moved")
        make(file, name, old)
        del file["moved"]

    return change


def headed(key: str, value: int) -> Callable[[h5py.File], object]:
    """Change a field of a segment's header."""

    def change(file: h5py.File) -> None:
        file.attrs["gradlab"] = np.bytes_(json.dumps(json.loads(file.attrs["gradlab"]) | {key: value}))

    return change


def _virtual(file: h5py.File, name: str, old: h5py.Dataset) -> None:
    layout = h5py.VirtualLayout(shape=old.shape, dtype=old.dtype, maxshape=old.maxshape)
    layout[:] = h5py.VirtualSource("elsewhere.h5", "x", shape=old.shape)
    file.create_virtual_dataset(name, layout)


def _external(file: h5py.File, name: str, old: h5py.Dataset) -> None:
    file.create_dataset(name, shape=old.shape, dtype=old.dtype, external=[("elsewhere.bin", 0, old.nbytes)])


def _unknown_filter(file: h5py.File, name: str, old: h5py.Dataset) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(old.chunks)
    properties.set_filter(h5py.h5z.FILTER_NBIT, h5py.h5z.FLAG_OPTIONAL)
    h5py.h5d.create(file.id, name.encode(), old.id.get_type(), old.id.get_space(), properties)


def _deflated(file: h5py.File, name: str, old: h5py.Dataset) -> None:
    """The same values under the same checksums: it is not what they are, but what such a file may claim."""
    file.create_dataset(name, data=old[:], maxshape=old.maxshape, chunks=old.chunks, compression="gzip")


def _absurd_shape(file: h5py.File, name: str, old: h5py.Dataset) -> None:
    file.create_dataset(name, shape=(2**40, 48), maxshape=(None, 48), dtype="<f4", chunks=(16, 48))
    file["committed"][0] = 2**40


WIDE = "gradients/conv%2Fone.weight"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (replaced(WIDE, lambda f, n, _: f.__setitem__(n, h5py.ExternalLink("x.h5", "/x"))), "is a ExternalLink"),
        (replaced(WIDE, lambda f, n, _: f.__setitem__(n, h5py.SoftLink("/steps"))), "is a SoftLink"),
        (replaced("steps", lambda f, n, _: f.__setitem__(n, h5py.ExternalLink("x.h5", "/x"))), "is a ExternalLink"),
        (replaced(WIDE, _virtual), "virtual data set"),
        (replaced(WIDE, _external), "external storage"),
        (replaced(WIDE, _unknown_filter), "uses the HDF5 filter 5; gradlab writes without any"),
        (replaced(WIDE, _deflated), "uses the HDF5 filter 1; gradlab writes without any"),
        (replaced(WIDE, lambda f, n, _: f.create_group(n)), "not a data set"),
        (replaced(WIDE, lambda f, n, o: f.create_dataset(n, data=o[:].astype("f8"))), "holds float64"),
        (replaced(WIDE, lambda f, n, o: f.create_dataset(n, data=o[:, :5])), "has shape"),
        (replaced(WIDE, lambda f, n, o: f.create_dataset(n, data=o[:5])), "has shape"),
        (replaced("steps", lambda f, n, o: f.create_dataset(n, shape=o.shape, dtype=o.dtype)), "does not hold"),
        (replaced("unused", _absurd_shape), "claims|has shape"),
        (lambda f: f.__delitem__(WIDE), "layers differ from the manifest: conv%2Fone.weight"),
        (lambda f: f.create_dataset("gradients/more", data=[1.0]), "layers differ from the manifest: more"),
        (lambda f: f.create_dataset("more", data=[1.0]), r"members \['more'\] are missing or unknown"),
        (lambda f: f.__delitem__("committed"), r"members \['committed'\]"),
        (lambda f: f["committed"].__setitem__(0, 15), "15 committed steps, its index says 16"),
        (lambda f: f["committed"].__setitem__(0, -1), "-1 committed steps"),
        (lambda f: f["committed"].__setitem__(0, 2**60), "claims|has shape"),
        (lambda f: f["unused"].__setitem__(3, 255), "do not match their checksums"),
        (lambda f: f.attrs.__setitem__("gradlab", np.bytes_("{}")), "not a segment of a gradlab trace"),
        (lambda f: f.attrs.__setitem__("gradlab", "{}"), "not a segment of a gradlab trace"),
        (lambda f: f.attrs.__setitem__("gradlab", 3), "not a segment of a gradlab trace"),
        (lambda f: f.attrs.__delitem__("gradlab"), "not a segment of a gradlab trace"),
        (headed("version", 2), "written by a newer gradlab .version 2, this one reads 1.: upgrade"),
        (headed("world_size", 3), "its world_size is 3, the manifest says 2"),
        (headed("rank", 1), "its rank is 1, the manifest says 0"),
        (headed("segment", 1), "its segment is 1, the manifest says 0"),
    ],
)
def test_a_segment_that_is_not_what_it_claims(
    trace_path: Path, change: Callable[[h5py.File], object], match: str
) -> None:
    edit(trace_path, change)
    refused(trace_path, match)


def test_one_data_set_under_two_names(tmp_path: Path) -> None:
    """A file of one layer's size would be read once per name."""
    path, layers = tmp_path / "t", [Layer("a", (500,)), Layer("b", (500,))]
    with TraceWriter(path, layers, 1) as writer:
        writer.append(0, 0, {"a": np.ones(500), "b": np.ones(500)})
    edit(path, replaced("gradients/b", lambda file, name, _: file.__setitem__(name, file["gradients/a"])))
    refused(path, "'b' is a data set that has another name, too")


def test_two_data_sets_in_one_place_of_the_file(tmp_path: Path) -> None:
    """Each has storage of its size and an object of its own: together they need more than the file has."""
    path, values = tmp_path / "t", np.ones(50_000, np.float32)
    with TraceWriter(path, [Layer("a", (50_000,)), Layer("b", (50_000,))], 1) as writer:
        writer.append(0, 0, {"a": values, "b": values})
    segment, smaller = path / "rank-00000" / "000000.h5", tmp_path / "smaller.h5"
    with h5py.File(segment) as file, h5py.File(smaller, "w") as out:
        out.attrs["gradlab"] = file.attrs["gradlab"]
        for name in ("steps", "unused", "checksums", "committed"):
            file.copy(name, out)
        out.create_dataset("gradients/a", data=values[None])
        address = out["gradients/a"].id.get_offset()
        out.create_dataset("gradients/b", shape=(1, 50_000), dtype="<f4")  # without a place in the file yet
    content, nbytes = smaller.read_bytes(), values.nbytes.to_bytes(8, "little")
    nowhere = b"\x03\x01" + b"\xff" * 8 + nbytes  # a contiguous layout: its address and bytes
    assert content.count(nowhere) == 1
    segment.write_bytes(content.replace(nowhere, b"\x03\x01" + address.to_bytes(8, "little") + nbytes))
    with h5py.File(segment) as file:
        np.testing.assert_array_equal(file["gradients/b"][0], values)
    refused(path, "'b' claims 200000 bytes of data that the file does not hold")


@pytest.mark.parametrize("damaged", [None, 3, 700, 999])
def test_long_rows_are_verified_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int | None) -> None:
    monkeypatch.setattr("gradlab.trace.segment.VALUES_AT_ONCE", 300)
    values, path = np.arange(2000, dtype=np.float32).reshape(2, 1000), tmp_path / "t"
    with TraceWriter(path, [Layer("x", (1000,))], 1) as writer:
        for index in range(2):
            writer.append(0, index, {"x": values[index]})
    segment = path / "rank-00000" / "000000.h5"
    content = bytearray(segment.read_bytes())
    if damaged is not None:
        content[content.index(values[1].tobytes()) + 4 * damaged] ^= 1
    segment.write_bytes(content)
    expected = [] if damaged is None else [f"{segment}: layer 'x' at iteration 1 is damaged (checksum)"]
    assert list(check(path).problems) == expected


def test_a_world_size_without_folders_costs_nothing(trace_path: Path) -> None:
    """No rank is looked for, and none made, where there is no folder of it."""
    rewrite(trace_path / "manifest.json", world_size=5000)
    report = check(trace_path)
    line = "ranks disagree, the manifest has 5000, but no rank-00002"
    assert report.shared_problems == (f"{trace_path}: {line}",)
    assert repair(trace_path)[-1].problems == report.shared_problems
    assert not (trace_path / "rank-00002").exists()
    refused(trace_path, line)


def test_json_that_stands_for_much_more_than_its_bytes(trace_path: Path) -> None:
    (trace_path / "manifest.json").write_text("[" + "{}," * 2**20 + "1]")
    refused(trace_path, "more than 1048576 values: expected a .gradlab-trace. document, whole")


def test_the_golden_trace_loads() -> None:
    with Trace(GOLDEN) as trace:
        assert [layer.name for layer in trace.layers] == ["conv.weight", "conv.bias"]
        assert trace.world_size == 2
        assert trace.steps.tolist() == [0, 2, 4]
        assert trace.metadata["note"] == "golden"
        assert trace.times is None  # it was recorded before steps were timed
        for step in trace.iterate():
            for rank in range(2):
                expected = golden_gradient(rank, step.index)
                np.testing.assert_array_equal(step.gradients[rank]["conv.weight"], expected)
                assert step.unused[rank].tolist() == [False, step.index == 2]
            np.testing.assert_array_equal(step.loss, [step.index / 2, step.index / 2])
            assert step.optimizer_step == step.index
    assert check(GOLDEN).ok
