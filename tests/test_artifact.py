"""Artifacts: what is saved comes back, and whatever else a file may hold is one GradlabError."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pickle
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from gradlab.artifact import FORMAT, Artifact
from gradlab.errors import GradlabError
from gradlab.layout import Layer, canonical_json
from gradlab.plan import Group, Plan
from gradlab.plan.plan import hash_tensor, learned_tensors
from support.golden_artifact import GOLDEN, golden_artifact
from support.laws import draws_all, law

# All of Unicode takes hypothesis seconds to list.
TEXT = st.text('a"\\/\n\0\x7f\x9b\u00e9\u2028\u4e2d\U0001f600', max_size=6)
# Of the plan in the golden file; it changes only with the format, or with the name of a codec or metric.
GOLDEN_DIGEST = "27aa9c57ef5af225993dca37123a308826d7467a2cd870e19ed0b4a1ca97676e"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a sound artifact."""
    return golden_artifact().save(tmp_path_factory.mktemp("artifact") / "whole.safetensors").read_bytes()


def load_bytes(path: Path, data: bytes) -> Artifact:
    path.write_bytes(data)
    return Artifact.load(path)


def reason(path: Path, data: bytes) -> str | None:
    """Why loading is refused: one line that names the file; None where it loads. Other exceptions come through."""
    try:
        load_bytes(path, data)
    except GradlabError as error:
        return str(error)
    return None


def refused(path: Path, data: bytes, message: str = "") -> None:
    """Loading is refused with one short line that names the file and matches the message."""
    error = reason(path, data)
    assert error is not None
    assert str(path) in error
    assert "\n" not in error
    assert len(error) < 1000
    assert re.search(message, error)


# --- what is saved comes back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.safetensors", os.fsdecode(b"caf\xe9.safetensors")])  # the latter is Latin-1
def test_an_artifact_round_trips(tmp_path: Path, name: str) -> None:
    saved = golden_artifact()
    path = saved.save(tmp_path / "new" / "folder" / name)
    loaded = Artifact.load(path)
    assert loaded.plan.digest == saved.plan.digest
    assert loaded.plan.groups == saved.plan.groups
    assert loaded.provenance == saved.provenance
    for key, tensor in learned_tensors(saved.plan).items():
        assert torch.equal(learned_tensors(loaded.plan)[key], tensor)
    assert os.listdir(path.parent) == [name]


def test_equal_artifacts_are_equal_files(tmp_path: Path, whole: bytes) -> None:
    """The file's own hash is stable: over two saves, and over load and save."""
    path = golden_artifact().save(tmp_path / "one")
    assert path.read_bytes() == whole
    assert Artifact.load(path).save(tmp_path / "two").read_bytes() == whole


def test_a_plan_without_tensors(tmp_path: Path) -> None:
    plan = Plan.uniform([Layer("w", (30, 30))], "topk", density=0.5)
    path = Artifact(plan).save(tmp_path / "plan")
    assert Artifact.load(path).plan == plan
    assert Artifact.load(path).provenance == {}


@law(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=10,
    ),
    examples=40,
)
def test_any_plain_provenance_round_trips(tmp_path_factory: pytest.TempPathFactory, provenance: Any) -> None:
    path = tmp_path_factory.mktemp("origin") / "plan"
    Artifact(Plan((Layer("w", (3,)),)), {"value": provenance}).save(path)
    assert Artifact.load(path).provenance == {"value": provenance}


def test_a_provenance_with_numbers_as_keys_gets_text_keys(tmp_path: Path) -> None:
    path = Artifact(Plan(()), {"error_by_age": {1: 0.5, 10: 0.25, 2: 0.125}}).save(tmp_path / "plan")
    assert Artifact.load(path).provenance == {"error_by_age": {"1": 0.5, "10": 0.25, "2": 0.125}}


def test_groups_that_share_a_tensor_and_views_of_it(tmp_path: Path) -> None:
    layers = (Layer("a", (4, 6)), Layer("b", (4, 6)))
    groups = tuple(Group(name, (name,), "gradiveq", {"slice_size": 12}) for name in "ab")
    basis, mean = torch.eye(12).expand(1, 12, 12)[:, :, :2], torch.zeros(2, 12)
    plan = Plan(layers, groups, learned={name: {f"{name}/basis": basis, f"{name}/mean": mean} for name in "ab"})
    assert Artifact.load(Artifact(plan).save(tmp_path / "plan")).plan.digest == plan.digest


def test_the_golden_file_loads() -> None:
    loaded = Artifact.load(GOLDEN)
    assert loaded.plan.digest == golden_artifact().plan.digest == GOLDEN_DIGEST
    assert loaded.provenance == golden_artifact().provenance
    assert torch.equal(loaded.plan.learned["stem"]["stem.weight/basis"], torch.eye(12)[None, :, :3])


# --- saving ---------------------------------------------------------------------------------------------------------


def test_an_existing_file_is_not_overwritten(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "plan"
    path.write_text("mine")
    with pytest.raises(GradlabError, match="exists already: choose another name or ask to overwrite it"):
        golden_artifact().save(path)
    assert path.read_text() == "mine"
    golden_artifact().save(path, overwrite=True)
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["plan"]
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(GradlabError, match="exists already"):
        golden_artifact().save(tmp_path / "link")


@pytest.mark.parametrize("name", ["file/plan", "folder", "x" * 300, "x" * 250, "null\0byte"])
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(GradlabError, match="cannot write") as error:
        golden_artifact().save(tmp_path / name, overwrite=True)
    assert "\n" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no files from anybody")
def test_an_unwritable_folder() -> None:
    with pytest.raises(GradlabError, match="cannot write /proc/plan: "):
        golden_artifact().save("/proc/plan")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_provenance_that_is_not_json_is_refused(tmp_path: Path) -> None:
    values: list[dict[Any, Any]] = [{"e": math.nan}, {"e": math.inf}, {"t": torch.ones(1)}, {"p": Path("x")}]
    for provenance in [*values, {1: 0, "a": 0}, {"n": nested(10**5)}]:
        with pytest.raises(GradlabError, match="the provenance is not plain JSON"):
            Artifact(Plan(()), provenance).save(tmp_path / "plan")
    assert os.listdir(tmp_path) == []


# --- damage ---------------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, whole: bytes) -> None:
    ends = {*range(40), *range(40, len(whole), 397), *range(len(whole) - 40, len(whole))}
    for end in sorted(ends):
        refused(tmp_path / "cut", whole[:end], "is not a whole safetensors file")


def test_a_longer_file_is_refused(tmp_path: Path, whole: bytes) -> None:
    refused(tmp_path / "long", whole + b"\0", "is not a whole safetensors file")
    refused(tmp_path / "twice", whole * 2, "is not a whole safetensors file")


def same_or_refused(path: Path, data: bytes) -> str:
    """What a damaged file does: "refused", or "same" where the damage means nothing. Anything else is a failure."""
    if (error := reason(path, data)) is not None:
        assert str(path) in error
        return "refused"
    loaded, expected = Artifact.load(path), golden_artifact()
    assert loaded.plan.digest == expected.plan.digest
    assert loaded.provenance == expected.provenance
    return "same"


def test_a_flipped_bit_is_refused_or_means_nothing(tmp_path: Path, whole: bytes) -> None:
    """At every 29th byte of the file one bit, never a plan that differs and never another exception."""
    bits, outcomes = random.Random(0), []
    places = range(len(whole)) if draws_all() else range(0, len(whole), 29)
    for position in places:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bits.randrange(8)
        outcomes.append(same_or_refused(tmp_path / "flipped", bytes(damaged)))
    assert outcomes.count("refused") > 0.98 * len(places)


@law(st.data(), examples=60)
def test_overwritten_runs_of_bytes_are_refused_or_mean_nothing(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.binary(min_size=1, max_size=24))
    damaged = whole[:start] + new + whole[start + len(new) :]
    same_or_refused(tmp_path_factory.getbasetemp() / "overwritten", damaged)


# --- foreign files --------------------------------------------------------------------------------------------------


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, tmp_path / ("x" * 300), tmp_path / "null\0byte"):
        with pytest.raises(GradlabError, match="no artifact at"):
            Artifact.load(path)


def test_a_pickle_is_not_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    refused(tmp_path / "plain", pickle.dumps(Bomb()), "is not a whole safetensors file")
    torch.save(Bomb(), tmp_path / "saved")
    refused(tmp_path / "saved", (tmp_path / "saved").read_bytes(), "is not a whole safetensors file")
    assert not (tmp_path / "exploded").exists()


def test_other_kinds_of_file_are_refused(tmp_path: Path) -> None:
    for data in (b"", b"{}", b"hello, world, this is text", b"\x89HDF\r\n\x1a\n" + b"\0" * 500, b"\0" * 64):
        refused(tmp_path / "foreign", data, "is not a")


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(3)}, tmp_path / "model", metadata=metadata)
        refused(tmp_path / "model", (tmp_path / "model").read_bytes(), "but not a gradlab artifact")


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header: 8 bytes of length, the JSON, the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_a_header_length_that_lies_is_refused(tmp_path: Path, whole: bytes) -> None:
    for length in (0, 1, 7, 10**6, 10**8, 2**31, 2**62, 2**63, 2**64 - 1):
        refused(tmp_path / "lying", struct.pack("<Q", length) + whole[8:], "is not a whole safetensors file")


ABSURD: list[tuple[Any, list[Any], list[int]]] = [  # dtype, shape, offsets of the data
    *(("F32", shape, [0, 16]) for shape in ([2**62, 2**62], [2**63 - 1, 2], [-4], [4.0], [1] * 5000 + [4])),
    ("F32", [2**40], [0, 2**42]),
    ("F32", [4], [0, 15]),
    ("F32", [4], [16, 0]),
    ("F32", [0, 2**60], [0, 0]),
    *((dtype, [16], [0, 16]) for dtype in ("F8_E4M3", "F8_E8M0", "BOOL")),
    *((dtype, [count], [0, 16]) for dtype, count in (("nonsense", 4), ("F4", 32), ("C64", 2), ("U16", 8))),
    ("F6_E2M3", [4], [0, 3]),
]


def test_absurd_tensors_are_refused(tmp_path: Path) -> None:
    """Under a header that expects no such tensor: before any plan is believed."""
    metadata = {"gradlab": sealed(json.loads(header_text(plan=Plan(()).to_json())))}
    assert reason(tmp_path / "sound", raw({"__metadata__": metadata})) is None
    entries: list[Any] = [{"dtype": dtype, "shape": shape, "data_offsets": place} for dtype, shape, place in ABSURD]
    for entry in [*entries, {"shape": [4]}, []]:
        end = entry["data_offsets"][1] if isinstance(entry, dict) and "data_offsets" in entry else 16
        refused(tmp_path / "absurd", raw({"__metadata__": metadata, "t": entry}, bytes(min(end, 16))))


# --- headers that are well formed but wrong -------------------------------------------------------------------------


def header_text(**fields: Any) -> str:
    """A gradlab header's text before it is sealed."""
    return json.dumps({"format": FORMAT, "sha256": {}, "origin": {}} | fields)


def sealed(header: dict[str, Any]) -> str:
    """The text with a right sha256 of its own, as an attacker or another version could write it."""
    rest = {key: value for key, value in header.items() if key != "header_sha256"}
    return canonical_json(rest | {"header_sha256": hashlib.sha256(canonical_json(rest).encode()).hexdigest()})


def rewritten(whole: bytes, change: Callable[[dict[str, Any]], None], seal: bool = True) -> bytes:
    """A sound file with its gradlab header changed, and sealed again unless asked not to."""
    (size,) = struct.unpack("<Q", whole[:8])
    outer = json.loads(whole[8 : 8 + size])
    header = json.loads(outer["__metadata__"]["gradlab"])
    change(header)
    outer["__metadata__"]["gradlab"] = sealed(header) if seal else json.dumps(header)
    return raw(outer, whole[8 + size :])


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.__setitem__(key, value)


def test_a_header_changed_and_sealed_again_is_believed(tmp_path: Path, whole: bytes) -> None:
    """The helper above makes files that load, so that the refusals below are due to the change."""
    loaded = load_bytes(tmp_path / "same", rewritten(whole, put("origin", {"method": "other"})))
    assert loaded.plan.digest == golden_artifact().plan.digest
    assert loaded.provenance == {"method": "other"}


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1, 10**30])
def test_another_format_is_refused(tmp_path: Path, whole: bytes, number: int) -> None:
    """Even one whose header this version could not check."""
    for seal in (True, False):
        data = rewritten(whole, put("format", number), seal)
        refused(tmp_path / "other", data, f"an artifact of format {number}, expected format 1: upgrade gradlab")


def test_a_header_that_does_not_match_its_sha256_is_refused(tmp_path: Path, whole: bytes) -> None:
    """Any setting changed by hand or by a bit: density 0.125 -> 0.25 would load as another plan."""

    def denser(header: dict[str, Any]) -> None:
        header["plan"]["groups"][2]["settings"]["density"] = 0.25

    refused(tmp_path / "changed", rewritten(whole, denser, seal=False), "header is damaged")
    refused(tmp_path / "bare", rewritten(whole, lambda h: h.pop("header_sha256"), seal=False), "header is damaged")
    refused(tmp_path / "typed", rewritten(whole, put("header_sha256", 3), seal=False), "header is damaged")
    refused(tmp_path / "nan", rewritten(whole, put("origin", {"e": float("nan")}), seal=False), "header is damaged")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", None), "names no format"),
        (put("format", "1"), "names no format"),
        (put("format", True), "names no format"),
        (put("sha256", None), "not those its header lists"),
        (put("sha256", {}), "not those its header lists"),
        (lambda h: h["sha256"].pop("stem::stem.weight/mean"), "not those its header lists"),
        (lambda h: h["sha256"].update({"stem::more": "0"}), "not those its header lists"),
        (
            lambda h: h["sha256"].update({"stem::stem.weight/mean": "0" * 64}),
            "tensor stem::stem.weight/mean is damaged",
        ),
        (lambda h: h["sha256"].update({"stem::stem.weight/mean": None}), "tensor stem::stem.weight/mean is damaged"),
        (put("plan", None), "not a plan"),
        (lambda h: h["plan"].pop("seed"), "not a plan"),
        (lambda h: h["plan"].update(fingerprint="0"), "fingerprint does not match"),
        (lambda h: h["plan"]["layers"].pop(), "fingerprint does not match"),
        (lambda h: h["plan"]["groups"].pop(0), "learned tensors for groups it does not have: stem"),
        (lambda h: h["plan"]["groups"][0].update(codec="topk", settings={}), "topk learns nothing"),
        (lambda h: h["plan"]["groups"][0].update(codec="os.system"), "no codec"),
        (lambda h: h["plan"]["groups"][2]["settings"].update(density=0), "topk: setting density = 0"),
        (lambda h: h["plan"]["groups"][2]["settings"].update(density=10**400), "topk: setting density = 1000"),
    ],
)
def test_a_sealed_header_that_makes_no_sense_is_refused(
    tmp_path: Path, whole: bytes, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    refused(tmp_path / "wrong", rewritten(whole, change), message)


def test_a_header_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    deep, long = "[" * 100_000, '{"format": ' + "9" * 5000 + "}"
    for texts, message in (
        (("", "not JSON", "{", deep, deep + "]" * 100_000, long), "is not JSON"),
        (("[]", "3", "null"), "is not a JSON object"),
        (("{}",), "names no format"),
    ):
        for text in texts:
            refused(tmp_path / "text", raw({"__metadata__": {"gradlab": text}}), message)


@pytest.mark.parametrize("depth", [100, 300, 900, 990, 2000, 20_000])
@pytest.mark.parametrize("where", ["plan", "layers", "groups", "settings", "origin"])
def test_deep_nesting_is_no_crash_wherever_it_stands(tmp_path: Path, depth: int, where: str) -> None:
    """Depths around the recursion limit, where reading may pass and writing, comparing or printing may not."""
    plan = Plan((Layer("w", (30, 30)),), (Group("w", ("w",), "topk"),)).to_json()
    if where == "settings":
        plan["groups"][0]["settings"] = {"density": "@"}
    fields = {"plan": "@" if where == "plan" else {**plan, where: "@"} if where in plan else plan}
    text = header_text(**fields, origin={"deep": "@"} if where == "origin" else {})
    texts = [text.replace('"@"', "[" * depth + "]" * depth)]
    with contextlib.suppress(RecursionError):
        texts.append(sealed(json.loads(texts[0])))
    for each in texts:
        error = reason(tmp_path / "deep", raw({"__metadata__": {"gradlab": each}}))
        # Within the limit a deep provenance, rightly sealed, is as good as any other.
        assert error is not None or (where == "origin" and each is not texts[0])
        assert error is None or (str(tmp_path / "deep") in error and len(error) < 1000)


def test_non_finite_learned_tensors_are_refused(tmp_path: Path, whole: bytes) -> None:
    """Sealed with right hashes: the numbers themselves are refused."""
    for bad in (torch.nan, torch.inf):
        mean = golden_artifact().plan.learned["stem"]["stem.weight/mean"].clone()
        old = mean.numpy().tobytes()
        mean[1, 2] = bad
        position = whole.index(old)
        data = whole[:position] + mean.numpy().tobytes() + whole[position + len(old) :]
        new_hash = {"stem::stem.weight/mean": hash_tensor(mean)}
        data = rewritten(data, lambda header, new=new_hash: header["sha256"].update(new))
        refused(tmp_path / "bad", data, "non-finite values in its basis or mean")
