"""Hook of mkdocs: README.md becomes the start page, and files that the pages link to become pages of the site.

On GitHub `../SECURITY.md` and `../examples/slurm/pretrain.sh` are links to files. The site is read without the
repository, so it includes these files: Markdown rendered, other text as code. Links in these files are followed too.
Links to missing files stay as they are, and the strict build refuses them.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PREFIX = "repository/"
START = "README.md"
LINK = re.compile(r'(?:(?<=\]\()|(?<=srcset=")|(?<=src="))([^)"\s#]+)')
LANGUAGES = {".def": "text", ".sh": "bash", ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".txt": "text"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the start page, and a page for every file outside docs/ that a page links to, directly or through others."""
    root = Path(config.config_file_path).parent
    docs = Path(config.docs_dir).name
    waiting = [f"{docs}/{file.src_uri}" for file in files.documentation_pages()]
    if (root / START).is_file():
        files.append(File.generated(config, site_path(START, docs), content=as_page(root, START, docs)))
        waiting.append(START)
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
    """Point the links of a page of docs/ at the site's pages for files outside docs/."""
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir).name
    if page.file.src_uri.startswith(PREFIX) or page.file.src_uri == site_path(START, docs):
        return markdown  # `as_page` has done this
    return with_site_links(markdown, root=root, page=f"{docs}/{page.file.src_uri}", docs=docs)


def linked_files(root: Path, page: str) -> list[str]:
    """Return the files of the repository that a Markdown file links to, as paths from the root."""
    if not page.endswith(".md"):
        return []
    targets = [resolve(page, link) for link in LINK.findall((root / page).read_text(encoding="utf-8"))]
    return [target for target in targets if (root / target).is_file() and is_text(target)]


def resolve(page: str, link: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(page), link))  # noqa: PTH118, PTH120


def is_text(target: str) -> bool:
    return Path(target).suffix in {".md", "", *LANGUAGES}


def site_path(target: str, docs: str) -> str:
    """Return the site's path for a file of the repository; a file that is not Markdown gets a page that shows it."""
    if target == START:
        return "index.md"
    if target.startswith(f"{docs}/"):
        return target.removeprefix(f"{docs}/")
    return PREFIX + target + ("" if target.endswith(".md") else ".md")


def with_site_links(markdown: str, *, root: Path, page: str, docs: str) -> str:
    here = os.path.dirname(site_path(page, docs))  # noqa: PTH120

    def replace(match: re.Match[str]) -> str:
        target = resolve(page, match[1])
        in_site = target.startswith(f"{docs}/") or is_text(target)
        if "://" in match[1] or not (root / target).is_file() or not in_site:
            return match[1]
        return os.path.relpath(site_path(target, docs), here or ".")

    return LINK.sub(replace, markdown)


def as_page(root: Path, target: str, docs: str) -> str:
    text = (root / target).read_text(encoding="utf-8")
    if target.endswith(".md"):
        return with_site_links(text, root=root, page=target, docs=docs)
    return f"# {target}\n\n````{LANGUAGES.get(Path(target).suffix, 'text')}\n{text}````\n"
