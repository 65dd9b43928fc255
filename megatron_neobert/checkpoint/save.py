"""Save a run: write all files into a temporary folder, then the manifest, then rename the folder.

With --async-save, training continues as soon as the tensors are copied to host memory, and a thread writes them. If one
rank fails, the run ends on all ranks, no incomplete checkpoint remains, and older checkpoints are not changed.
"""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_neobert.checkpoint.contents import StoredTensors, write_tensors
from megatron_neobert.checkpoint.folder import (
    MANIFEST,
    iteration_folder,
    iteration_of,
    list_checkpoints,
    prepare_folder,
    prune,
    publish,
    record_of,
    write_manifest,
)
from megatron_neobert.checkpoint.shards import LocalBox, assign_to_files, parts_to_save
from megatron_neobert.checkpoint.train_state import write_train_state
from megatron_neobert.config.cli import write_record
from megatron_neobert.errors import DivergenceError, NeoBERTError, OutputError, SaveError
from megatron_neobert.runtime.atomic_files import sync_to_disk
from megatron_neobert.runtime.distributed import broadcast, first_of_ranks
from megatron_neobert.runtime.environment import is_rank_zero
from megatron_neobert.runtime.new_file import FileRecord
from megatron_neobert.runtime.own_files import delete_folder
from megatron_neobert.state import Run


class Saver:
    """Writer of a run's checkpoints, one at a time."""

    def __init__(self, run: Run, *, log: Callable[[str], None]) -> None:
        self.run = run
        self.log = log
        self.save_folder = Path(run.settings.checkpoint.save or "")
        self._final = Path()  # folder of the checkpoint that is being written
        self._temporary = Path()  # its name until it is complete
        self._files: Future[dict[str, FileRecord]] | None = None  # records of the files that this rank's thread writes

    @property
    def is_writing(self) -> bool:
        """True while this rank's background write is in progress."""
        return self._files is not None and not self._files.done()

    def save(self) -> None:
        """Save the current state of the run.

        Return when the checkpoint is complete. With --async-save, return when the tensors are copied to host memory.
        Raise SaveError on all ranks if writing fails, and DivergenceError if a value is not finite.

        Collective: all ranks.
        """
        self.finish()
        run = self.run
        self._final = iteration_folder(self.save_folder, run.state.iteration)
        problem = None
        if is_rank_zero():
            try:
                self._temporary = prepare_folder(self._final)
                steps = max((int(group["step"]) for group in run.optimizer.param_groups if "step" in group), default=0)
                write_train_state(self._temporary, run.state, optimizer_steps=steps)
                write_record(run.settings, self._temporary / "settings.yaml")
                run.tokenizer.save_tokenizer_files(
                    self._temporary / "tokenizer", model_max_length=run.settings.model.max_position_embeddings
                )
            except Exception as error:  # any exception, because the other ranks wait for this rank
                problem = _describe(error)
        self._raise_on_all_ranks(problem)
        self._temporary = broadcast(self._temporary)
        # Each rank has updated the weights that it saves. Those of other ranks may not have been gathered yet.
        boxes = [box for part in parts_to_save(run) for box in part.boxes()]
        self._check_finite(boxes)
        copies = [box._replace(data=box.data.to("cpu", copy=True)) for box in boxes]
        path = self._temporary / f"rank_{torch.distributed.get_rank():05d}.safetensors"
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._files = thread.submit(_write, path, copies)
        thread.shutdown(wait=False)
        if run.settings.checkpoint.async_save:
            self.log(f"saving {self._final} in the background")
        else:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and publish it. Raise SaveError if writing fails.

        Collective: all ranks.
        """
        if self._files is None:
            return
        records: dict[str, FileRecord] = {}
        problem = None
        try:
            records = self._files.result()
        except Exception as error:  # any exception, because the other ranks wait for this rank
            problem = _describe(error)
        self._files = None
        results: list[Any] | None = [None] * torch.distributed.get_world_size() if is_rank_zero() else None
        torch.distributed.gather_object((records, problem), results)  # collective: all ranks
        self._raise_on_all_ranks(self._complete(results) if results is not None else None)
        self.log(f"saved {self._final}")

    def _check_finite(self, boxes: Sequence[LocalBox]) -> None:
        """Raise DivergenceError on all ranks if a value on any rank is not finite. Collective: all ranks."""
        # Extremes are NaN if a value is, and need no memory. The host reads them at once, and waits for a GPU once.
        extremes = [torch.stack(box.data.aminmax()).isfinite().all() for box in boxes]
        finite = torch.stack(extremes).tolist() if extremes else []
        names = sorted({box.name for box, is_finite in zip(boxes, finite, strict=True) if not is_finite})
        problem = f"{len(names)} tensors, {names[0]} the first, hold values that are not finite" if names else None
        remedy = "Continue from an earlier checkpoint, with a lower --lr."
        self._raise_on_all_ranks(problem, DivergenceError, remedy)

    def _complete(self, results: list[tuple[dict[str, FileRecord], str | None]]) -> str | None:
        """Publish the checkpoint, and delete old checkpoints. Only rank 0 calls this.

        Return the first problem of a rank, or the error that prevented publishing, as text; None after success.

        Args:
            results: For each rank, (records of the written files, problem or None).
        """
        config = self.run.settings.checkpoint
        if (problem := next((problem for _, problem in results if problem is not None), None)) is not None:
            return problem
        try:
            write_manifest(self._temporary, {name: file for files, _ in results for name, file in files.items()})
            StoredTensors(self._temporary)  # raises an error if the files do not make up whole tensors
            publish(self._temporary, self._final)
        except Exception as error:  # any exception, because the other ranks wait for this rank
            return _describe(error)
        try:
            if config.keep_last is not None:
                prune(self.save_folder, keep_last=config.keep_last, keep_every=config.keep_every)
        except (OSError, OutputError) as error:  # the checkpoint itself is complete
            self.log(f"warning: old checkpoints in {self.save_folder} could not be deleted: {error}")
        return None

    def _raise_on_all_ranks(
        self,
        problem: str | None,
        error: type[NeoBERTError] = SaveError,
        remedy: str = "Make room or fix the problem, then start again with the same command.",
    ) -> None:
        """If any rank has a problem, delete the temporary folder and raise on all ranks. Collective: all ranks."""
        problem = first_of_ranks(problem)
        if problem is None:
            return
        if is_rank_zero():
            with suppress(OSError, OutputError):
                delete_folder(self._temporary, MANIFEST)
        older = list_checkpoints(self.save_folder)
        newest = f"The newest checkpoint is {older[0]}." if older else f"There is no checkpoint in {self.save_folder}."
        raise error(f"iteration {iteration_of(self._final)} could not be saved: {problem}. {newest} {remedy}")


def _write(path: Path, boxes: Sequence[LocalBox]) -> dict[str, FileRecord]:
    """Write a rank's boxes to `path` and, if needed, to one or two numbered files in the same folder.

    Return file name -> record. If `boxes` is empty, no file is written and the result is empty.
    """
    records = {}
    for number, file in enumerate(assign_to_files(boxes)):
        target = path if number == 0 else path.with_stem(f"{path.stem}_{number}")
        write_tensors(
            target, {name: box.data for name, box in file.items()}, {name: box.box for name, box in file.items()}
        )
        sync_to_disk(target)
        records[target.name] = record_of(target)
    return records


def _describe(error: BaseException) -> str:
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"rank {torch.distributed.get_rank()} on {socket.gethostname()}: {text}"
