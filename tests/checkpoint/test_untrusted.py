"""A checkpoint from somebody else: nothing in it is executed, nothing outside it is read, whatever it claims.

Every file here is signed again, so that it verifies: the checks after the checksums have to hold.
"""

import json
import os
import pickle
import shutil
import struct

import pytest
import torch

from nsa.checkpoint.export import find_checkpoint, read_weights
from nsa.checkpoint.format import (
    INDEX_FILE,
    LEGACY_INDEX_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    _serialize_manifest,
    entry_of,
    verify,
)
from nsa.errors import CheckpointError
from nsa.train import train
from tests.checkpoint.helpers import RANDOM_FILE, SHARD, checkpoint_of, incidents_of, sign_again, small
from tests.checkpoint.malicious import Calls, malicious_pickles


@pytest.fixture
def checkpoint(crashed_run):
    """The newest of a run that crashed: the one that is loaded when it goes on."""
    return checkpoint_of(crashed_run, 4)


NAMES_OUTSIDE = [
    "../x",
    "/etc/passwd",
    "a/b",
    "",
    ".",
    "..",
    "a\\b",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "\ud800",
    MANIFEST_FILE,
]


@pytest.mark.parametrize("name", NAMES_OUTSIDE, ids=ascii)
def test_a_manifest_names_files_of_its_own_folder_only(name, checkpoint, crashed_run):
    (checkpoint.parent / "x").write_bytes(b"")
    entries = json.loads((checkpoint / MANIFEST_FILE).read_text())["files"]
    empty = vars(entry_of(checkpoint.parent / "x"))
    (checkpoint / MANIFEST_FILE).write_bytes(_serialize_manifest(entries | {name: empty}))
    with pytest.raises(CheckpointError, match="does not name a file in this folder"):
        verify(checkpoint)
    if name == NAMES_OUTSIDE[0]:
        train(small(), crashed_run)
        assert [incident["kind"] for incident in incidents_of(crashed_run)] == ["damaged_checkpoint"]


STRANGE_MANIFESTS = {
    "a list": _serialize_manifest([1]),
    "nothing": b"",
    "no files": b"{}",
    "a number": b"5",
    "nesting": b"[" * 100_000,
    "an endless size": _serialize_manifest({"a": {"bytes": float("inf"), "sha256": ""}}),
    "a size that is none": _serialize_manifest({"a": {"bytes": float("nan"), "sha256": ""}}),
    "a size of words": _serialize_manifest({"a": {"bytes": "many", "sha256": ""}}),
    "no size": _serialize_manifest({"a": {"sha256": ""}}),
    "binary": bytes(range(256)),
    "another version": _serialize_manifest({}, version=3),
}


@pytest.mark.parametrize("name", STRANGE_MANIFESTS)
def test_an_invalid_manifest_is_refused(name, checkpoint):
    (checkpoint / MANIFEST_FILE).write_bytes(STRANGE_MANIFESTS[name])
    with pytest.raises(CheckpointError, match=r"manifest\.json: "):
        verify(checkpoint)


def test_a_checkpoint_of_another_version_is_refused_with_its_version(checkpoint):
    sign_again(checkpoint, version=3)
    with pytest.raises(CheckpointError, match=r"manifest\.json: has version 3, this program reads versions 1 and 2"):
        verify(checkpoint)


@pytest.mark.parametrize("kind", [SHARD, INDEX_FILE, STATE_FILE, RANDOM_FILE])
def test_a_link_in_place_of_a_file_is_refused(kind, checkpoint, tmp_path):
    outside = tmp_path / "outside"
    shutil.move(checkpoint / kind, outside)
    (checkpoint / kind).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{kind}: is missing"):
        verify(checkpoint)
    with pytest.raises(CheckpointError, match=f"{kind}: is missing"):
        find_checkpoint(checkpoint)


def edited(file, **changes):
    """A file of JSON with values changed; a key may be a path such as progress.step."""

    def edit(content):
        value = json.loads(content)
        for key, new in changes.items():
            *parents, last = key.split("__")
            inner = value
            for part in parents:
                inner = inner[part]
            inner[last] = new
        return json.dumps(value).encode()

    return file, edit


def whole(file, content):
    return file, lambda _: content


STRANGE_STATES = {
    "a list": whole(STATE_FILE, b"[]"),
    "a number": whole(STATE_FILE, b"1"),
    "nested lists": whole(STATE_FILE, b"[" * 100_000),
    "nested objects": whole(STATE_FILE, b'{"a":' * 100_000),
    "an endless number": whole(STATE_FILE, b'{"version": ' + b"1" * 5000 + b"}"),
    "binary": whole(STATE_FILE, bytes(range(256))),
    "empty": whole(STATE_FILE, b""),
    "another version": edited(STATE_FILE, version=2),
    "a version of words": edited(STATE_FILE, version="1"),
    "progress that is a list": edited(STATE_FILE, progress=[1]),
    "progress with a stranger": edited(STATE_FILE, progress__zzz=1),
    "a step of another checkpoint": edited(STATE_FILE, progress__step=5),
    "a step beyond all": edited(STATE_FILE, progress__step=10**30),
    "tokens beyond all": edited(STATE_FILE, progress__tokens=10**30),
    "a step that is a word": edited(STATE_FILE, progress__step="four"),
    "a step that is nothing": edited(STATE_FILE, progress__step=None),
    "a step that is a fraction": edited(STATE_FILE, progress__step=1.5),
    "a step that is a truth": edited(STATE_FILE, progress__step=True),
    "a cursor before the data": edited(STATE_FILE, progress__sequences=-8),
    "a loss that is a word": edited(STATE_FILE, progress__best_val_loss="low"),
    "a loss scale that is nothing": edited(STATE_FILE, loss_scale=None),
    "a loss scale that is a word": edited(STATE_FILE, loss_scale__value="large"),
    "endlessly many clean steps": edited(STATE_FILE, loss_scale__clean_steps=float("inf")),
    "random state that is a list": whole(RANDOM_FILE, b"[]"),
    "random state of torch that is empty": edited(RANDOM_FILE, torch=""),
    "random state of torch that is no hex": edited(RANDOM_FILE, torch="zz"),
    "random state of torch that is short": edited(RANDOM_FILE, torch="00"),
    "random state of Python that is short": edited(RANDOM_FILE, python=[3, [1], None]),
    "random state of Python that is large": edited(RANDOM_FILE, python=[3, [2**80] * 625, None]),
    "random state of numpy that is large": edited(RANDOM_FILE, numpy__state__key=[2**40] * 624),
    "random state of numpy far out": edited(RANDOM_FILE, numpy__state__pos=2**70),
    "another generator of numpy": edited(RANDOM_FILE, numpy__bit_generator="os.system"),
}


@pytest.mark.parametrize("name", STRANGE_STATES)
def test_a_state_that_cannot_be_is_a_checkpoint_error(name, checkpoint, crashed_run):
    file, edit = STRANGE_STATES[name]
    (checkpoint / file).write_bytes(edit((checkpoint / file).read_bytes()))
    sign_again(checkpoint)
    verify(checkpoint)
    with pytest.raises(CheckpointError) as raised:
        train(small(), crashed_run)
    assert raised.value.exit_code == 4


def spell_safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one_tensor(dtype="F32", shape=(4, 4), offsets=(0, 64)):
    return spell_safetensors({"weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, bytes(64))


MALICIOUS_WEIGHTS = {
    "a pickle with code": pickle.dumps(Calls(os.system, "touch proof")),
    "nothing": b"",
    "a header beyond the file": struct.pack("<Q", 2**62) + b"{}",
    "a nested header": spell_safetensors(b'{"a":' * 100_000),
    "a header that is a list": spell_safetensors(b"[" * 100_000),
    "a binary header": spell_safetensors(bytes(range(128, 256))),
    "data beyond the file": one_tensor(offsets=(0, 2**40)),
    "data from the end to the start": one_tensor(offsets=(64, 0)),
    "a shape beyond all memory": one_tensor(shape=(2**40, 2**40)),
    "a negative shape": one_tensor(shape=(-4, -4)),
    "an unknown type": one_tensor(dtype="os.system"),
    "a type that torch has not": one_tensor(dtype="F6_E2M3"),
    "a tensor of another model": one_tensor(),
}


@pytest.mark.parametrize("name", MALICIOUS_WEIGHTS)
def test_malicious_weights_to_start_from_are_a_checkpoint_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(MALICIOUS_WEIGHTS[name])
    with pytest.raises(CheckpointError, match=r"train\.init_from: .*model\.safetensors: "):
        train(small(f"train.init_from={path}"), tmp_path / "run")
    assert not (tmp_path / "proof").exists()
    assert not (tmp_path / "run" / "training.csv").exists()


def test_a_pickle_is_not_read_beside_an_index(checkpoint, tmp_path):
    """A checkpoint of this version has no pickle: one that lies there is not opened."""
    proof = tmp_path / "proof"
    before = read_weights(checkpoint)
    (checkpoint / LEGACY_INDEX_FILE).write_bytes(malicious_pickles(proof)["os.system"])
    sign_again(checkpoint)
    assert all(torch.equal(tensor, before[name]) for name, tensor in read_weights(checkpoint).items())
    assert not proof.exists()


def set_in(*path):
    """A change to the index: the last of `path` becomes the value there."""

    def change(index):
        *parents, key, value = path
        for part in parents:
            index = index[part]
        index[key] = value

    return change


NAME = "model/embedding.weight"  # 256 x 16, in one chunk
CHUNK = ("tensors", NAME, "chunks", 0)
HALF = {"file": SHARD, "offset": [0, 0], "shape": [128, 16]}
INDEXES_THAT_LIE = {
    "a shard in the folder above": (set_in(*CHUNK, "file", "../x"), "not in the manifest"),
    "a shard anywhere": (set_in(*CHUNK, "file", "/etc/passwd"), "not in the manifest"),
    "a shard that the manifest does not list": (set_in(*CHUNK, "file", "unlisted"), "not in the manifest"),
    "a shard whose name is a list": (set_in(*CHUNK, "file", ["x"]), "not in the manifest"),
    "a file that is not a shard": (set_in(*CHUNK, "file", STATE_FILE), "places .* bytes into state.json"),
    "a shape of words": (set_in("tensors", NAME, "shape", "large"), "not a list of integers"),
    "a shape of fractions": (set_in("tensors", NAME, "shape", [256.0, 16]), "not a list of integers"),
    "a shape beyond its parts": (set_in("tensors", NAME, "shape", [2**40, 2**10]), "are not the whole tensor"),
    "a negative shape": (set_in("tensors", NAME, "shape", [-256, -16]), "are not the whole tensor"),
    "a tensor without parts": (set_in("tensors", NAME, "chunks", []), "are not the whole tensor"),
    "a number of parts": (set_in("tensors", NAME, "chunks", 5), "not the index of a checkpoint"),
    "half a tensor": (set_in("tensors", NAME, "chunks", [HALF]), "are not the whole tensor"),
    "a half twice": (set_in("tensors", NAME, "chunks", [HALF, HALF]), "are not the whole tensor"),
    "a part outside the tensor": (set_in(*CHUNK, "offset", [256, 0]), "are not the whole tensor"),
    "a part of fewer dimensions": (set_in(*CHUNK, "offset", [0]), "are not the whole tensor"),
    "an unknown type": (set_in("tensors", NAME, "dtype", "system"), "is not the name of a torch.dtype"),
    "a type that is a number": (set_in("tensors", NAME, "dtype", 5), "not the index of a checkpoint"),
    "another type": (set_in("tensors", NAME, "dtype", "int32"), "another shape or type than in the index"),
    "a tensor that no shard has": (
        lambda index: index["tensors"].update({"model/x": index["tensors"][NAME]}),
        "shard_rank0.safetensors",
    ),
    "tensors that are a list": (set_in("tensors", []), "not the index of a checkpoint"),
    "another version": (set_in("version", 2), "has version 2, this program reads version 1"),
}


@pytest.mark.parametrize("name", INDEXES_THAT_LIE)
def test_an_index_that_lies_is_refused(name, checkpoint):
    """Some would read files outside, and some would leave weights that nobody wrote."""
    change, message = INDEXES_THAT_LIE[name]
    path = checkpoint / INDEX_FILE
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    (checkpoint.parent / "x").write_bytes((checkpoint / SHARD).read_bytes())
    sign_again(checkpoint)
    (checkpoint / "unlisted").write_bytes((checkpoint / SHARD).read_bytes())
    with pytest.raises(CheckpointError, match=message):
        read_weights(checkpoint)


STRANGE_INDEXES = {
    "nothing": b"",
    "a list": b"[]",
    "nesting": b"[" * 100_000,
    "an endless number": b'{"version": ' + b"1" * 5000 + b"}",
    "binary": bytes(range(256)),
    "a pickle": pickle.dumps({"version": 1, "tensors": {}}),
}


@pytest.mark.parametrize("name", STRANGE_INDEXES)
def test_a_file_that_is_not_an_index_is_refused(name, checkpoint, crashed_run):
    (checkpoint / INDEX_FILE).write_bytes(STRANGE_INDEXES[name])
    sign_again(checkpoint)
    with pytest.raises(CheckpointError, match=r"index\.json: is not the index of a checkpoint"):
        read_weights(checkpoint)
    with pytest.raises(CheckpointError, match=r"index\.json: is not the index of a checkpoint"):
        train(small(), crashed_run)


@pytest.mark.parametrize("name", [name for name in MALICIOUS_WEIGHTS if name != "nothing"])
def test_a_malicious_shard_is_refused(name, checkpoint, crashed_run):
    content = MALICIOUS_WEIGHTS[name]
    size = (checkpoint / SHARD).stat().st_size
    (checkpoint / SHARD).write_bytes(content + bytes(max(0, size - len(content))))
    sign_again(checkpoint)
    with pytest.raises(CheckpointError, match=r"shard_rank0\.safetensors"):
        read_weights(checkpoint)
    with pytest.raises(CheckpointError, match=r"shard_rank0\.safetensors"):
        train(small(), crashed_run)
