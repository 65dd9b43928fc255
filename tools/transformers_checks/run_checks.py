"""Runs all checks on one folder with the transformers that is installed, and writes what came out as JSON.

    PYTHONPATH=tools python -m transformers_checks.run_checks FOLDER --output REPORT.json

Every check is a function that returns, raises NotApplicable with the reason, or raises anything else: then it failed.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers.utils import logging

from transformers_checks import behaviour, heads, usage
from transformers_checks.subject import CheckFailed, NotApplicable, Subject

CHECKS: dict[str, Callable[[Subject], None]] = {
    "tokenizer": usage.tokenizer,
    "AutoModel": heads.backbone,
    "AutoModelForMaskedLM, loss": heads.masked_lm,
    "AutoModelForSequenceClassification, loss": heads.sequence_classification,
    "AutoModelForTokenClassification, loss": heads.token_classification,
    "AutoModelForQuestionAnswering, loss": heads.question_answering,
    "pipeline fill-mask": usage.fill_mask,
    "pipeline feature-extraction": usage.feature_extraction,
    "pipeline text-classification": usage.text_classification,
    "pipeline token-classification": usage.token_classification,
    "pipeline question-answering": usage.question_answering,
    "Trainer, masked language model": usage.train_masked_lm,
    "Trainer, classification": usage.train_classification,
    "attention to both sides": behaviour.looks_both_ways,
    "padded = alone": behaviour.padded_as_alone,
    "packed = alone": behaviour.packed_as_alone,
    "sdpa = eager": behaviour.sdpa_as_eager,
    "inputs_embeds": behaviour.inputs_embeds,
    "hidden states": behaviour.hidden_states,
    "bfloat16": behaviour.bfloat16,
    "device_map": behaviour.device_map,
    "gradient checkpointing": behaviour.gradient_checkpointing,
    "resize": behaviour.resize,
    "save and reload": behaviour.save_and_reload,
}
_PACKAGES = ("transformers", "torch", "accelerate", "tokenizers", "huggingface_hub", "numpy")
_LONGEST_REASON = 300  # characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the folder's own code run")
    arguments = parser.parse_args()
    report = {
        "versions": {package: _version(package) for package in _PACKAGES},
        "checks": run_checks(arguments.folder, trusted=arguments.trust_remote_code),
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def run_checks(folder: Path, *, trusted: bool) -> dict[str, dict[str, Any]]:
    """Check -> {"outcome": "ok", "FAILED" or "not applicable", "seconds", and "reason" unless it is ok}."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    subject = Subject(folder, trusted)
    return {name: _run(name, check, subject) for name, check in CHECKS.items()}


def _run(name: str, check: Callable[[Subject], None], subject: Subject) -> dict[str, Any]:
    started = time.perf_counter()
    cell: dict[str, Any] = {"outcome": "ok"}
    try:
        if name != "tokenizer" and subject.reason_against_models is not None:
            raise NotApplicable(subject.reason_against_models)
        check(subject)
    except NotApplicable as reason:
        cell = {"outcome": "not applicable", "reason": str(reason)}
    except CheckFailed as reason:
        cell = {"outcome": "FAILED", "reason": str(reason)}
    except Exception as error:  # anything that transformers raises is an answer
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
        cell = {"outcome": "FAILED", "reason": text, "traceback": traceback.format_exc()}
    return {**cell, "seconds": round(time.perf_counter() - started, 2)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
