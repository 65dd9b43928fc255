"""Saves a run: everything into a temporary folder, the manifest last, then one rename makes the checkpoint exist.

With --async-save training resumes as soon as the tensors are copied to host memory; the rest is the same. All ranks
agree that a checkpoint is whole or there is none: whatever fails on one of them ends the run on all, and the older
checkpoints stay.
"""

import shutil
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch import Tensor

from megatron_neobert.checkpoint.folder import (
    Fingerprint,
    fingerprint_of,
    iteration_folder,
    list_checkpoints,
    prepare_folder,
    prune,
    publish,
    write_manifest,
)
from megatron_neobert.checkpoint.load import sharded_state
from megatron_neobert.checkpoint.tensors import write_tensors
from megatron_neobert.checkpoint.train_state import write_train_state
from megatron_neobert.config.cli import write_record
from megatron_neobert.errors import DivergenceError, SaveError
from megatron_neobert.model.flops import checkpoint_bytes
from megatron_neobert.runtime.atomic_files import sync_to_disk
from megatron_neobert.runtime.environment import is_rank_zero
from megatron_neobert.runtime.signals import fulfil_save_request, take_save_request
from megatron_neobert.state import Run
from megatron_neobert.training.replicas import describe_drift


@dataclass
class Written:
    """What one rank has written, and what went wrong."""

    files: dict[str, Fingerprint] = field(default_factory=dict)
    problem: str | None = None


class TensorWriter:
    """This rank's part of one checkpoint, on its way to disk: a thread writes a copy in host memory.

    Args:
        state: Megatron's sharded state of the run; what of it is no tensor becomes `common`, the same on all ranks.
        folder: Where to; exists.

    Collective: all ranks, which compare what they hold: every part of a tensor must be stored once.
    """

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self.path = folder / f"rank_{torch.distributed.get_rank():05d}.safetensors"
        sharded, self.common = save_preprocess(state)
        own = [tensor for tensor in nested_values(sharded) if is_main_replica(tensor.replica_id)]
        assert all(isinstance(tensor, ShardedTensor) for tensor in own), {type(tensor) for tensor in own}
        self._parts: dict[str, Tensor] = {tensor.key: tensor.data for tensor in own}
        self._offsets = {tensor.key: tensor.global_offset for tensor in own}
        assert len(self._parts) == len(own), "two parts of one tensor on one rank cannot lie in one file"
        self._written: Future[Fingerprint] | None = None

    def tensors_not_finite(self) -> list[str]:
        """Names of those in this rank's part."""
        return sorted(name for name, tensor in self._parts.items() if not tensor.isfinite().all())

    def start(self) -> None:
        """Begins to write and returns; the state may change from now on."""
        if self._parts:
            copies = {name: _copy_to_host(tensor) for name, tensor in self._parts.items()}
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._written = thread.submit(_write, self.path, copies, self._offsets)
            thread.shutdown(wait=False)
        self._parts = {}

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._written is not None and not self._written.done()

    def wait(self) -> Written:
        """Waits until this rank's file is on disk, or cannot be."""
        if self._written is None:
            return Written()
        try:
            return Written({self.path.name: self._written.result()})
        except Exception as error:  # of any kind: the other ranks have to hear of it
            return Written(problem=describe_problem(error))


def _copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _write(path: Path, parts: Mapping[str, Tensor], offsets: Mapping[str, tuple[int, ...]]) -> Fingerprint:
    write_tensors(path, parts, offsets)
    sync_to_disk(path)
    return fingerprint_of(path)


def describe_problem(error: BaseException) -> str:
    """An error as the other ranks should hear of it."""
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"rank {torch.distributed.get_rank()} on {socket.gethostname()}: {text}"


def first_problem(problem: str | None) -> str | None:
    """That of the lowest rank that has one, the same on all ranks. Collective: all ranks."""
    problems: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    return next((text for text in problems if text is not None), None)


class Saver:
    """Writes SAVE/iter_N of a run; one checkpoint at a time."""

    def __init__(self, run: Run, *, log: Callable[[str], None]) -> None:
        self.run = run
        self.log = log
        self.save_folder = Path(run.settings.checkpoint.save or "")
        self._writer: TensorWriter | None = None
        self._iteration = 0  # of the checkpoint that is being written
        self._progress = run.progress  # likewise

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes tensors."""
        return self._writer is not None and self._writer.is_busy

    def save(self) -> None:
        """Saves the run as it stands; returns when it is saved, or with --async-save when it may go on.

        Raises:
            SaveError: It cannot be written, or an earlier one could not.
            DivergenceError: There are values that are not finite, or replicas that differ.

        Collective: all ranks.
        """
        self.finish()
        take_save_request()
        run, config = self.run, self.run.settings.checkpoint
        self._iteration = run.progress.iteration
        self.refuse_drift()
        self._raise_alike(self._prepare_folder())
        writer = TensorWriter(sharded_state(run, loading=False), self._temporary)
        self._progress = run.progress
        if config.check_for_nan:
            self._refuse_values_not_finite(writer)
        writer.start()
        self._writer = writer
        if config.async_save:
            self.log(f"saving {self._final} in the background")
        else:
            self.finish()

    def refuse_drift(self) -> None:
        """Ends the run where the replicas of the model no longer hold the same weights.

        Raises:
            DivergenceError: Naming rank and tensor.

        Collective: all ranks.
        """
        drift = first_problem(describe_drift(self.run))
        if drift is not None:
            iteration = self.run.progress.iteration
            self.finish()  # an earlier checkpoint, whose replicas were compared then
            raise DivergenceError(
                f"iteration {iteration} is not saved: {drift}. {self._remaining} Start again with the same command; if "
                "the same rank is named again, leave its machine out."
            )

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one, and makes it the newest.

        Raises:
            SaveError: It could not be written.

        Collective: all ranks.
        """
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        part = writer.wait()
        parts: list[Any] | None = [None] * torch.distributed.get_world_size() if is_rank_zero() else None
        torch.distributed.gather_object(part, parts)  # collective: all ranks
        self._raise_alike(self._complete(writer, parts) if parts is not None else None)
        self.log(f"saved {self._final}")

    @property
    def _final(self) -> Path:
        return iteration_folder(self.save_folder, self._iteration)

    @property
    def _temporary(self) -> Path:
        return self._final.with_name(f".tmp-{self._final.name}")

    def _prepare_folder(self) -> str | None:
        if not is_rank_zero():
            return None
        expected = checkpoint_bytes(self.run.settings, vocab_size=self.run.tokenizer.vocab_size)
        try:
            prepare_folder(self._temporary, expected_bytes=expected)
        except OSError as error:
            return describe_problem(error)
        return None

    def _refuse_values_not_finite(self, writer: TensorWriter) -> None:
        names = writer.tensors_not_finite()
        found = first_problem(f"{len(names)} tensors, {names[0]} the first," if names else None)
        if found is not None:
            self._remove_temporary()
            raise DivergenceError(
                f"iteration {self._iteration} is not saved: {found} hold values that are not finite. {self._remaining} "
                "--no-check-for-nan saves such weights as well."
            )

    def _complete(self, writer: TensorWriter, parts: list[Written]) -> str | None:
        """What rank 0 does when all ranks have written their tensors. Returns what went wrong on any of them."""
        run, config = self.run, self.run.settings.checkpoint
        problem = next((part.problem for part in parts if part.problem is not None), None)
        if problem is not None:
            return problem
        try:
            write_train_state(self._temporary, self._progress, writer.common["optimizer"])
            write_record(run.settings, self._temporary / "settings.yaml")
            run.tokenizer.save_tokenizer_files(
                self._temporary / "tokenizer", model_max_length=run.settings.model.max_position_embeddings
            )
            write_manifest(self._temporary, {name: file for part in parts for name, file in part.files.items()})
            publish(self._temporary, self._final, iteration=self._iteration)
        except Exception as error:  # the other ranks wait to hear of it
            return describe_problem(error)
        try:
            fulfil_save_request(self.save_folder)
            if config.keep_last is not None:
                prune(self.save_folder, keep_last=config.keep_last, keep_every=config.keep_every)
        except OSError as error:  # the checkpoint is there
            self.log(f"warning: {self.save_folder} could not be tidied: {error}")
        return None

    def _raise_alike(self, problem: str | None) -> None:
        problem = first_problem(problem)  # collective: all ranks
        if problem is not None:
            self._remove_temporary()
            raise SaveError(
                f"iteration {self._iteration} could not be saved: {problem}. {self._remaining} Make room or "
                "mend it, then start again with the same command."
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
