"""The tensors in the files of a Hugging Face folder.

Listing tensors reads the files' headers alone; nothing is allocated for a size that a header only claims.

NeoBERT's own training code saves a pickle. It is read by torch's weights-only loader, which creates tensors and
plain values and nothing else, and mapped from the file, of which nothing may be compressed.
"""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_neobert.errors import ConversionError, MissingInputError, short_reason
from megatron_neobert.huggingface.checks import INDEX, WEIGHTS, quote, read_weight_map

MODELING_FILE = "modeling_neobert.py"  # in a folder of the neobert layout that we wrote
_STATE_DICT = "state_dict.pt"  # what accelerate writes
HEAD_FOLDER = "mlm_head"  # below a folder whose layout has no place for a masked-language-model head
HEAD_NAMES = ("decoder.weight", "decoder.bias")  # of the tensors in it

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class StoredTensor(NamedTuple):
    """What a file's header holds of one tensor, and the way to the tensor itself."""

    file: Path
    dtype: str  # in safetensors' words: "F32", "BF16"
    shape: tuple[int, ...]
    read: Callable[[], Tensor]  # its dtype kept, on the CPU


def list_tensors(folder: Path, *, layout: str) -> dict[str, StoredTensor]:
    """List the tensors of model.safetensors, of the files that its index names, or of a state dict of NeoBERT's code.

    Args:
        layout: For a llama folder, the head beside the encoder is listed as well.

    Raises:
        MissingInputError: There are no weights, or a file that the index names is not there.
        ConversionError: The weights are pickled otherwise, a file is damaged, or index and files do not agree.
    """
    stored = _list_folder(folder)
    if layout != "llama":
        return stored
    if not (folder / HEAD_FOLDER / WEIGHTS).is_file():
        raise ConversionError(
            f"{folder}: there is no {HEAD_FOLDER}/{WEIGHTS}, so it holds no masked-language-model head (what Llama "
            "calls lm_head predicts the next token); pre-training continues only from a model with its own head."
        )
    head = _list_file(folder / HEAD_FOLDER / WEIGHTS)
    if twice := sorted(stored.keys() & head.keys()):
        raise ConversionError(f"{folder}: {quote(twice[0])} is in {HEAD_FOLDER} as well; remove one of them.")
    return stored | head


def _list_folder(folder: Path) -> dict[str, StoredTensor]:
    single, index_path = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index_path.is_file():
        raise ConversionError(f"{folder}: {WEIGHTS} and {INDEX} are both there; remove what is left of another model.")
    if single.is_file():
        return _list_file(single)
    if not index_path.is_file():
        if (folder / _STATE_DICT).is_file():
            return _list_state_dict(folder / _STATE_DICT)
        raise _no_weights(folder)
    weight_map = read_weight_map(index_path)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted({folder / name for name in weight_map.values()}):
        if not file.is_file():
            raise MissingInputError(f"{file}: no such file, but {INDEX} names it; fetch the folder again.")
        found = _list_file(file)
        for name in found:
            if weight_map.get(name) != file.name:
                raise ConversionError(
                    f"{file} holds {quote(name)}; for that, {INDEX} names {quote(weight_map.get(name))}. One of the "
                    "files belongs to another model: fetch the folder again."
                )
        tensors |= found
    if absent := [name for name in weight_map if name not in tensors]:
        raise ConversionError(
            f"{folder / weight_map[absent[0]]} does not hold {quote(absent[0])}, which {INDEX} lists there; fetch the "
            "folder again."
        )
    return tensors


def _no_weights(folder: Path) -> ConversionError | MissingInputError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return ConversionError(
            f"{folder}: the weights are pickled ({quote(pickles[0])}). Beside safetensors, only {_STATE_DICT} is read, "
            f"as NeoBERT's own code writes it. Save the weights as {WEIGHTS}; a file that holds a plain state dict can "
            f"also be renamed to {_STATE_DICT}."
        )
    return MissingInputError(f"{folder}: neither {WEIGHTS} nor {INDEX}; name a folder that holds weights.")


def _list_file(file: Path) -> dict[str, StoredTensor]:
    with _opened(file) as reader:
        slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118 (it is no mapping)
        return {
            name: StoredTensor(file, one.get_dtype(), tuple(one.get_shape()), partial(_read_tensor, file, name))
            for name, one in slices.items()
        }


def _read_tensor(file: Path, name: str) -> Tensor:
    with _opened(file) as reader:
        tensor: Tensor = reader.get_tensor(name)
        return tensor


def _list_state_dict(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file of torch.save, mapped and not yet read.

    Raises:
        ConversionError: It holds something else, asks for other objects, or is compressed.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if any(one.compress_type for one in entries) or sum(one.file_size for one in entries) > file.stat().st_size:
            raise ValueError("compressed; torch.save compresses nothing")  # and a few bytes could fill the memory
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # a damaged byte makes torch.load raise almost anything
        raise ConversionError(
            f"{file}: cannot be read safely ({short_reason(error)}); save the state dict alone as {WEIGHTS}."
        ) from error
    is_plain = isinstance(state, dict) and all(
        isinstance(name, str) and isinstance(one, Tensor) and one.layout is torch.strided and not one.is_meta
        for name, one in state.items()
    )
    if not is_plain or not state:
        raise ConversionError(f"{file}: holds no state dict of plain tensors; save the weights as {WEIGHTS}.")
    return {
        name: StoredTensor(file, _DTYPE_NAMES.get(one.dtype, str(one.dtype)), tuple(one.shape), one.detach().clone)
        for name, one in state.items()
    }


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except SafetensorError as error:
        raise ConversionError(f"{file}: not a safetensors file ({error!s:.200}); fetch it again.") from error
