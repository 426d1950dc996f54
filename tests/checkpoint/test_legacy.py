"""Checkpoints of version 0.1 are still read, whichever torch wrote them, and a hostile one does no harm.

Hostile files are signed again, so that the manifest verifies: the checks after the checksums have to hold.
"""

import enum
import io
import os
import pickle
import shutil
import struct
import tarfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.serialization import _get_layout

from nsa.checkpoint.export import read_weights
from nsa.checkpoint.format import LEGACY_INDEX_FILE, STATE_FILE, verify
from nsa.checkpoint.restore import saved_shapes
from nsa.config import load_config
from nsa.errors import CheckpointError
from nsa.train import train
from tests.checkpoint.helpers import (
    checkpoint_of,
    incidents_of,
    metrics_of,
    rows_of,
    saved_steps,
    sign_again,
)
from tests.checkpoint.malicious import DCP, Calls, malicious_pickles

SHARD = "__0_0.distcp"
# Each run was saved at step 3 of 6: its folder in the archive, the losses of the steps before the save, and those of
# the run that was not interrupted, on the machine that recorded it. Other machines round differently.
RECORDED = {
    "recorded_v1.tar.xz": {
        "run": (
            [5.639362335205078, 5.367832183837891, 5.2165422439575195],
            [4.9815897941589355, 5.0449113845825195, 4.792630672454834],
        )
    },
    "recorded_v1_torch.tar.xz": {  # two ranks of FSDP; one process with torch 2.15, whose index has a field more
        "fsdp": (
            [5.537109375, 5.243838310241699, 4.931893348693848],
            [4.741051197052002, 4.575714588165283, 4.5642409324646],
        ),
        "torch_2_15": (
            [5.537109375, 5.243837833404541, 4.931893825531006],
            [4.741051197052002, 4.575714588165283, 4.5642409324646],
        ),
    },
}
RUNS = [(archive, name) for archive, runs in RECORDED.items() for name in runs]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Every recorded run by name, unpacked. Nobody writes into them."""
    folder = tmp_path_factory.mktemp("recorded")
    for archive in RECORDED:
        with tarfile.open(Path(__file__).with_name(archive)) as opened:
            opened.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(("archive", "name"), RUNS)
def test_a_run_of_the_version_before_is_resumed(archive, name, recorded, tmp_path):
    folder = shutil.copytree(recorded / name, tmp_path / "run")
    assert saved_steps(folder) == [3]
    train(load_config(folder / "config.yaml"), folder, accept_changes=True)  # FSDP there, one process here
    assert metrics_of(folder)["status"] == "done"
    assert not incidents_of(folder)
    losses = [float(row["loss"]) for row in rows_of(folder)]
    before, after = RECORDED[archive][name]
    assert losses[:3] == before
    assert losses[3:] == pytest.approx(after, rel=1e-4)


@pytest.fixture
def run(recorded, tmp_path):
    return shutil.copytree(recorded / "run", tmp_path / "legacy")


@pytest.fixture
def checkpoint(run):
    return checkpoint_of(run, 3)


def sign(checkpoint):
    sign_again(checkpoint, version=1)


NAMES = list(malicious_pickles("proof"))


class OldPickler(pickle.Pickler):
    """Members of enumerations as Python 3.11.0 to 3.11.3 pickle them."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_that_an_older_python_wrote_is_read(checkpoint):
    path, written = checkpoint / LEGACY_INDEX_FILE, io.BytesIO()
    before = saved_shapes(checkpoint)
    OldPickler(written).dump(pickle.loads(path.read_bytes()))
    assert b"getattr" in written.getvalue()
    path.write_bytes(written.getvalue())
    sign(checkpoint)
    assert saved_shapes(checkpoint) == before


@pytest.mark.parametrize("name", NAMES)
def test_no_code_in_the_metadata_is_run(name, checkpoint, run, tmp_path):
    proof = tmp_path / "proof"
    (checkpoint / LEGACY_INDEX_FILE).write_bytes(malicious_pickles(proof)[name])
    sign(checkpoint)
    verify(checkpoint)
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        read_weights(checkpoint)
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        train(load_config(run / "config.yaml"), run)
    assert not proof.exists()


def test_the_malicious_files_would_do_harm_to_a_plain_pickle_load(tmp_path):
    """So that the test above does not pass because its files are broken."""
    proof = tmp_path / "proof"
    harmful = ["os.system", "os.system inside the metadata", "in the oldest protocol", "subprocess", "eval", "exec"]
    for name in [*harmful, "open", "torch.save", "an instance of the old kind"]:
        pickle.loads(malicious_pickles(proof)[name])
        assert proof.exists(), name
        proof.unlink()


MODULE = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata"
CHANGES_TO_THE_PROCESS = {
    "a class": DCP + b"Metadata\n(N}S'version'\nS'changed'\nstb.",
    "a function": b"ctorch.serialization\n_get_layout\n}S'cache'\n}S'torch.strided'\nI5\nssb.",
    "a member of an enum": DCP + b"_MEM_FORMAT_ENCODING\n(I0\ntR}S'_value_'\nI5\nsb.",
    "a class, in opcodes that an index has": MODULE + b"\x8c\x08Metadata\x93}\x8c\x07version\x8c\x07changedsb.",
}


@pytest.mark.parametrize("target", CHANGES_TO_THE_PROCESS)
def test_metadata_cannot_change_what_was_there_before(target, checkpoint):
    """A pickle may set attributes of whatever it names, for the whole process: of torch's own classes too."""
    (checkpoint / LEGACY_INDEX_FILE).write_bytes(CHANGES_TO_THE_PROCESS[target])
    sign(checkpoint)
    with pytest.raises(CheckpointError, match="is not the index of a checkpoint"):
        read_weights(checkpoint)
    assert dcp.Metadata.version is None
    assert _get_layout.cache.get("torch.strided", torch.strided) is torch.strided
    assert dcp._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value == 0


NESTED = b")" + 60 * b"2\x86"  # a pair of the pair before, sixty times: its hash or its text would never be done
SHARED = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))  # the same in opcodes that an index has
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
    "a nested key, in opcodes that an index has": b"\x80\x04}" + SHARED + b"Ns.",
    "nested names, in opcodes that an index has": (
        b"\x80\x04)" + SHARED + b"\x93)\x81}(\x8c\x0cstorage_data}\x8c\x13state_dict_metadata}h\x3cNsub."
    ),
    "64 GiB": b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b".",
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", ENDLESS_PICKLES)
def test_metadata_that_would_compute_forever_is_refused(name, checkpoint):
    (checkpoint / LEGACY_INDEX_FILE).write_bytes(ENDLESS_PICKLES[name])
    sign(checkpoint)
    with pytest.raises(CheckpointError, match=r"\.metadata: is not the index of a checkpoint"):
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
    "an entry of bytes beside the tensors": (add_bytes_entry, "is not a tensor; such entries are refused"),
    "an entry of bytes instead of a tensor": (replace_by_bytes_entry, "is not a tensor; such entries are refused"),
    "a name that is no text": (
        lambda m: m.state_dict_metadata.update({5: first_tensor(m)}),
        "name of a tensor is of type int",
    ),
    "a shard in the folder above": (set_on(every_shard, "relative_path", "../x"), "not in the manifest"),
    "a shard anywhere": (set_on(every_shard, "relative_path", "/etc/passwd"), "not in the manifest"),
    "a shard beside the manifest's": (set_on(every_shard, "relative_path", "unlisted"), "not in the manifest"),
    "a shard without a name": (set_on(every_shard, "relative_path", None), "no valid place in a file"),
    "a shard whose name is a list": (set_on(every_shard, "relative_path", ["x"]), "no valid place in a file"),
    "a shard that is no shard": (set_on(every_shard, "relative_path", STATE_FILE), "places .* bytes into state.json"),
    "a shard beyond its file": (set_on(every_shard, "offset", 2**40), "cannot be loaded: "),
    "a shard before its file": (set_on(every_shard, "offset", -1), "no valid place in a file"),
    "a transformation": (set_on(every_shard, "transform_descriptors", ("zstd",)), "asks for a transformation"),
    "no shards": (lambda m: m.storage_data.clear(), "is not the index of a checkpoint"),
    "a size that is none": (set_on(first_tensor, "size", "large"), "is not the index of a checkpoint"),
    "a size beyond all memory": (set_on(first_tensor, "size", torch.Size([2**40, 2**10])), "are not the whole tensor"),
    "a negative size": (set_on(first_tensor, "size", torch.Size([-256, -16])), "are not the whole tensor"),
    "a tensor without parts": (set_on(first_tensor, "chunks", []), "are not the whole tensor"),
    "parts that are none": (set_on(first_tensor, "chunks", None), "is not the index of a checkpoint"),
    "half a tensor": (
        set_on(first_tensor, "chunks", [dcp.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([128, 16]))]),
        "are not the whole tensor",
    ),
    "a part beside the tensor": (
        set_on(first_tensor, "chunks", [dcp.ChunkStorageMetadata(torch.Size([256, 16]), torch.Size([256, 16]))]),
        "is not the index of a checkpoint",
    ),
}


@pytest.mark.parametrize("name", LYING_METADATA)
def test_metadata_that_lies_is_refused(name, checkpoint):
    """Some of it would read files outside, and some would leave weights that nobody ever wrote."""
    change, message = LYING_METADATA[name]
    metadata = pickle.loads((checkpoint / LEGACY_INDEX_FILE).read_bytes())
    change(metadata)
    (checkpoint / LEGACY_INDEX_FILE).write_bytes(pickle.dumps(metadata))
    (checkpoint.parent / "x").write_bytes((checkpoint / SHARD).read_bytes())
    sign(checkpoint)
    verify(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        read_weights(checkpoint)


def test_a_shard_that_the_manifest_does_not_list_is_refused(checkpoint):
    metadata = pickle.loads((checkpoint / LEGACY_INDEX_FILE).read_bytes())
    set_on(every_shard, "relative_path", "unlisted")(metadata)
    (checkpoint / LEGACY_INDEX_FILE).write_bytes(pickle.dumps(metadata))
    sign(checkpoint)
    (checkpoint / "unlisted").write_bytes((checkpoint / SHARD).read_bytes())
    verify(checkpoint)
    with pytest.raises(CheckpointError, match="names a file that is not in the manifest"):
        read_weights(checkpoint)


def test_a_shard_with_code_in_it_is_not_run(checkpoint, run, tmp_path):
    proof = tmp_path / "proof"
    content = io.BytesIO()
    torch.save(Calls(os.system, f"touch {proof}"), content)
    size = (checkpoint / SHARD).stat().st_size
    (checkpoint / SHARD).write_bytes(content.getvalue().ljust(size, b"\0"))
    metadata = pickle.loads((checkpoint / LEGACY_INDEX_FILE).read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(content.getvalue())
    (checkpoint / LEGACY_INDEX_FILE).write_bytes(pickle.dumps(metadata))
    sign(checkpoint)
    verify(checkpoint)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*[Ww]eights.only") as refused:
        read_weights(checkpoint)
    assert "False" not in str(refused.value), "no advice to load it all the same"
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*[Ww]eights.only"):
        train(load_config(run / "config.yaml"), run)
    assert not proof.exists()
    content.seek(0)
    torch.load(content, weights_only=False)
    assert proof.exists(), "the file is as bad as it should be"
