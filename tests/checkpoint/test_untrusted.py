"""A checkpoint from somebody else: nothing in it is executed, nothing outside it is read, whatever it claims.

Every file here is signed again, so that it verifies: the guards behind the checksums have to hold.
"""

import builtins
import enum
import functools
import io
import json
import os
import pickle
import shutil
import struct
import subprocess

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.serialization import _get_layout

from nsa.checkpoint.export import find_checkpoint, find_weights, load_weights, read_weights
from nsa.checkpoint.format import MANIFEST_FILE, METADATA_FILE, STATE_FILE, _serialize_manifest, entry_of, verify
from nsa.checkpoint.load import _Reader
from nsa.errors import CheckpointError
from nsa.nn.model import build_model
from nsa.train import train
from tests.checkpoint.helpers import RANDOM_FILE, SHARD, checkpoint_of, incidents_of, sign_again, small

DCP = b"ctorch.distributed.checkpoint.metadata\n"


@pytest.fixture
def checkpoint(crashed_run):
    """The newest of a run that crashed: the one that is loaded when it goes on."""
    return checkpoint_of(crashed_run, 4)


class Calls:
    """Pickled, it asks whoever loads it to call `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def malicious_pickles(proof):
    """What would each create the file `proof`, or change the process, if it were simply unpickled."""
    touch = f"touch {proof}"
    wrapped = dcp.Metadata({"model/weight": Calls(os.system, touch)}, storage_data={})
    return {
        "os.system": pickle.dumps(Calls(os.system, touch)),
        "os.system inside the metadata": pickle.dumps(wrapped),
        "in the oldest protocol": pickle.dumps(Calls(os.system, touch), protocol=0),
        "subprocess": pickle.dumps(Calls(subprocess.check_output, ["touch", str(proof)])),
        "eval": pickle.dumps(Calls(eval, f"open({str(proof)!r}, 'w')")),
        "exec": pickle.dumps(Calls(exec, f"open({str(proof)!r}, 'w')")),
        "open": pickle.dumps(Calls(open, str(proof), "w")),
        "getattr": pickle.dumps(Calls(getattr, dcp.Metadata, "__init__")),
        "getattr of an enumeration": pickle.dumps(Calls(getattr, dcp._MEM_FORMAT_ENCODING, "__init__")),
        "getattr of something built": pickle.dumps(Calls(getattr, Calls(os.system, touch), "real")),
        "getattr with a default": pickle.dumps(
            Calls(getattr, dcp._MEM_FORMAT_ENCODING, "x", dcp._MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT)
        ),
        "import": pickle.dumps(Calls(builtins.__import__, "no_such_module")),
        "functools.partial": pickle.dumps(functools.partial(os.system, touch)),
        "torch.load": pickle.dumps(Calls(torch.load, str(proof))),
        "torch.save": pickle.dumps(Calls(torch.save, {}, str(proof))),
        "through a dotted name": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x02os\x93.",
        "through an attribute of a listed type": (
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x1dMetadata.__init__.__globals__\x93."
        ),
        "an unlisted class of a listed module": DCP + b"StatefulT\n.",
        "an instance of the old kind": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "an extension code": b"\x82\x01.",
        "a persistent id": b"Pwhatever\n.",
        "no pickle": b"#!/bin/sh\ntouch " + str(proof).encode(),
        "nothing": b"",
        "cut": pickle.dumps(Calls(os.system, touch))[:-3],
        "endless nesting": b"(" * 100_000,
        "another object": pickle.dumps({"state_dict_metadata": {}}),
    }


NAMES = list(malicious_pickles("proof"))


class OldPickler(pickle.Pickler):
    """Members of enumerations as Python 3.11.0 to 3.11.3 pickle them."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_that_an_older_python_wrote_is_read(checkpoint):
    path, written = checkpoint / METADATA_FILE, io.BytesIO()
    before = _Reader(checkpoint).read_metadata()
    OldPickler(written).dump(pickle.loads(path.read_bytes()))
    assert b"getattr" in written.getvalue()
    path.write_bytes(written.getvalue())
    sign_again(checkpoint)
    assert _Reader(checkpoint).read_metadata() == before


@pytest.mark.parametrize("name", NAMES)
def test_no_code_in_the_metadata_is_run(name, checkpoint, crashed_run, tmp_path):
    proof = tmp_path / "proof"
    (checkpoint / METADATA_FILE).write_bytes(malicious_pickles(proof)[name])
    sign_again(checkpoint)
    verify(checkpoint)
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        read_weights(checkpoint)
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        train(small(), crashed_run)
    assert not proof.exists()


def test_the_malicious_files_would_do_harm_to_a_plain_pickle_load(tmp_path):
    """So that the test above does not pass because its files are broken."""
    proof = tmp_path / "proof"
    harmful = ["os.system", "os.system inside the metadata", "in the oldest protocol", "subprocess", "eval", "exec"]
    for name in [*harmful, "open", "torch.save", "an instance of the old kind"]:
        pickle.loads(malicious_pickles(proof)[name])
        assert proof.exists(), name
        proof.unlink()


CHANGES_TO_THE_PROCESS = {
    "a class": DCP + b"Metadata\n(N}S'version'\nS'changed'\nstb.",
    "a function": b"ctorch.serialization\n_get_layout\n}S'cache'\n}S'torch.strided'\nI5\nssb.",
    "a member of an enum": DCP + b"_MEM_FORMAT_ENCODING\n(I0\ntR}S'_value_'\nI5\nsb.",
}


@pytest.mark.parametrize("target", CHANGES_TO_THE_PROCESS)
def test_metadata_cannot_change_what_was_there_before(target, checkpoint):
    """A pickle may set attributes of whatever it names, for the whole process: of torch's own classes too."""
    (checkpoint / METADATA_FILE).write_bytes(CHANGES_TO_THE_PROCESS[target])
    sign_again(checkpoint)
    with pytest.raises(CheckpointError, match="refused: it changes something that was there before"):
        read_weights(checkpoint)
    assert dcp.Metadata.version is None
    assert _get_layout.cache.get("torch.strided", torch.strided) is torch.strided
    assert dcp._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value == 0


NESTED = b")" + 60 * b"2\x86"  # a pair of the pair before, sixty times: its hash or its text would never be done
INDEX = DCP + b"MetadataIndex\n)\x81}S'fqn'\n"
ENDLESS_PICKLES = {
    "a nested key": b"\x80\x04}" + NESTED + b"Ns.",
    "a nested key among several": b"\x80\x04}(" + NESTED + b"Nu.",
    "a nested key of the old kind": b"(" + NESTED + b"Nd.",
    "a nested index as key": b"}" + INDEX + NESTED + b"sbNs.",
    "an index as key of an index": b"}" + INDEX + INDEX + b"NsbsbNs.",
    "a set": b"\x80\x04\x8f(" + NESTED + b"\x90.",
    "a frozen set": b"\x80\x04(" + NESTED + b"\x91.",
    "a layout of that name": b"ctorch.serialization\n_get_layout\n" + NESTED + b"\x85R.",
    "a member of an enum": DCP + b"_MEM_FORMAT_ENCODING\n" + NESTED + b"\x85R.",
    "a new object": DCP + b"_MEM_FORMAT_ENCODING\n" + NESTED + b"\x85\x81.",
    "properties of a tensor": DCP + b"TensorProperties\n)\x81(NNN" + NESTED + b"Ntb.",
    "64 GiB": b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b".",
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", ENDLESS_PICKLES)
def test_metadata_that_would_compute_for_ever_is_refused(name, checkpoint):
    (checkpoint / METADATA_FILE).write_bytes(ENDLESS_PICKLES[name])
    sign_again(checkpoint)
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: "):
        read_weights(checkpoint)


def first_tensor(metadata):
    return metadata.state_dict_metadata["model/embedding.weight"]


def every_shard(metadata):
    return metadata.storage_data.values()


def add_bytes_entry(metadata):
    metadata.state_dict_metadata["model/extra"] = dcp.BytesStorageMetadata()


def replace_by_bytes_entry(metadata):
    metadata.state_dict_metadata["model/embedding.weight"] = dcp.BytesStorageMetadata()


def set_on(select, attribute, value):
    """A change to the metadata: `attribute` of all that `select` finds becomes `value`."""

    def change(metadata):
        found = select(metadata)
        for target in [found] if isinstance(found, dcp.TensorStorageMetadata) else found:
            setattr(target, attribute, value)

    return change


LYING_METADATA = {
    "an entry of bytes beside the tensors": (add_bytes_entry, "is no tensor; such entries are refused"),
    "an entry of bytes instead of a tensor": (replace_by_bytes_entry, "is no tensor; such entries are refused"),
    "a name that is no text": (lambda m: m.state_dict_metadata.update({5: first_tensor(m)}), "is no tensor"),
    "a shard in the folder above": (set_on(every_shard, "relative_path", "../x"), "not in the manifest"),
    "a shard anywhere": (set_on(every_shard, "relative_path", "/etc/passwd"), "not in the manifest"),
    "a shard beside the manifest's": (set_on(every_shard, "relative_path", "unlisted"), "not in the manifest"),
    "a shard without a name": (set_on(every_shard, "relative_path", None), "not in the manifest"),
    "a shard whose name is a list": (set_on(every_shard, "relative_path", ["x"]), "not in the manifest"),
    "a shard that is no shard": (set_on(every_shard, "relative_path", STATE_FILE), "cannot be loaded: "),
    "a shard beyond its file": (set_on(every_shard, "offset", 2**40), "cannot be loaded: "),
    "a shard before its file": (set_on(every_shard, "offset", -1), "cannot be loaded: "),
    "a transformation": (set_on(every_shard, "transform_descriptors", ("zstd",)), "asks for a transformation"),
    "no shards": (lambda m: m.storage_data.clear(), "cannot be loaded: "),
    "a size that is none": (set_on(first_tensor, "size", "large"), "are not the whole tensor"),
    "a size beyond all memory": (set_on(first_tensor, "size", torch.Size([2**40, 2**10])), "are not the whole tensor"),
    "a negative size": (set_on(first_tensor, "size", torch.Size([-256, -16])), "are not the whole tensor"),
    "a tensor without parts": (set_on(first_tensor, "chunks", []), "are not the whole tensor"),
    "parts that are none": (set_on(first_tensor, "chunks", None), "are not the whole tensor"),
    "half a tensor": (
        set_on(first_tensor, "chunks", [dcp.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([128, 16]))]),
        "are not the whole tensor",
    ),
    "a part beside the tensor": (
        set_on(first_tensor, "chunks", [dcp.ChunkStorageMetadata(torch.Size([256, 16]), torch.Size([256, 16]))]),
        "are not the whole tensor",
    ),
}


@pytest.mark.parametrize("name", LYING_METADATA)
def test_metadata_that_lies_is_refused(name, checkpoint):
    """Some of it would read files outside, and some would leave weights that nobody ever wrote."""
    change, message = LYING_METADATA[name]
    metadata = pickle.loads((checkpoint / METADATA_FILE).read_bytes())
    change(metadata)
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    (checkpoint.parent / "x").write_bytes((checkpoint / SHARD).read_bytes())
    sign_again(checkpoint)
    verify(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        read_weights(checkpoint)


def test_a_shard_that_is_beside_the_manifest_is_refused_although_it_is_there(checkpoint):
    metadata = pickle.loads((checkpoint / METADATA_FILE).read_bytes())
    set_on(every_shard, "relative_path", "unlisted")(metadata)
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    sign_again(checkpoint)
    (checkpoint / "unlisted").write_bytes((checkpoint / SHARD).read_bytes())
    verify(checkpoint)
    with pytest.raises(CheckpointError, match="points to a file that is not in the manifest"):
        read_weights(checkpoint)


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
    with pytest.raises(CheckpointError, match="is no name of a file in this folder"):
        verify(checkpoint)
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
    "another version": _serialize_manifest({}).replace(b'"version": 1', b'"version": 2'),
}


@pytest.mark.parametrize("name", STRANGE_MANIFESTS)
def test_a_manifest_that_is_none_is_refused(name, checkpoint):
    (checkpoint / MANIFEST_FILE).write_bytes(STRANGE_MANIFESTS[name])
    with pytest.raises(CheckpointError, match=r"manifest\.json: "):
        verify(checkpoint)


def test_a_checkpoint_of_another_version_is_refused_with_its_version(checkpoint):
    path = checkpoint / MANIFEST_FILE
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(CheckpointError, match=r"manifest\.json: has version 2, this program reads version 1"):
        verify(checkpoint)


def test_a_shard_with_code_in_it_is_not_run(checkpoint, crashed_run, tmp_path):
    proof = tmp_path / "proof"
    content = io.BytesIO()
    torch.save(Calls(os.system, f"touch {proof}"), content)
    (checkpoint / SHARD).write_bytes(content.getvalue())
    metadata = pickle.loads((checkpoint / METADATA_FILE).read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(content.getvalue())
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    sign_again(checkpoint)
    verify(checkpoint)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*[Ww]eights.only") as refused:
        read_weights(checkpoint)
    assert "False" not in str(refused.value), "no advice to load it all the same"
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*[Ww]eights.only"):
        train(small(), crashed_run)
    assert not proof.exists()
    content.seek(0)
    torch.load(content, weights_only=False)
    assert proof.exists(), "the file is as bad as it should be"


@pytest.mark.parametrize("kind", [SHARD, METADATA_FILE, STATE_FILE, RANDOM_FILE])
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


def test_a_malicious_checkpoint_to_start_from_is_refused_too(checkpoint, tmp_path):
    proof = tmp_path / "proof"
    (checkpoint / METADATA_FILE).write_bytes(malicious_pickles(proof)["os.system"])
    sign_again(checkpoint)
    config = small()
    with pytest.raises(CheckpointError, match="which no checkpoint of ours needs"):
        load_weights(build_model(config.model, config.nsa, 256, seed=0), find_weights(checkpoint))
    assert not proof.exists()
