"""The words of a model card, from facts that were read elsewhere.

Nothing here is guessed: a fact that the folder does not hold leaves out its row, its sentence or its section. Settings
that name files of the machine where the model was trained are never shown.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult

from checkpoint_conversion.model_card_examples import (
    beside_example,
    fill_mask_example,
    hidden_states_example,
    lora_example,
    packed_example,
    remote_fill_mask_example,
    sentence_example,
)

NO_MODEL_ID = "path/to/this/folder"  # stands in the examples until the model's name on the Hub is known

_HEADS = {
    "eurobert": ("AutoModelForSequenceClassification", "AutoModelForTokenClassification"),
    "neobert": (
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
        "AutoModelForQuestionAnswering",
    ),
}

_BIAS_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size")

# What each layout needs; tools/check_transformers.py tries these versions.
_REQUIREMENTS = {
    "eurobert": "transformers 5.3 or later, which has this architecture as EuroBERT; no remote code",
    "neobert": "transformers 4.48 or later, with `trust_remote_code=True`: that runs `modeling_neobert.py` of this "
    "folder, one file that imports torch and transformers alone",
    "llama": "transformers 5.3 or later, whose Llama heeds `is_causal: false`; no remote code. Earlier versions load "
    "the folder without an error and let no token see the ones after it, which is another function",
}

# What the table of settings shows: its words, and where the settings of the run hold the value.
_SETTINGS = (
    ("tokens per row", "data", "seq_length"),
    ("documents of one row", "data", "batch_layout"),
    ("rows per batch", "training", "global_batch_size"),
    ("share of tokens predicted", "data", "mask_prob"),
    ("predicted tokens become", "data", "mask_replacement"),
    ("iterations planned", "training", "train_iters"),
    ("computed in bfloat16", "training", "bf16"),
    ("seed", "training", "seed"),
    ("optimizer", "optimizer", "optimizer"),
    ("peak learning rate", "optimizer", "lr"),
    ("learning rate after the decay", "optimizer", "min_lr"),
    ("decay of the learning rate", "optimizer", "lr_decay_style"),
    ("iterations of warm-up", "optimizer", "lr_warmup_iters"),
    ("weight decay", "optimizer", "weight_decay"),
    ("Adam's betas", "optimizer", "adam_beta1"),
    ("", "optimizer", "adam_beta2"),
    ("Adam's epsilon", "optimizer", "adam_eps"),
    ("largest gradient norm", "optimizer", "clip_grad"),
)

# Values that say little by themselves.
_WORDS = {
    "packed": "each sees itself alone",
    "concatenated": "all see each other",
    "all_mask": "the mask token, always",
    "bert": "80 % the mask token, 10 % a random token, 10 % themselves",
}

# Figures of a comparison: the words and the format of each.
_MEASURES = {
    "tokens": ("tokens compared", ",.0f"),
    "largest_logit": ("largest logit", ".4g"),
    "max_abs": ("largest difference", ".2g"),
    "relative": ("relative to the largest logit", ".2g"),
    "cosine": ("lowest cosine of a token", ".8f"),
    "argmax_agreement": ("same prediction", ".2%"),
}

_CITATION = """\
```bibtex
@misc{lebreton2025neobert,
  title = {{NeoBERT}: A Next-Generation {BERT}},
  author = {Le Breton, Lola and Fournier, Quentin and El Mezouar, Mariam and Morris, John X. and Chandar, Sarath},
  year = {2025},
  eprint = {2502.19587},
  archivePrefix = {arXiv}
}
```"""


@dataclass(frozen=True)
class CardFacts:
    """What the files of a folder say about the model in it."""

    layout: str  # eurobert, neobert or llama
    config: dict[str, Any]
    parameters: int
    mask_token: str
    lowercase: bool
    has_head: bool  # in the class that config.json names; of the llama layout it lies beside
    sentence_transformers: bool
    report: dict[str, Any]  # of the conversion; empty where the folder has none

    def section(self, name: str) -> dict[str, Any]:
        """One object of the report, or an empty one."""
        found = self.report.get(name)
        return found if isinstance(found, dict) else {}


def title_of(model_id: str) -> str:
    return "NeoBERT" if model_id == NO_MODEL_ID else model_id.rsplit("/", maxsplit=1)[-1]


def write_body(facts: CardFacts, *, model_id: str, evaluations: Sequence[EvalResult]) -> str:
    """Everything below the front matter."""
    sections = [
        (f"# {title_of(model_id)}", _describe(facts)),
        ("## Use", _usage(facts, model_id)),
        ("## Pre-training", _pre_training(facts)),
        ("## Evaluation", _evaluation(evaluations)),
        ("## Faithful to the training checkpoint", _parity(facts)),
        ("## Limits", _limits(facts)),
        ("## Citation", _CITATION),
    ]
    return "\n\n".join(f"{heading}\n\n{text}" for heading, text in sections if text) + "\n"


def _describe(facts: CardFacts) -> str:
    config = facts.config
    sizes = {
        "layers": config.get("num_hidden_layers"),
        "width": config.get("hidden_size"),
        "attention heads": config.get("num_attention_heads"),
        "parameters": facts.parameters,
        "stored as": config.get("dtype") or config.get("torch_dtype"),
        "vocabulary, tokens": config.get("vocab_size"),
        "longest input, tokens": config.get("max_position_embeddings"),
    }
    rows = [(name, _shown(value)) for name, value in sizes.items() if value is not None]
    return (
        "A bidirectional encoder of the [NeoBERT](https://arxiv.org/abs/2502.19587) architecture: RMSNorm before each "
        "part of a layer, rotary positions, SwiGLU.\n\n" + _table(("", ""), rows)
    )


def _usage(facts: CardFacts, model_id: str) -> str:
    remote = ", trust_remote_code=True" if facts.layout == "neobert" else ""
    texts = [f"Needs {_REQUIREMENTS[facts.layout]}."]
    if facts.sentence_transformers:
        texts += ["Vectors of texts, the mean over their tokens:", sentence_example(model_id, remote)]
    if facts.has_head:
        example = remote_fill_mask_example if remote else fill_mask_example
        texts += ["Masked words:", example(model_id, facts.mask_token)]
    texts += ["Hidden states:", hidden_states_example(model_id, remote)]
    if facts.layout == "llama":
        texts += [
            "transformers has no masked-language-model class for Llama; the head lies beside the model:",
            beside_example(model_id, facts.mask_token),
        ]
    else:
        *first, last = (f"`{head}`" for head in _HEADS[facts.layout])
        texts += [
            f"Fine-tuning adds a new head: {', '.join(first)} and {last} load the folder in the same way. The head of "
            "sequence classification has two layers, of which peft saves only the second by itself. With LoRA, name "
            "both:",
            lora_example(),
        ]
    if facts.layout == "neobert":
        texts += [
            "Documents end to end in one row, without padding and without attention from one to another:",
            packed_example(model_id),
        ]
    return "\n\n".join(texts)


def _pre_training(facts: CardFacts) -> str:
    source, settings = facts.section("source"), facts.section("training")
    rows = [
        (word, _shown(source[key]))
        for word, key in (("iteration", "iteration"), ("tokens seen", "consumed_tokens"))
        if source.get(key)
    ]
    for word, section, key in _SETTINGS:
        values = settings.get(section)
        if not isinstance(values, dict) or values.get(key) is None:
            continue
        if word:
            rows.append((word, _shown(values[key])))
        else:  # the second of two values in one row
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} and {_shown(values[key])}")
    if not rows:
        return ""
    text = "Masked-language modelling with megatron-neobert."
    if source.get("continued_from"):
        text += " It began from the weights of another run or model; what is counted here is this run alone."
    return f"{text}\n\n" + _table(("", ""), rows)


def _evaluation(evaluations: Sequence[EvalResult]) -> str:
    if not evaluations:
        return ""
    rows = [
        (
            result.task_name or result.task_type,
            " ".join(filter(None, (result.dataset_name, result.dataset_config, result.dataset_split))),
            result.metric_name or result.metric_type,
            str(result.metric_value),
        )
        for result in evaluations
    ]
    return _table(("task", "data", "metric", "value"), rows)


def _parity(facts: CardFacts) -> str:
    verification = facts.section("verification")
    runs = {name: figures for name, figures in verification.items() if isinstance(figures, dict)}
    if not runs:
        return ""
    versions = facts.section("versions")
    tried = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    rows = [
        (word, *(_figure(figures.get(key), form) for figures in runs.values()))
        for key, (word, form) in _MEASURES.items()
    ]
    with_versions = f" ({tried})" if tried else ""
    compared = facts.section("compared")
    content = (
        f"all {compared['weights']} weights were equal to the checkpoint's, rounded to the stored precision, bit for "
        f"bit, and so were the settings {', '.join(compared['settings'])}. Its logits"
        if compared
        else "its logits"
    )
    return (
        f"When the folder was written and loaded again, {content} were compared with those of a reference "
        f"implementation that held the checkpoint's weights, on fixed rows of random tokens{with_versions}. In "
        "float32, unless a column says otherwise:\n\n" + _table(("", *runs), rows)
    )


def _limits(facts: CardFacts) -> str:
    longest = facts.config.get("max_position_embeddings")
    data = facts.section("training").get("data")
    trained = data.get("seq_length") if isinstance(data, dict) else None
    limits = ["An encoder: it fills masks and gives vectors, and does not generate text."]
    if isinstance(trained, int) and isinstance(longest, int) and trained < longest:
        limits.append(f"Its last stage of training had no input longer than {trained:,} tokens.")
    if facts.section("source").get("iteration"):
        limits.append(
            "Pre-trained only: fine-tune it before vectors of texts are compared, or anything is classified with it."
        )
    if facts.lowercase:
        limits.append("The tokenizer makes no difference between upper and lower case.")
    if facts.layout == "eurobert":
        limits.append("transformers 5.23 has no question-answering class for this architecture.")
    if facts.layout == "eurobert" and facts.section("source"):  # of others' folders we do not know that they are zero
        layers, hidden, width = (facts.config[name] for name in _BIAS_SIZES)
        limits.append(
            f"{layers * (2 * width + hidden):,} of its parameters are biases of the feed-forward layers, zeros that "
            "EuroBERT has and NeoBERT has not. Fine-tuning trains them unless they are frozen: `for name, parameter in "
            'model.named_parameters(): parameter.requires_grad &= not (".mlp." in name and name.endswith("bias"))`.'
        )
    limits.append("What it predicts comes from its training texts, with their errors and prejudices.")
    return "\n".join(f"- {limit}" for limit in limits)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _figure(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else ""


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = " ".join(str(value).split())
    return _WORDS.get(text, text)
