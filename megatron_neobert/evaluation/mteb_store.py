"""MTEB's data in a folder of the user.

A task is stored as mteb holds it after loading: what it downloads, cuts and draws at random happens once, on the
connected machine, and any machine with the same folder evaluates the same texts. Each task's folder appears whole or
not at all and names the revision of its data; another one than the installed mteb asks for is refused.

The cache of `datasets` cannot do this: offline it takes the newest cached revision, whichever a task asks for, and
mteb's loader of retrieval tasks asks the Hub for configurations and splits.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_from_disk
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.abstask import AbsTask

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.data import reading
from megatron_neobert.runtime.atomic_files import own_name, read_text, sha256_of, sync_to_disk
from megatron_neobert.text import parse_json

_ABOUT = "task.json"
_NOT_DATA = {"dataset", "data_loaded", "rng_state", "np_rng", "seed", "hf_subsets"}


def stored_revision(data_dir: Path, task: AbsTask) -> str | None:
    """Return the revision of a task's data, None if the data is not there in all subsets."""
    folder = data_dir / "tasks" / task.metadata.name
    if not (folder / _ABOUT).is_file():
        return None
    about = _read_about(folder)
    subsets = {part["subset"] for part in about["parts"]}
    return str(about["revision"]) if None in subsets or set(task.hf_subsets) <= subsets else None


def digest_of_files(data_dir: Path, task: AbsTask) -> str:
    """Return sixteen digits that change with the stored data of a task.

    Raises:
        DataError: The data is of another revision than the installed mteb's task.
    """
    folder = data_dir / "tasks" / task.metadata.name
    if (stored := stored_revision(data_dir, task)) != task.metadata.revision:
        raise DataError(
            f"{folder}: holds revision {stored}, and the installed mteb evaluates {task.metadata.revision}; run "
            "neobert fetch mteb with this mteb on a connected machine."
        )
    # Not the caches that `datasets` writes beside data when a task filters it.
    files = sorted(path for pattern in ("*.json", "data-*.arrow") for path in folder.rglob(pattern))
    lines = [f"{path.relative_to(folder)} {sha256_of(path)}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _read_about(folder: Path) -> dict[str, Any]:
    with reading(folder):
        about = parse_json(read_text(folder / _ABOUT))
        return {name: about[name] for name in ("revision", "parts", "settings")}


def store_task(data_dir: Path, task: AbsTask) -> None:
    """Load a task by mteb's own means, which may download, and write what it then holds."""
    before = _settings(task)
    task.load_data()
    if isinstance(task, AbsTaskRetrieval):
        task.convert_v1_dataset_format_to_v2(num_proc=None)  # some tasks still load the old form
    target = data_dir / "tasks" / task.metadata.name
    temporary = own_name(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    subsets = []
    for number, (subset, split, content) in enumerate(_splits(task)):
        place = temporary / str(number)
        if isinstance(content, Dataset):
            content.save_to_disk(place)
        else:  # of retrieval
            for name in ("corpus", "queries"):
                content[name].save_to_disk(place / name)
            judged = {name: content[name] for name in ("relevant_docs", "top_ranked")}
            (place / "judged.json").write_text(json.dumps(judged), encoding="utf-8")
        subsets.append({"subset": subset, "split": split})
    changed = {name: value for name, value in _settings(task).items() if before.get(name, task) != value}
    about = {"name": task.metadata.name, "revision": task.metadata.revision, "parts": subsets, "settings": changed}
    (temporary / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    sync_to_disk(target.parent)
    task.unload_data()


def load_task(data_dir: Path, task: AbsTask) -> None:
    """Load the data that `store_task` wrote into a task.

    Raises:
        DataError: The data is damaged.
    """
    folder = data_dir / "tasks" / task.metadata.name
    about = _read_about(folder)
    dataset: dict[Any, Any] = {}
    with reading(folder):
        for number, part in enumerate(about["parts"]):
            splits = dataset if part["subset"] is None else dataset.setdefault(part["subset"], {})
            place, judged = folder / str(number), folder / str(number) / "judged.json"
            content: Any = None
            if judged.exists():  # of retrieval
                content = parse_json(judged.read_text(encoding="utf-8"))
                content |= {name: load_from_disk(place / name) for name in ("corpus", "queries")}
            splits[part["split"]] = load_from_disk(place) if content is None else content
    plain = all(part["subset"] is None for part in about["parts"])
    task.dataset = DatasetDict(dataset) if plain else dataset
    if not plain and not isinstance(task, AbsTaskRetrieval):
        task.dataset = {subset: DatasetDict(splits) for subset, splits in dataset.items()}
    for name, value in about["settings"].items():
        setattr(task, name, value)
    task.data_loaded = True


def _splits(task: AbsTask) -> Iterator[tuple[str | None, str, Any]]:
    """Yield (subset or None, split, content) of the splits that an evaluation reads."""
    assert task.dataset is not None, task.metadata.name
    wanted = {*task.eval_splits, getattr(task, "train_split", None)}
    for key, content in task.dataset.items():
        if isinstance(content, Dataset):
            if key in wanted:
                yield None, key, content
            continue
        for split, part in content.items():
            if split in wanted and key in task.hf_subsets:
                yield key, split, part


def _settings(task: AbsTask) -> dict[str, Any]:
    """Return what loading may change besides the data: some tasks set how many documents they cluster."""
    plain = (bool, int, float, str, type(None))
    return {key: value for key, value in vars(task).items() if key not in _NOT_DATA and isinstance(value, plain)}
