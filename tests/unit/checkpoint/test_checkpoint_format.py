"""``state.json`` and ``manifest.json``: what goes in comes back, bit for bit, or is refused."""

import json
import math
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import drawbar.checkpoint
from drawbar.checkpoint.format import (
    Damaged,
    FileEntry,
    Manifest,
    OtherFormat,
    Unusable,
    decode_state,
    encode_state,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=20,
)


def bits(value):
    """The value with every float replaced by its bit pattern, so that -0.0, NaN and the last digit all count."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return value


@settings(max_examples=60)
@given(st.dictionaries(st.text(), json_values))
def test_state_comes_back_bit_for_bit(state):
    assert bits(decode_state(encode_state(state))) == bits(state)


def test_nan_infinities_and_tuples():
    state = {"nan": math.nan, "inf": [math.inf, -math.inf], "zero": -0.0, "betas": (0.9, 0.999), "tiny": 5e-324}
    assert bits(decode_state(encode_state(state))) == bits(state)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"groups": [{"lr": torch.tensor(0.1)}]}, "state.groups[0].lr is a Tensor"),
        ({"counts": {1: "a", "1": "b"}}, "state.counts has the key 1"),
        ({"seen": {1, 2}}, "state.seen is a set"),
        ({"path": Path("x")}, "state.path is a "),
    ],
)
def test_what_json_would_change_is_refused_with_its_place(state, place):
    with pytest.raises(TypeError, match=re.escape(place)):
        encode_state(state)


def manifest():
    return Manifest.of(7, {"state.json": FileEntry(size=3, sha256="ab" * 32)}, {})


def test_manifest_round_trip():
    assert Manifest.from_json(manifest().to_json()) == manifest()


@given(st.data())
def test_no_changed_byte_of_a_manifest_goes_unnoticed(data):
    text = bytearray(manifest().to_json())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = Manifest.from_json(bytes(text))
    except Unusable:
        return
    assert found == manifest()  # the byte stayed as it was, or was a blank between two fields


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b'{"sha256": 1}'])
def test_text_that_is_no_manifest(text):
    with pytest.raises(Damaged, match=r"manifest\.json"):
        Manifest.from_json(text)


def test_a_format_of_the_future_is_named():
    newer = manifest().model_copy(update={"format": 99, "drawbar": "9.0"})
    with pytest.raises(OtherFormat, match=r"format 99, from drawbar 9\.0"):
        Manifest.from_json(newer.to_json())
    with pytest.raises(OtherFormat):  # whatever its checksum may be
        Manifest.from_json(newer.to_json().replace(b'"sha256": "', b'"sha256": "f'))


def test_manifest_is_plain_json():
    fields = json.loads(manifest().to_json())
    assert fields["files"] == {"state.json": {"size": 3, "sha256": "ab" * 32}}
    assert fields["step"] == 7


def test_nothing_in_the_package_unpickles():
    sources = list(Path(drawbar.checkpoint.__file__).parent.glob("*.py"))
    assert len(sources) > 3
    for source in sources:
        assert not re.search(r"import (pickle|dill|shelve|marshal)|\btorch\.(load|save)\b|pickle\.", source.read_text())
