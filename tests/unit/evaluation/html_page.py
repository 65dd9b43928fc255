"""What a browser finds in a page: its tags, its text and the cells of its tables."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags with their attributes, all text, and a list of cells for each row of a table."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.lines, self._in_cell = "", list[list[str]](), False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.lines.append([])
        if tag == "td":
            self.lines[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.lines[-1][-1] += data.replace("\xa0", " ")
