"""Exported folders on the Hub: each a revision that holds exactly the folder's files.

The Hub's own client does the work, with the token that `hf auth login` or HF_TOKEN has given it. It does not upload
what is there already, so the same command resumes after a lost connection.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi

from megatron_neobert.errors import OutputError, short_reason


class HubModel:
    """A model repository, which is created where there is none: private, until its owner makes it public.

    Args:
        name: OWNER/NAME.

    Raises:
        OutputError: The Hub cannot be reached, or does not accept name or token; so from `push`.
    """

    def __init__(self, name: str) -> None:
        self.name, self._api = name, HfApi()
        with self._sentences():
            if not self._api.repo_exists(name):
                self._api.create_repo(name, private=True)

    def push(self, folder: Path, revision: str | None) -> None:
        """Makes the branch, or main, hold the files of the folder and no others; prints the commit's address."""
        with self._sentences():
            if revision is not None:
                self._api.create_branch(self.name, branch=revision, exist_ok=True)
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
