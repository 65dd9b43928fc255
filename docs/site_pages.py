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

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "repository/"
START = "README.md"
LINK = re.compile(r'(?:(?<=\]\()|(?<=srcset=")|(?<=src="))([^)"\s#]+)')
LANGUAGES = {".def": "text", ".sh": "bash", ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".txt": "text"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the start page, and a page for every file outside docs/ that a page links to, directly or through others."""
    waiting = [START, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    files.append(File.generated(config, site_path(START), content=as_page(START)))
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in linked_files(page):
            if target not in seen and not target.startswith("docs/"):
                seen.add(target)
                waiting.append(target)
                files.append(File.generated(config, site_path(target), content=as_page(target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page of docs/ at the site's pages for files outside docs/."""
    if page.file.src_uri.startswith(PREFIX) or page.file.src_uri == site_path(START):
        return markdown  # `as_page` has done this
    return with_site_links(markdown, page=f"docs/{page.file.src_uri}")


def linked_files(page: str) -> list[str]:
    """Return the files of the repository that a Markdown file links to, as paths from the root."""
    if not page.endswith(".md"):
        return []
    targets = [resolve(page, link) for link in LINK.findall((ROOT / page).read_text(encoding="utf-8"))]
    return [target for target in targets if (ROOT / target).is_file() and is_text(target)]


def resolve(page: str, link: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(page), link))  # noqa: PTH118, PTH120


def is_text(target: str) -> bool:
    return Path(target).suffix in {".md", "", *LANGUAGES}


def site_path(target: str) -> str:
    """Return the site's path for a file of the repository; a file that is not Markdown gets a page that shows it."""
    if target == START:
        return "index.md"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return PREFIX + target + ("" if target.endswith(".md") else ".md")


def with_site_links(markdown: str, *, page: str) -> str:
    here = os.path.dirname(site_path(page))  # noqa: PTH120

    def replace(match: re.Match[str]) -> str:
        target = resolve(page, match[1])
        in_site = target.startswith("docs/") or is_text(target)
        if "://" in match[1] or not (ROOT / target).is_file() or not in_site:
            return match[1]
        return os.path.relpath(site_path(target), here or ".")

    return LINK.sub(replace, markdown)


def as_page(target: str) -> str:
    text = (ROOT / target).read_text(encoding="utf-8")
    if target.endswith(".md"):
        return with_site_links(text, page=target)
    return f"# {target}\n\n````{LANGUAGES.get(Path(target).suffix, 'text')}\n{text}````\n"
