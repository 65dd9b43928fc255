"""Command: is the model that is trained the model that is exported?

Builds the reference in plain PyTorch, the Megatron model and the Hugging Face export with the same random weights and
prints how far their logits are apart in fp32, with two controls that are wrong on purpose. The default is the full
28 x 768 model: half a minute of one core and 4 GB of memory. Exit code 0: as it should be; 1: not.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.errors import CommandParser, ConfigError, run_command


def main() -> int:
    """Measures, prints the table, and returns 0 or 1."""
    parser = CommandParser(__doc__)
    for flag, default in (("num-layers", 28), ("hidden-size", 768), ("num-attention-heads", 12), ("vocab-size", 30522)):
        parser.add_argument(f"--{flag}", type=int, default=default, metavar="N", help="default %(default)s")
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
    from checkpoint_conversion.parity import measure_parity

    measurements = measure_parity(Settings(model=model), vocab_size=arguments.vocab_size)
    print("against the reference, padded:")
    print(to_table({measurement.what: measurement.comparison for measurement in measurements}))
    if arguments.json is not None:
        figures = {measurement.what: measurement.comparison.to_report() for measurement in measurements}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    unexpected = [measurement.what for measurement in measurements if not measurement.as_expected]
    print(f"NOT as expected: {', '.join(unexpected)}" if unexpected else "as expected, the controls included")
    return 1 if unexpected else 0


if __name__ == "__main__":
    run_command(main)
