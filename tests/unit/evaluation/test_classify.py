"""Classification of a user's own texts: formats, parts by hash, and a whole evaluation with its figure."""

import math
import random
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import datasets
import matplotlib.image
import numpy as np
import pyarrow
import pytest
import torch
import transformers
from json_files import edit_json, read_json, write_jsonl
from pyarrow import parquet
from sklearn import metrics
from unit.evaluation.glue_inputs import one_point
from unit.evaluation.pseudo_perplexity_models import write_model

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation import classify
from megatron_neobert.evaluation.classify import ClassifyTask, run_classify
from megatron_neobert.evaluation.classify_data import find_datasets, read_dataset
from megatron_neobert.evaluation.glue import TASKS
from megatron_neobert.evaluation.models import load_tokenizer
from megatron_neobert.evaluation.options import ClassifyOptions

ANIMAL, THING = "animal", "thing"
HUB = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=[THING, ANIMAL])})


def rows(count: int, seed: int) -> list[tuple[str, str]]:
    """Return different texts, which are about an animal if they have a cat."""
    rng, texts = random.Random(seed), set[str]()
    while len(texts) < count:
        texts.add(" ".join(rng.choices(["cat", "sat", "on", "a", "mat", "the"], k=8)))
    return [(text, ANIMAL if "cat" in text else THING) for text in sorted(texts)]


def write_csv(path: Path, pairs: list[tuple[str, ...]], header: str = "text,label") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(pair) for pair in pairs)]) + "\n", encoding="utf-8")


def test_a_single_file_is_divided_by_the_text_so_that_new_rows_move_no_old_ones(tmp_path):
    pairs = rows(400, 0)
    write_csv(tmp_path / "old" / "mine.csv", pairs)
    write_csv(tmp_path / "new" / "mine.csv", [*rows(100, 1), *pairs, *pairs[:50]])
    old, new = (read_dataset(tmp_path / name, "mine") for name in ("old", "new"))
    assert list(old) == ["train", "validation", "test"]
    assert sum(len(part.labels) for part in old.values()) == 400
    for split, part in old.items():
        assert set(part.texts[0]) <= set(new[split].texts[0])
        others = {text for other in old if other != split for text in new[other].texts[0]}
        assert not set(part.texts[0]) & others
    assert 20 < len(old["validation"].labels) < 60 and 20 < len(old["test"].labels) < 60  # 37 and 39


def test_labels_may_be_names_numbers_or_classes_of_the_hub_and_a_row_may_have_two_texts(tmp_path):
    write_csv(tmp_path / "pairs" / "train.csv", [("a", "cat", "1"), ("a", "mat", "0")] * 20, "text,text2,label")
    write_csv(tmp_path / "pairs" / "validation.csv", [("the", "cat", "1")], "text,text2,label")
    table = datasets.Dataset.from_dict({"text": ["cat", "mat"] * 20, "label": [1, 0] * 20}, features=HUB)
    (tmp_path / "hub").mkdir()
    for split in ("train-00000-of-00001", "dev", "test"):
        table.to_parquet(tmp_path / "hub" / f"{split}.parquet")
    assert find_datasets(tmp_path) == ["hub", "pairs"]
    pairs = read_dataset(tmp_path, "pairs")
    assert (pairs["validation"].texts, pairs["validation"].labels) == ([["the"], ["cat"]], ["1"])
    assert list(pairs) == ["train", "validation"]
    assert read_dataset(tmp_path, "hub")["test"].labels == [ANIMAL, THING] * 20


def test_texts_and_labels_like_dates_numbers_and_booleans_are_equal_in_all_formats(tmp_path):
    names = ["2024-01-01", "1", "true", "2024-01-01T00:00:00Z", "01", "NA"]
    labels = ["2024-01-01", "1.0", "True", "2024-01-01T00:00:00Z", "01", "NA"]
    write_csv(tmp_path / "mine" / "train.csv", [("12", label) for label in labels])
    values = ["2024-01-01", 1, True, "2024-01-01T00:00:00Z", "01", "NA"]
    write_jsonl(tmp_path / "mine" / "validation.jsonl", [{"text": "2024-02-01", "label": value} for value in values])
    table = datasets.Dataset.from_dict({"text": [12.0], "label": [1.0]})
    table.to_parquet(tmp_path / "mine" / "test-00000-of-00001.parquet")
    splits = read_dataset(tmp_path, "mine")
    assert [part.labels for part in splits.values()] == [names, names, ["1"]]
    assert [part.texts[0] for part in splits.values()] == [["12"] * 6, ["2024-02-01"] * 6, ["12"]]
    table.to_parquet(tmp_path / "shards-00000-of-00001.parquet")
    assert find_datasets(tmp_path) == ["mine", "shards"]


def test_values_of_columns_that_are_not_used_may_have_any_type(tmp_path):
    values = [None, 7, "seven", [7], 2**70, 1.5]
    for number, value in enumerate(values):
        texts = [{"text": "cat", "label": ANIMAL, "meta": value}, {"text": "mat", "label": THING, "meta": 7}]
        write_jsonl(tmp_path / "mine" / f"train-{number}-of-6.jsonl", texts)
    for number, value in enumerate(("1.5", "seven")):
        write_csv(tmp_path / "mine" / f"validation-{number}-of-2.csv", [("cat", ANIMAL, value)], "text,label,meta")
    assert find_datasets(tmp_path) == ["mine"]
    splits = read_dataset(tmp_path, "mine")
    assert splits["train"].texts == [["cat", "mat"] * 6] and splits["validation"].labels == [ANIMAL] * 2


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_two_columns_of_one_name_are_refused_with_the_name(tmp_path, ending):
    names, path = ["text", "label", "label"], tmp_path / "mine" / f"train.{ending}"
    write_csv(path, [("cat", ANIMAL, "1"), ("mat", THING, "2")], ",".join(names))
    if ending == "parquet":
        column = pyarrow.array(["cat", "mat"])
        parquet.write_table(pyarrow.Table.from_arrays([column] * 3, names=names), path)
    with pytest.raises(DataError, match=f"{path} has several columns 'label'.*rename"):
        read_dataset(tmp_path, "mine")


def test_macro_f1_is_the_mean_over_all_classes_of_the_head():
    task, labels = ClassifyTask("mine", ("train", "validation"), ("accuracy",), ("a", "b", "c", "d")), np.array([0, 1])
    logits = np.eye(4)[[0, 1]]
    prediction = transformers.EvalPrediction(logits, labels)
    assert task.score(prediction, None) == {"accuracy": 1.0, "macro_f1": 0.5}
    logits[1] = np.nan
    assert task.score(prediction, None)["macro_f1"] == 0.25, "an output that is not a number adds no class"


@pytest.mark.parametrize(
    ("columns", "features", "message"),
    [
        ({"text": ["cat"], "label": [-1]}, HUB, "test row 0 has no label"),
        ({"text": ["cat", "mat"], "label": [1.0, math.nan]}, None, "test row 1 has no label"),
        ({"text": ["cat"], "label": [["a", "b"]]}, None, "test row 0 has no label"),
        ({"text": [None], "label": ["a"]}, None, "test row 0 has no text"),
    ],
)
def test_row_without_a_text_and_exactly_one_known_label_is_refused(tmp_path, columns, features, message):
    write_csv(tmp_path / "mine" / "train.csv", rows(40, 0))
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "mine" / "test.parquet")
    with pytest.raises(DataError, match=message):
        read_dataset(tmp_path, "mine")


def test_folder_of_a_dataset_and_a_dataset_of_one_class_are_refused(tmp_path):
    write_csv(tmp_path / "mine" / "train.csv", [(text, THING) for text, _ in rows(60, 0)])
    with pytest.raises(DataError, match=r"mine is a dataset itself, .* --tasks mine"):
        find_datasets(tmp_path / "mine")
    with pytest.raises(DataError, match="mine: every row has the label 'thing'"):
        run_classify(ClassifyOptions(model=write_model(tmp_path / "model", "Bert"), data_dir=tmp_path, output=tmp_path))


TRAIN = "text,label\ncat,animal\nmat,thing\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"mine.csv": "text,category\na,x\n"}, "has the columns text, category, but no label"),
        ({"mine.csv": "text,label\n" + "a,x\n" * 4}, "has 4 rows, too few to divide"),
        ({"mine.csv": "text,label\n\xe0,x\n"}, r"mine\.csv cannot be read .*invalid UTF8"),
        (
            {"mine/train.csv": TRAIN, "mine/dev.csv": "text,label\ncat,Animal\n"},
            "validation has the labels Animal, and train has none of them, but animal, ",
        ),
        (
            {"mine/train.csv": "text,text2,label\na,cat,1\na,mat,0\n", "mine/dev.csv": "text,label\na,1\n"},
            "mine: validation has the columns text, label, but no text2",
        ),
    ],
)
def test_files_without_labels_or_with_other_columns_or_too_few_rows_are_refused(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=message):
        read_dataset(tmp_path, "mine")
    with pytest.raises(MissingInputError, match=r"neither other\.csv"):
        read_dataset(tmp_path, "other")


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "first_token"),
    [("neobert", ...), ("EuroBert", "bos"), ("ModernBert", "cls")],
)
def test_head_reads_the_mean_of_the_tokens_and_a_saved_folder_keeps_it(tmp_path, kind, first_token):
    folder = write_model(tmp_path / "model", kind)
    edit_json(folder / "config.json", classifier_pooling=first_token)
    task = ClassifyTask("cats", ("train", "validation"), ("accuracy",), (ANIMAL, THING))
    model = task.load(folder)
    text = load_tokenizer(folder)(["the cat sat on a mat", "the"], padding=True, return_tensors="pt")
    alone = {name: values[1:, :3] for name, values in text.items()}  # the second text without its padding
    logits = model(**text).logits
    torch.testing.assert_close(model(**alone).logits, logits[1:], rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(saved(**text).logits, logits)

    def keep_first_token(module, inputs, outputs):
        outputs.last_hidden_state[:, 1:] = 0

    glue = TASKS["rte"].load(folder)  # the control: its head reads the first token
    for each, is_equal in ((model, False), (saved, False), (glue, True)):
        expected = each(**text).logits
        each.base_model.register_forward_hook(keep_first_token)
        assert torch.allclose(each(**text).logits, expected) == is_equal


def test_scores_and_figure_are_those_of_the_weights_that_are_kept(tmp_path, monkeypatch, capsys):
    name = "cats\x1b[31m"  # a terminal would print red text from here on
    write_model(tmp_path / "model", "Bert")
    write_csv(tmp_path / "data" / f"{name}.csv", rows(300, 2))
    drawn = mock.Mock(wraps=classify.plot_confusion)
    monkeypatch.setattr(classify, "plot_confusion", drawn)
    options = one_point(ClassifyOptions, tmp_path, epochs=8)
    folder = run_classify(options)
    result = read_json(folder / "classify.json")["results"]["tasks"][name]
    kept, splits = Path(result["kept"]), read_dataset(options.data_dir, name)
    model, tokenizer = transformers.AutoModelForSequenceClassification.from_pretrained(kept), load_tokenizer(kept)
    texts, expected = splits["test"].texts[0], splits["test"].labels
    logits = [model.eval()(**tokenizer(text, return_tensors="pt")).logits for text in texts]
    predicted = [model.config.id2label[logits_bl.argmax().item()] for logits_bl in logits]
    scores = {name: value["mean"] for name, value in result["metrics"].items()}
    assert scores["test_accuracy"] == metrics.accuracy_score(expected, predicted) > 0.7
    assert scores["test_macro_f1"] == pytest.approx(metrics.f1_score(expected, predicted, average="macro"))
    (best,), (last,) = result["best_steps"], result["steps"]
    page = (folder / "classify.md").read_text()
    assert "| seeds | best step | last step |" in page and f"| 0 | {best} | {last} |" in page
    assert "| validation accuracy | test accuracy | metrics | rows | batch size |" in page
    shown = ", ".join(f"{split} {len(part.labels)}" for split, part in splits.items())
    values = " | ".join(f"{100 * scores[f'{split}accuracy']:.1f}" for split in ("", "test_"))
    assert f" | {values} | " in page and f" | {shown} | 8 | " in page
    assert "| cats" in page and "\x1b" not in "".join((page, *(printed := capsys.readouterr())))
    assert f"0/1 runs | rows: {shown} | at most {8 * -(-len(splits['train'].labels) // 8):,} steps\n" in printed.err
    _, _, split, labels, of_figure = drawn.call_args.args
    matrices = [metrics.confusion_matrix(*each) for each in ((labels, of_figure), (expected, predicted))]
    assert split == "test" and matrices[0].tolist() == matrices[1].tolist()
    assert matplotlib.image.imread(folder / "classify" / quote(name, safe="") / "confusion.png").shape[0] > 300


def test_figure_of_many_classes_shows_those_of_the_most_frequent_confusions():
    counts = np.diag(np.full(77, 40))
    counts[70, 3], counts[5, 6], counts[6, 5], counts[9, 70] = 9, 8, 7, 1
    assert classify.most_confused(counts, 4) == [3, 5, 6, 70]
    assert classify.most_confused(counts, 5) == [3, 5, 6, 9, 70]
    assert classify.most_confused(counts[:3, :3], 4) == [0, 1, 2]
