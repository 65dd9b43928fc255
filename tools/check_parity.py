"""Command: is the model that is trained the model that is exported?

Builds the reference in plain PyTorch, the Megatron model and the Hugging Face export with the same random weights and
prints how far their logits are apart on the same prompts: in fp32, in bfloat16, and in fp64 with every cast to fp32
taken out, which leaves nothing but algebra. Two controls are wrong on purpose: figures that they do not exceed by far
would prove nothing. The default is the full 28 x 768 model: half a minute of one core and 4 GB of memory. Exit code 0:
as it should be; 1: not.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.errors import CommandParser, ConfigError, run_command
from megatron_neobert.evaluation.options import positive

if TYPE_CHECKING:  # --help answers without importing torch
    from torch import Tensor

    from checkpoint_conversion.comparison import Comparison, Prompts

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTROL = "control: "


def main() -> int:
    """Measures, prints the table, and returns 0 or 1."""
    parser = CommandParser(__doc__)
    for flag, default in (("num-layers", 28), ("hidden-size", 768), ("num-attention-heads", 12), ("vocab-size", 30522)):
        parser.add_argument(f"--{flag}", type=positive, default=default, metavar="N", help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    if arguments.hidden_size % (2 * arguments.num_attention_heads):
        raise ConfigError(
            f"--hidden-size {arguments.hidden_size} is not a multiple of 2 x --num-attention-heads "
            f"{arguments.num_attention_heads}; rotary embeddings need heads of one even width."
        )
    model = ModelConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_attention_heads=arguments.num_attention_heads,
    )

    from checkpoint_conversion.comparison import to_table  # imports torch

    found: dict[str, Comparison] = {}
    unexpected = []
    for what, comparison, tolerance in measure_parity(Settings(model=model), vocab_size=arguments.vocab_size):
        found[what] = comparison
        # Equal within the tolerance of its precision; a control the opposite, by a factor of 100.
        is_control = what.startswith(CONTROL)
        if comparison.within(100 * tolerance if is_control else tolerance) == is_control:
            unexpected.append(what)
    print(f"against the reference, padded:\n{to_table(found)}")
    if arguments.json is not None:
        figures = {what: asdict(comparison) for what, comparison in found.items()}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"NOT as expected: {', '.join(unexpected)}" if unexpected else "as expected, the controls included")
    return 1 if unexpected else 0


def measure_parity(settings: Settings, *, vocab_size: int) -> "Iterator[tuple[str, Comparison, float]]":
    """Builds all implementations with the same weights and compares each with the reference on a padded batch.

    Joins a process group of one rank for a while, because Megatron needs one.

    Yields:
        What was compared, how far it is away, and the tolerance of its precision.
    """
    import copy

    import torch

    from checkpoint_conversion.comparison import (
        TOLERANCES,
        build_prompts,
        compare_logits,
        compare_models,
        dtype_name,
        make_loud,
        reference_model,
    )
    from checkpoint_conversion.hf_model import load_logit_model
    from checkpoint_conversion.mapping import COPY, NEOBERT, PAIR_ADJACENT, TABLES, to_internal
    from checkpoint_conversion.megatron_io import model_shape, reference_config
    from megatron_neobert.model.reference import ReferenceNeoBERT

    torch.set_grad_enabled(False)
    shape, fp32 = model_shape(settings, vocab_size=vocab_size), TOLERANCES[torch.float32]
    reference = make_loud(ReferenceNeoBERT(reference_config(settings, vocab_size=vocab_size)))
    tensors = to_internal(reference.state_dict(), shape, NEOBERT)
    max_tokens = settings.model.max_position_embeddings
    prompts = build_prompts(vocab_size, longest=max_tokens)
    expected_bsv = reference(*prompts)

    def compare(what: str, logits_bsv: "Tensor") -> "tuple[str, Comparison, float]":
        return what, compare_logits(expected_bsv, logits_bsv, prompts.attention_mask_bs), fp32

    yield compare("reference, packed", prompts.unpack(reference.forward_packed(*prompts.packed)))
    yield compare("Megatron model, packed", prompts.unpack(run_megatron(settings, tensors, prompts, vocab_size)))
    precise = copy.deepcopy(reference).double()
    for layout in TABLES:
        with exported(settings, tensors, vocab_size, layout) as folder:
            for dtype, tolerance in TOLERANCES.items():
                is_precise = dtype is torch.float64
                source = reference_model(precise if is_precise else reference, max_tokens=max_tokens)
                with in_float64() if is_precise else nullcontext():
                    checks = compare_models(source, load_logit_model(folder, dtype), prompts)
                for how, check in checks.items():
                    yield f"{layout}, {how}, {dtype_name(dtype)}", check, tolerance
    yield compare(f"{CONTROL}padding attended to", reference(prompts.tokens_bs))
    table = tuple(replace(entry, rule=COPY) if entry.rule is PAIR_ADJACENT else entry for entry in NEOBERT)
    with exported(settings, to_internal(reference.state_dict(), shape, table), vocab_size, "eurobert") as folder:
        yield compare(f"{CONTROL}rotary pairs not permuted", load_logit_model(folder).padded(*prompts))


def in_float64() -> AbstractContextManager[Any]:
    """While it is open, what would be cast to fp32 is cast to fp64."""
    import torch
    from torch.overrides import TorchFunctionMode

    class InFloat64(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.Tensor.float:
                return args[0].double()
            if func is not torch.Tensor.view:  # which reads the bytes of a file that holds fp32
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
                kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in kwargs.items()}
            return func(*args, **kwargs)

    return InFloat64()


def run_megatron(settings: Settings, tensors: "dict[str, Tensor]", prompts: "Prompts", vocab_size: int) -> "Tensor":
    """Logits [t, v] of the Megatron model holding `tensors`, on the GPU where there is one."""
    import torch

    from checkpoint_conversion.megatron_io import load_into_megatron
    from megatron_neobert.model.neobert import NeoBERTModel
    from megatron_neobert.runtime import distributed

    device = distributed.initialize(settings)
    try:
        model = NeoBERTModel(settings, vocab_size=vocab_size).to(device).eval()
        load_into_megatron(model, tensors)
        tokens_t, starts_n = (tensor.to(device) for tensor in prompts.packed)
        longest = int(starts_n.diff().max())
        logits_tv = model(tokens_t, starts_n, longest, torch.arange(len(tokens_t), device=device))
        return logits_tv[:, :vocab_size].float().cpu()
    finally:
        distributed.shut_down()


@contextmanager
def exported(settings: Settings, tensors: "dict[str, Tensor]", vocab_size: int, layout: str) -> Iterator[Path]:
    """The folder that a conversion of `tensors` writes, for as long as the block lasts; nothing is compared."""
    from checkpoint_conversion.hf_writer import FolderSpec, write_folder
    from checkpoint_conversion.megatron_io import model_shape
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as place:
        vocabulary, target = Path(place) / "vocab.txt", Path(place) / "model"
        words = [f"w{number}" for number in range(vocab_size - len(SPECIAL))]
        vocabulary.write_text("".join(f"{word}\n" for word in (*SPECIAL, *words)), encoding="utf-8")
        spec = FolderSpec(settings.model, model_shape(settings, vocab_size=vocab_size), load_tokenizer(vocabulary))
        target.mkdir()
        write_folder(target, layout, spec, tensors)
        yield target


if __name__ == "__main__":
    run_command(main)
