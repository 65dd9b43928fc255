"""Every block of docs/python.md runs, in order, and uses names of the API alone; each of these names is on the page."""

import ast
import re
import shutil
import sys
from pathlib import Path

from commands import ENVIRONMENT, REPOSITORY, succeed
from test_tutorial import TINY

PAGE = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_blocks_of_the_page_run_in_order_beside_a_corpus_and_a_run(tiny_corpus, tmp_path: Path):
    (tmp_path / "corpus").mkdir()
    for path in Path(tiny_corpus.prefix).parent.glob("tiny_content_document*"):
        shutil.copy(path, tmp_path / "corpus" / path.name.replace("tiny", "web"))
    shutil.copytree(tiny_corpus.tokenizer, tmp_path / "tokenizer")
    (tmp_path / "tiny").write_text(TINY, encoding="utf-8")  # a file goes before the recipe of that name
    train = ["--config", "tiny", "--data-path", "corpus/web_content_document", "--tokenizer-model", "tokenizer"]
    train += ["--save", "runs/first"]
    environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "NPROC_PER_NODE": "1"}
    program = "\n".join(BLOCKS) + "\nassert no_lists(api.Record('a', 'shard', {})).fields == {'characters': 1}\n"
    for command in (["-m", "megatron_neobert", "train", *train], ["-c", program]):
        printed = succeed(sys.executable, *command, cwd=tmp_path, env=environment)
    assert "packed sequences" in printed and "nats per masked token" in printed
    assert (tmp_path / "model" / "config.json").is_file()


def test_page_uses_every_name_of_the_api_and_imports_nothing_else_of_this_project():
    tree = ast.parse((REPOSITORY / "megatron_neobert" / "api.py").read_text(encoding="utf-8"))
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    used = set(re.findall(r"\bapi\.(\w+)", PAGE)) - {"py"}
    assert used == set(names)
    imported = set(re.findall(r"(?:from|import) (megatron_neobert[\w.]*|checkpoint_conversion[\w.]*)", PAGE))
    assert imported == {"megatron_neobert"}
