"""Mutated checkpoints: with the manifest as it was, found; resealed as a hostile hand would, refused or read.

No checkpoint may end a reader in anything but an error of ours: it may come from another machine, or another person.
"""

import pytest
import torch
from bad_inputs.fuzzing import examples, mutated, mutated_file
from bad_inputs.refusals import bounded
from hypothesis import given
from hypothesis import strategies as st
from unit.conversion.saved_model import SHAPE, WORDS, SavedModel, build_reference

from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.mapping import NEOBERT, to_internal
from megatron_neobert.checkpoint.contents import StoredTensors
from megatron_neobert.checkpoint.folder import verify_files
from megatron_neobert.errors import CheckpointError, NeoBERTError

pytestmark = pytest.mark.slow

TENSORS = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a tiny model, and the content of its files by name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("".join(f"{word}\n" for word in WORDS))
    model = SavedModel(save=folder / "save", reference=build_reference(), vocabulary=vocabulary)
    model.write(to_internal(build_reference().state_dict(), SHAPE, NEOBERT))
    root = model.iteration_folder
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return model, files


@examples(300)
@given(data=st.data())
def test_mutated_checkpoint_does_not_pass_for_whole(saved, data):
    model, files = saved
    name = data.draw(st.sampled_from(sorted(files)))
    spoilt = data.draw(mutated_file(name, files[name]))
    path = model.iteration_folder / name
    path.write_bytes(spoilt)
    try:
        with bounded():
            verify_files(model.iteration_folder)
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert spoilt == files[name] or name == "MANIFEST.json"  # which, if accepted, vouches for the same files
    finally:
        path.write_bytes(files[name])


@examples(300)
@given(data=st.data())
def test_mutated_header_of_tensors_is_refused_or_read(saved, data):
    model, files = saved
    path = model.iteration_folder / TENSORS
    header = 8 + int.from_bytes(files[TENSORS][:8], "little")
    path.write_bytes(data.draw(mutated(files[TENSORS][:header])) + files[TENSORS][header:])
    try:
        with bounded():
            stored = StoredTensors(model.iteration_folder)
            for name in stored.shapes:
                stored.read_whole(name)
    except CheckpointError as error:
        assert "\n" not in str(error)
    finally:
        path.write_bytes(files[TENSORS])


@examples(200)
@given(data=st.data())
def test_converter_refuses_or_reads_what_a_hostile_hand_has_sealed(saved, data):
    model, files = saved
    sources = sorted(name for name in files if name != "MANIFEST.json")
    name = data.draw(st.sampled_from([*sources, TENSORS, "settings.yaml"]))
    path = model.iteration_folder / name
    path.write_bytes(data.draw(mutated_file(name, files[name])))
    model.seal()
    try:
        with bounded():
            checkpoint = read_checkpoint(model.save)
            checkpoint.build_reference(torch.float32)
    except NeoBERTError as error:
        assert error.exit_code in (65, 66, 78), error
    finally:
        path.write_bytes(files[name])
        (model.iteration_folder / "MANIFEST.json").write_bytes(files["MANIFEST.json"])
