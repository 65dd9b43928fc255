"""Saves a run: everything into a temporary folder, the manifest last, then one rename makes the checkpoint exist.

With --async-save training resumes as soon as the tensors are copied to host memory; the rest is the same. All ranks
agree that a checkpoint is whole or there is none: a failure of one of them ends the run on all, and the older
checkpoints stay.
"""

import shutil
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch import Tensor

from megatron_neobert.checkpoint.contents import write_tensors, write_train_state
from megatron_neobert.checkpoint.folder import (
    iteration_folder,
    list_checkpoints,
    prepare_folder,
    prune,
    publish,
    record_of,
    write_manifest,
)
from megatron_neobert.checkpoint.load import sharded_state
from megatron_neobert.config.cli import write_record
from megatron_neobert.errors import DivergenceError, SaveError
from megatron_neobert.runtime.atomic_files import sync_to_disk
from megatron_neobert.runtime.environment import is_rank_zero
from megatron_neobert.runtime.new_file import FileRecord
from megatron_neobert.state import Run, TrainState


@dataclass
class _Pending:
    """A checkpoint on its way to disk."""

    state: TrainState
    optimizer: dict[str, Any]  # its plain values, the same on all ranks
    file: Future[dict[str, FileRecord]] | None  # of this rank, which a thread writes; None: it has no part to write


class Saver:
    """Writes SAVE/iter_N of a run; one checkpoint at a time."""

    def __init__(self, run: Run, *, log: Callable[[str], None]) -> None:
        self.run = run
        self.log = log
        self.save_folder = Path(run.settings.checkpoint.save or "")
        self._iteration = 0  # of the checkpoint that is being written
        self._pending: _Pending | None = None

    @property
    def is_writing(self) -> bool:
        """True while this rank's background write is in progress."""
        file = None if self._pending is None else self._pending.file
        return file is not None and not file.done()

    def save(self) -> None:
        """Save the run as it is; return when it is saved, or with --async-save when training may continue.

        Raises:
            SaveError: A checkpoint cannot be written, this one or the one before it.
            DivergenceError: There are values that are not finite.

        Collective: all ranks.
        """
        self.finish()
        run, config = self.run, self.run.settings.checkpoint
        self._iteration = run.state.iteration
        if run.model.ddp_config.overlap_param_gather:
            run.model.start_param_sync(force_sync=True)  # else the other ranks' newest weights would be missing
        problem = None
        if is_rank_zero():
            try:
                prepare_folder(self._temporary)
            except OSError as error:
                problem = _describe(error)
        self._raise_alike(problem)
        for optimizer in run.optimizer.chained_optimizers:  # which have no state before the first update
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        sharded, plain = save_preprocess(sharded_state(run, loading=False))  # collective: all ranks compare their parts
        own = [tensor for tensor in nested_values(sharded) if is_main_replica(tensor.replica_id)]
        assert all(isinstance(tensor, ShardedTensor) for tensor in own), {type(tensor) for tensor in own}
        parts = {tensor.key: tensor.data for tensor in own}
        assert len(parts) == len(own), "two parts of one tensor on one rank cannot lie in one file"
        self._refuse_values_not_finite(parts)
        file = None
        if parts:
            copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in parts.items()}
            path = self._temporary / f"rank_{torch.distributed.get_rank():05d}.safetensors"
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            file = thread.submit(_write, path, copies, {tensor.key: tensor.global_offset for tensor in own})
            thread.shutdown(wait=False)
        self._pending = _Pending(run.state, plain["optimizer"], file)
        if config.async_save:
            self.log(f"saving {self._final} in the background")
        else:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and make it the newest.

        Collective: all ranks.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        files: dict[str, FileRecord] = {}
        problem = None
        try:
            files = {} if pending.file is None else pending.file.result()
        except Exception as error:  # of any kind: the other ranks have to hear of it
            problem = _describe(error)
        parts: list[Any] | None = [None] * torch.distributed.get_world_size() if is_rank_zero() else None
        torch.distributed.gather_object((files, problem), parts)  # collective: all ranks
        self._raise_alike(self._complete(pending, parts) if parts is not None else None)
        self.log(f"saved {self._final}")

    @property
    def _final(self) -> Path:
        return iteration_folder(self.save_folder, self._iteration)

    @property
    def _temporary(self) -> Path:
        return self._final.with_name(f".tmp-{self._final.name}")

    def _refuse_values_not_finite(self, parts: Mapping[str, Tensor]) -> None:
        names = sorted(name for name, tensor in parts.items() if not tensor.isfinite().all())
        found = _first_problem(f"{len(names)} tensors, {names[0]} the first," if names else None)
        if found is not None:
            self._remove_temporary()
            raise DivergenceError(
                f"iteration {self._iteration} is not saved: {found} hold values that are not finite. {self._remaining}"
            )

    def _complete(self, pending: _Pending, parts: list[tuple[dict[str, FileRecord], str | None]]) -> str | None:
        """Complete the checkpoint on rank 0 when all ranks have written; return what went wrong on any of them."""
        run, config = self.run, self.run.settings.checkpoint
        if (problem := next((problem for _, problem in parts if problem is not None), None)) is not None:
            return problem
        try:
            write_train_state(self._temporary, pending.state, pending.optimizer)
            write_record(run.settings, self._temporary / "settings.yaml")
            run.tokenizer.save_tokenizer_files(
                self._temporary / "tokenizer", model_max_length=run.settings.model.max_position_embeddings
            )
            write_manifest(self._temporary, {name: file for files, _ in parts for name, file in files.items()})
            publish(self._temporary, self._final)
        except Exception as error:  # the other ranks wait to hear of it
            return _describe(error)
        try:
            if config.keep_last is not None:
                prune(self.save_folder, keep_last=config.keep_last, keep_every=config.keep_every)
        except OSError as error:  # the checkpoint is there
            self.log(f"warning: {self.save_folder} could not be tidied: {error}")
        return None

    def _raise_alike(self, problem: str | None) -> None:
        problem = _first_problem(problem)  # collective: all ranks
        if problem is not None:
            self._remove_temporary()
            raise SaveError(
                f"iteration {self._iteration} could not be saved: {problem}. {self._remaining} Make room or "
                "fix it, then start again with the same command."
            )

    def _remove_temporary(self) -> None:
        if is_rank_zero():
            shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def _remaining(self) -> str:
        if self.run.settings.checkpoint.save is None:
            return "There is no checkpoint, for lack of --save."
        older = list_checkpoints(self.save_folder)
        return f"The newest checkpoint is {older[0]}." if older else f"There is no older one in {self.save_folder}."


def _write(path: Path, parts: Mapping[str, Tensor], offsets: Mapping[str, tuple[int, ...]]) -> dict[str, FileRecord]:
    write_tensors(path, parts, offsets)
    sync_to_disk(path)
    return {path.name: record_of(path)}


def _describe(error: BaseException) -> str:
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"rank {torch.distributed.get_rank()} on {socket.gethostname()}: {text}"


def _first_problem(problem: str | None) -> str | None:
    """Return the problem of the lowest rank that has one, the same on all ranks. Collective: all ranks."""
    problems: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    return next((text for text in problems if text is not None), None)
