"""The manifest of a checkpoint: what it says is read back, anything else is refused."""

from __future__ import annotations

import json
import pickle
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from lowtide.saving import CheckpointError, checksums, manifest, metadata

names = st.text(min_size=1, max_size=8).filter(
    lambda name: (
        name not in (".", "..", manifest.FILE_NAME)
        and "/" not in name
        and "\0" not in name
        and name.isprintable()
    )
)
numbers = st.integers(0, 2**63 - 1)


@st.composite
def files(draw: st.DrawFn, algorithm: str) -> manifest.File:
    digits = checksums.DIGITS[algorithm]
    sums = st.text("0123456789abcdef", min_size=digits, max_size=digits)
    items, begin = [], 0
    for name in draw(st.lists(st.text(max_size=8), max_size=4)):
        length = draw(st.integers(0, 1000))
        items.append(manifest.Item(name, begin, length, draw(sums)))
        begin += length
    return manifest.File(begin, draw(sums), tuple(items))


@st.composite
def manifests(draw: st.DrawFn) -> manifest.Manifest:
    algorithm = draw(st.sampled_from([*checksums.DIGITS]))
    content = draw(st.dictionaries(names, files(algorithm), max_size=3))
    content[manifest.METADATA] = draw(files(algorithm))
    return manifest.Manifest(draw(numbers), draw(numbers), content, algorithm)


@given(manifests())
def test_what_is_written_is_read(written):
    assert manifest.parse(manifest.to_bytes(written), "it") == written


OF_VERSION_1 = (
    b'{"checksum":"crc32","crc32":747631873,"files":{".metadata":{"crc32":4,"items":[],'
    b'"length":5},"__0_0.distcp":{"crc32":3,"items":[["a",0,3,1],["b",3,4,4294967295]],'
    b'"length":7}},"format":"lowtide checkpoint","order":1,"version":1,"world_size":2}'
)


def test_version_1_is_read():
    items = manifest.Item("a", 0, 3, "00000001"), manifest.Item("b", 3, 4, "ffffffff")
    content = {
        "__0_0.distcp": manifest.File(7, "00000003", items),
        manifest.METADATA: manifest.File(5, "00000004"),
    }
    expected = manifest.Manifest(1, 2, content, checksums.CRC32)
    assert manifest.parse(OF_VERSION_1, "it") == expected


@pytest.mark.parametrize("key", ["version", "checksum"])
def test_what_a_later_lowtide_saved_is_not_called_damaged(key):
    body = json.loads(manifest.to_bytes(sample()))
    del body["crc32"]
    body[key] = {"version": 3, "checksum": "blake3"}[key]
    with pytest.raises(CheckpointError, match="the lowtide that saved it.$"):
        manifest.parse(vouched(body), "it")


@given(manifests(), st.data())
def test_no_byte_may_differ(written, data):
    before = manifest.to_bytes(written)
    at = data.draw(st.integers(0, len(before) - 1))
    after = bytearray(before)
    after[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError, match="^lowtide: load: it: expected"):
        manifest.parse(bytes(after), "it")


@given(manifests(), st.data())
def test_none_may_be_missing(written, data):
    before = manifest.to_bytes(written)
    with pytest.raises(CheckpointError, match="^lowtide: load: it: expected"):
        manifest.parse(before[: data.draw(st.integers(0, len(before) - 1))], "it")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=6,
)


def vouched(body: object) -> bytes:
    """Whoever wrote it computed the checksum, too."""
    assert isinstance(body, dict)
    dumped = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "crc32": zlib.crc32(dumped)}).encode()


@given(st.sampled_from(["order", "world_size", "files", "checksum"]), values)
@settings(max_examples=200)
def test_no_value_of_another_kind_is_taken(key, value):
    body = json.loads(manifest.to_bytes(sample()))
    del body["crc32"]
    if body[key] == value and type(body[key]) is type(value):
        return
    body[key] = value
    numbers = key in ("order", "world_size")
    if numbers and type(value) is int and 0 <= value < 2**63:
        return
    with pytest.raises(CheckpointError, match="^lowtide: load: it: expected"):
        manifest.parse(vouched(body), "it")


@given(values, st.sampled_from(["items", "length", "checksum", None]), st.booleans())
@settings(max_examples=300)
def test_no_file_of_another_kind_is_taken(value, key, old):
    body = json.loads(OF_VERSION_1 if old else manifest.to_bytes(sample()))
    del body["crc32"]
    known = body["files"]["__0_0.distcp"]
    if old and key == "checksum":
        key = "crc32"
        if type(value) is int and 0 <= value < 2**63:
            return
    if key is None:
        body["files"]["__0_0.distcp"] = value
    elif key == "items" and value == []:
        return  # of a file that is known as a whole
    else:
        known[key] = value
    with pytest.raises(CheckpointError, match="^lowtide: load: it: expected"):
        manifest.parse(vouched(body), "it")


def sample() -> manifest.Manifest:
    items = (manifest.Item("a", 0, 3, 16 * "1"), manifest.Item("b", 3, 4, 16 * "2"))
    content = {
        "__0_0.distcp": manifest.File(7, 16 * "3", items),
        manifest.METADATA: manifest.File(5, 16 * "4"),
    }
    return manifest.Manifest(1, 2, content)


@pytest.mark.parametrize("name", ["", "..", "../it", "/etc/passwd", "a/b", "a\0b"])
def test_no_file_of_another_folder_is_named(name):
    body = json.loads(manifest.to_bytes(sample()))
    del body["crc32"]
    body["files"][name] = {"length": 0, "checksum": 16 * "0", "items": []}
    with pytest.raises(CheckpointError, match="names of files in its own folder"):
        manifest.parse(vouched(body), "it")


def test_no_gap_between_items_and_no_key_twice():
    body = json.loads(manifest.to_bytes(sample()))
    del body["crc32"]
    body["files"]["__0_0.distcp"]["items"][1][1] = 4
    with pytest.raises(CheckpointError, match="expected 'b' in __0_0.distcp to begin"):
        manifest.parse(vouched(body), "it")
    data = manifest.to_bytes(sample())
    twice = data.replace(b'"order":1', b'"order":1,"order":1')
    with pytest.raises(CheckpointError, match="a key that comes twice"):
        manifest.parse(twice, "it")


# Of no bytes and of "a", as the algorithms' authors have them.
KNOWN = {
    checksums.CRC32: ("00000000", "e8b7be43"),
    checksums.XXH3: ("2d06800538d394c2", "e6c632b61e964e1f"),
}


@pytest.mark.parametrize("algorithm", checksums.DIGITS)
def test_checksums_are_those_of_their_names(algorithm):
    found = checksums.of(algorithm, b""), checksums.of(algorithm, b"a")
    assert found == KNOWN[algorithm]
    data, in_parts = bytes(range(250)) * 9, checksums.new(algorithm)
    for part in (data[:7], memoryview(data)[7:900], data[900:]):
        in_parts.update(part)
    assert in_parts.hexdigest() == checksums.of(algorithm, data)


# -- torch's own metadata -------------------------------------------------------------


class Runs:
    def __init__(self, function: object, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> object:
        return self._call


HOSTILE = {
    "a call": Runs(print, "ran"),
    "inside": Metadata({}, storage_data={"a": Runs(exec, "raise SystemExit")}),
    "not metadata": {"a": 1},
    "no places": Metadata({}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_metadata_that_is_none_is_refused(what, capsys):
    with pytest.raises(CheckpointError, match="expected the metadata of a distrib"):
        metadata.parse(pickle.dumps(HOSTILE[what]), "it")
    assert capsys.readouterr().out == ""


def test_no_attribute_of_a_class_is_reached():
    """A name with dots leads from a class that is let in to whatever it imports."""
    for name in ("Metadata.__init__", "os"):
        with pytest.raises(CheckpointError, match=f"metadata.{name}"):
            metadata.parse(
                _class_named("torch.distributed.checkpoint.metadata", name), ""
            )


def _class_named(module: str, name: str) -> bytes:
    """A pickle of no more than that."""
    texts = (b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + b"".join(texts) + b"\x93."


@given(st.binary(max_size=200))
def test_no_bytes_are_metadata(data):
    with pytest.raises(CheckpointError):
        metadata.parse(data, "it")
