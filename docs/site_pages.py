"""Hook of mkdocs: files of the repository that the documentation links to become pages of the site.

On GitHub `../SECURITY.md` and `../examples/slurm/pretrain.sh` are links to files; a site that is read without a network
and without the repository has to bring them along. Markdown files are rendered, other text is shown as it is. Their own
links are followed too, so that what one page says about another can be read. Links to what does not exist are left as
they are, and the strict build refuses them.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PREFIX = "repository/"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
LANGUAGES = {".def": "text", ".sh": "bash", ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".txt": "text"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds a page for every file outside docs/ that a page links to, or a page of such a page."""
    root = Path(config.config_file_path).parent
    docs = Path(config.docs_dir).name
    waiting = [f"{docs}/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in linked_files(root, page):
            if target not in seen and not target.startswith(f"{docs}/"):
                seen.add(target)
                waiting.append(target)
                files.append(File.generated(config, site_path(target, docs), content=as_page(root, target, docs)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Points the links of a page of docs/ at the pages that stand for files outside."""
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir).name
    if page.file.src_uri.startswith(PREFIX):
        return markdown  # done when it was made
    return with_site_links(markdown, root=root, page=f"{docs}/{page.file.src_uri}", docs=docs)


def linked_files(root: Path, page: str) -> list[str]:
    """Files of the repository that a Markdown file links to, as paths from the root."""
    if not page.endswith(".md"):
        return []
    targets = [resolve(page, link) for link in LINK.findall((root / page).read_text(encoding="utf-8"))]
    return [target for target in targets if (root / target).is_file() and is_text(target)]


def resolve(page: str, link: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(page), link))  # noqa: PTH118, PTH120


def is_text(target: str) -> bool:
    return Path(target).suffix in {".md", "", *LANGUAGES}


def site_path(target: str, docs: str) -> str:
    """Where the site has a file of the repository; other files than Markdown are pages that show them."""
    if target.startswith(f"{docs}/"):
        return target.removeprefix(f"{docs}/")
    return PREFIX + target + ("" if target.endswith(".md") else ".md")


def with_site_links(markdown: str, *, root: Path, page: str, docs: str) -> str:
    here = os.path.dirname(site_path(page, docs))  # noqa: PTH120

    def replace(match: re.Match[str]) -> str:
        target = resolve(page, match[1])
        if "://" in match[1] or not (root / target).is_file() or not is_text(target):
            return match[1]
        return os.path.relpath(site_path(target, docs), here or ".")

    return LINK.sub(replace, markdown)


def as_page(root: Path, target: str, docs: str) -> str:
    text = (root / target).read_text(encoding="utf-8")
    if target.endswith(".md"):
        return with_site_links(text, root=root, page=target, docs=docs)
    return f"# {target}\n\n````{LANGUAGES.get(Path(target).suffix, 'text')}\n{text}````\n"
