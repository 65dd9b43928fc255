"""What a Hugging Face folder may hold before anything of it is believed, and which tensors lie in its files.

transformers runs no code of a folder that is loaded with trust_remote_code=False, and reads safetensors only where it
is told so. It still follows the names that a folder's own files contain: to weights in other folders, to the model
that an adapter belongs to, and to attention kernels on the network. Those are refused here.

The files themselves may be symbolic links, as they are in Hugging Face's cache. Listing tensors reads the files'
headers alone; nothing is allocated for a size that a header only claims.

What NeoBERT's own training code saves is a pickle. It is read by torch's weights-only loader, which creates tensors and
plain values and nothing else, and mapped from the file, of which nothing may be compressed.
"""

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_neobert.checkpoint.folder import POINTER
from megatron_neobert.errors import ConversionError, MissingInputError, short_reason
from megatron_neobert.text import listed

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MODELING_FILE = "modeling_neobert.py"  # in a folder of the neobert layout that we wrote
# Of accelerate, and of DeepSpeed up to ZeRO-2, whose weights lie under "module" in the precision of the forward.
DEEPSPEED_WEIGHTS = "mp_rank_00_model_states.pt"
_STATE_DICTS = ("state_dict.pt", DEEPSPEED_WEIGHTS)
HEAD_FOLDER = "mlm_head"  # below a folder whose layout has no place for a masked-language-model head
HEAD_NAMES = ("decoder.weight", "decoder.bias")  # of the tensors in it

_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_OWN_ATTENTION = (None, "eager", "sdpa")
_LARGEST_JSON_BYTES = 64 << 20  # an index of 100,000 tensors takes 10 MB
_MOST_LABELS = 10_000  # transformers makes a name for each before it looks at the weights; no key of ours needs any
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class StoredTensor(NamedTuple):
    """What a file's header holds of one tensor, and the way to the tensor itself."""

    file: Path
    dtype: str  # in safetensors' words: "F32", "BF16"
    shape: tuple[int, ...]
    read: Callable[[], Tensor]  # its dtype kept, on the CPU


def check_folder(folder: Path) -> dict[str, Any]:
    """The content of config.json of a folder whose files name nothing outside it.

    Raises:
        MissingInputError: There is no config.json.
        ConversionError: Naming the file, the key and what it asks for.
    """
    config_path, index_path = folder / "config.json", folder / INDEX
    if (folder / POINTER).is_file():
        raise MissingInputError(f"{folder} holds checkpoints of training; megatron-to-hf makes a Hugging Face folder.")
    if not config_path.is_file():
        raise MissingInputError(f"{folder}: no such folder, or one without config.json; name a Hugging Face folder.")
    config = read_object(config_path)
    for key in _ATTENTION_KEYS:
        if config.get(key) not in _OWN_ATTENTION:
            raise ConversionError(
                f"{config_path}: {key} is {quote(config[key])}, which transformers may fetch code for; only "
                "'eager' and 'sdpa' are accepted. Remove the key."
            )
    labels = config.get("num_labels")
    if isinstance(labels, (int, float)) and labels > _MOST_LABELS:
        raise ConversionError(
            f"{config_path}: num_labels is {quote(labels)}, and at most {_MOST_LABELS:,} are accepted, because "
            "transformers allocates them unseen. Remove the key."
        )
    if config.get("transformers_weights") is not None:
        raise ConversionError(
            f"{config_path}: transformers_weights is {quote(config['transformers_weights'])}; weights are read from "
            f"{WEIGHTS} or its index alone. Remove the key."
        )
    if (folder / "adapter_config.json").exists():
        raise ConversionError(
            f"{folder / 'adapter_config.json'}: an adapter changes a model that lies elsewhere; merge it into a whole "
            "model and remove the file."
        )
    if index_path.is_file():  # and neither a pipe nor a device, which end nobody's reading
        _read_weight_map(index_path)
    return config


def list_tensors(folder: Path, *, layout: str) -> dict[str, StoredTensor]:
    """Every tensor of model.safetensors, of the files that its index names, or of a state dict of NeoBERT's own code.

    Args:
        layout: Of a llama folder, the head beside the encoder is listed as well; of a neobert folder, the two halves of
            a feed-forward, which the fork pszemraj/NeoBERT keeps apart, are listed as one published matrix.

    Raises:
        MissingInputError: There are no weights, or a file that the index names is not there.
        ConversionError: The weights are pickled otherwise, a file is damaged, or index and files do not agree.
    """
    stored = _list_folder(folder)
    if layout == "neobert":
        return _join_halves(stored)
    if layout == "eurobert":
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


def _join_halves(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Halves that differ, or lie beside the whole matrix, keep their names, which no published model has."""
    joined = dict(stored)
    for name, gate in stored.items():
        up, whole = (name.replace(".ffn.w1.", f".ffn.{one}.") for one in ("w2", "w12"))
        if up == name or up not in stored or whole in stored or gate.shape == ():
            continue
        if (stored[up].shape, stored[up].dtype) == (gate.shape, gate.dtype):
            read = partial(_read_joined, (joined.pop(name), joined.pop(up)))
            joined[whole] = StoredTensor(gate.file, gate.dtype, (2 * gate.shape[0], *gate.shape[1:]), read)
    return joined


def _read_joined(entries: Iterable[StoredTensor]) -> Tensor:
    return torch.cat([entry.read() for entry in entries])


def _list_folder(folder: Path) -> dict[str, StoredTensor]:
    single, index_path = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index_path.is_file():
        raise ConversionError(f"{folder}: {WEIGHTS} and {INDEX} are both there; remove what is left of another model.")
    if single.is_file():
        return _list_file(single)
    if not index_path.is_file():
        pickled = [folder / name for name in _STATE_DICTS if (folder / name).is_file()]
        if len(pickled) != 1:
            raise _no_weights(folder)
        return _list_state_dict(pickled[0])
    weight_map = _read_weight_map(index_path)
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


def quote(value: object) -> str:
    """A value of a file as a message may show it: short, without control characters, and never nested."""
    return f"{value!r:.80}" if not isinstance(value, (dict, list)) else f"of {len(value)} entries"


def quote_names(names: Iterable[str]) -> str:
    """The first names, and the number of the others."""
    return listed(map(quote, names))


def _no_weights(folder: Path) -> ConversionError | MissingInputError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return ConversionError(
            f"{folder}: the weights are pickled ({quote(pickles[0])}). Beside safetensors, one file of the names "
            f"{' and '.join(_STATE_DICTS)} is read, as NeoBERT's own code writes them. Save the weights as {WEIGHTS}, "
            "or name the file that holds a state dict so and move other weights away."
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
    if file.name == DEEPSPEED_WEIGHTS and isinstance(state, dict):
        state = state.get("module")
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


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConversionError(f"{path}: has no weight_map from names to files; fetch it again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ConversionError(
                f"{path}: {quote(tensor)} shall be read from {quote(name)}, which is no safetensors file of the folder."
            )
    return weight_map


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        MissingInputError: There is no such file.
        ConversionError: It holds none, is suspiciously large, or has a key twice.
    """
    if not path.is_file():
        raise MissingInputError(f"{path}: no such file; name a Hugging Face folder.")
    if (size := path.stat().st_size) > _LARGEST_JSON_BYTES:
        raise ConversionError(f"{path}: {size:,} bytes are more than {_LARGEST_JSON_BYTES:,}; fetch it again.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path}: not JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: expected a JSON object, found {type(content).__name__}; fetch it again.")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{quote(twice)} is there twice")
    return content
