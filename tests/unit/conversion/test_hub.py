"""Exports on the Hub: every branch holds exactly what the folder holds, and nothing is uploaded twice."""

import shutil

import pytest
from loopback_hub import LoopbackHub
from saved_model import SavedModel
from unit.tools.commands import call

NAME = "tester/tiny"


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub.constants as constants
    from huggingface_hub import HfApi

    with LoopbackHub().serve() as hub:
        # The client reads its environment when it is imported.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("checkpoint_conversion.export.HfApi", lambda: HfApi(endpoint=hub.address))
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


def push(saved: SavedModel, output, *flags):
    return call("convert", "megatron-to-hf", "--load", saved.save, "--output", output, "--push-to-hub", NAME, *flags)


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_becomes_a_private_model_whose_card_names_it_and_its_data(saved, tmp_path, hub):
    flags = ("--license", "apache-2.0", "--dataset", "tiiuae/falcon-refinedweb")
    code, shown, complaint = push(saved, tmp_path / "model", *flags)
    assert code == 0, complaint
    assert f"uploaded {tmp_path / 'model'} to {hub.address}/{NAME}" in shown
    assert hub.models[NAME]["main"] == files_of(tmp_path / "model") | {".gitattributes": b""}
    assert hub.private == {NAME}
    card = hub.models[NAME]["main"]["README.md"].decode()
    assert f'model_id = "{NAME}"' in card and "tiiuae/falcon-refinedweb" in card and "license: apache-2.0" in card


def test_every_checkpoint_becomes_a_revision_and_the_newest_main(saved, tmp_path, hub):
    shutil.copytree(saved.iteration_folder, saved.save / "iter_0000040")
    earlier = {".gitattributes": b"", "old.safetensors": b"", "conversion_report.json": b""}
    hub.models[NAME] = {"main": earlier}
    assert push(saved, tmp_path / "models", "--all-iterations")[0] == 0
    assert set(hub.models[NAME]) == {"main", "iteration-30", "iteration-40"}
    for branch, folder in (("main", "40"), ("iteration-40", "40"), ("iteration-30", "30")):
        expected = files_of(tmp_path / "models" / f"iter_00000{folder}")
        assert hub.models[NAME][branch] == expected | {".gitattributes": b""}
    assert NAME not in hub.private  # one that is there stays what it is


def test_command_after_a_failed_upload_uploads_what_is_missing_and_converts_nothing(saved, tmp_path, hub):
    hub.fails_on = "/commit/"
    code, _, complaint = push(saved, tmp_path / "model", "--revision", "trial")
    assert code == 73 and f"--push-to-hub {NAME}: " in complaint and "give the same command again" in complaint
    assert "config.json" not in hub.models[NAME]["trial"] and len(hub.uploads) == 1
    hub.fails_on = None
    code, shown, _ = push(saved, tmp_path / "model", "--revision", "trial")
    assert code == 0 and "kept" in shown and "converting" not in shown
    assert len(hub.uploads) == 1
    assert hub.models[NAME]["trial"] == files_of(tmp_path / "model") | {".gitattributes": b""}
    assert set(hub.models[NAME]["main"]) == {".gitattributes"}


@pytest.mark.parametrize(
    ("name", "flags", "code", "sentence"),
    [
        ("a b", (), 2, "'a b' cannot be the name of a model on the Hub"),
        (NAME, ("--all-iterations", "--revision", "x"), 2, "--revision names the branch of one folder"),
        (NAME, (), 73, "Invalid username or password"),
    ],
)
def test_wrong_name_token_or_flags_are_refused_before_anything_is_converted(
    saved, tmp_path, hub, monkeypatch, name, flags, code, sentence
):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    place = ("megatron-to-hf", "--load", saved.save, "--output", tmp_path / "model", "--push-to-hub", name)
    ended, shown, complaint = call("convert", *place, *flags)
    assert ended == code and sentence in complaint and "converting" not in shown
    assert not (tmp_path / "model").exists() and not hub.models


def test_files_that_no_export_has_written_are_not_deleted(saved, tmp_path, hub):
    theirs = {".gitattributes": b"", "pytorch_model.bin": b"the user's weights"}
    hub.models[NAME] = {"main": dict(theirs)}
    code, _, complaint = push(saved, tmp_path / "model")
    assert code == 73 and "branch main holds pytorch_model.bin, and no conversion_report.json" in complaint
    assert hub.models[NAME] == {"main": theirs}


def test_upload_without_a_network_is_refused_before_anything_is_converted(saved, tmp_path, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, complaint = push(saved, tmp_path / "model")
    assert code == 2 and "HF_HUB_OFFLINE is set. Unset it for this command." in complaint
    assert not (tmp_path / "model").exists()
