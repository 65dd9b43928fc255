"""Exported folders on the Hub: each a revision that holds exactly the folder's files.

The Hub's own client does the work, with the token that `hf auth login` or HF_TOKEN has given it. It does not upload
what is there already, so the same command resumes after a lost connection.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants

from checkpoint_conversion.model_card import REPORT
from megatron_neobert.errors import ConfigError, OutputError, short_reason
from megatron_neobert.text import listed


class HubModel:
    """A model repository, which is created where there is none: private, until its owner makes it public.

    Args:
        name: OWNER/NAME.

    Raises:
        ConfigError: HF_HUB_OFFLINE is set.
        OutputError: The Hub cannot be reached, or does not accept name or token; so from `push`.
    """

    def __init__(self, name: str) -> None:
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"--push-to-hub {name} needs the network, and HF_HUB_OFFLINE is set. Unset it for this command."
            )
        self.name, self._api = name, HfApi()
        with self._sentences():
            if not self._api.repo_exists(name):
                self._api.create_repo(name, private=True)

    def push(self, folder: Path, revision: str | None) -> None:
        """Make the branch, or main, hold the files of the folder and no others; print the commit's address.

        Raises:
            OutputError: As the class; or the branch holds files that are not an earlier export's, and would be deleted.
        """
        with self._sentences():
            if revision is not None:
                self._api.create_branch(self.name, branch=revision, exist_ok=True)
            found = self._api.list_repo_files(self.name, revision=revision)
        foreign = [path for path in found if path not in (".gitattributes", "README.md")]
        if foreign and REPORT not in found:
            raise OutputError(
                f"--push-to-hub {self.name}: branch {revision or 'main'} holds {listed(foreign)}, and no {REPORT} of "
                "an earlier export; an upload would delete them. Name another model, or a new branch with --revision."
            )
        with self._sentences():
            commit = self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                revision=revision,
                commit_message=f"Add {folder.name}",
                delete_patterns="*",
            )
        print(f"uploaded {folder} to {commit.commit_url}")

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the client's HTTP library, which is another one in other versions, and its own
            raise OutputError(
                f"--push-to-hub {self.name}: {short_reason(error)}; check name, network and token (hf auth login, or "
                "HF_TOKEN) and give the same command again: what has been converted and uploaded is kept."
            ) from error
