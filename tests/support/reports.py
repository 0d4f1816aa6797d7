"""Pages of the tuner's report, as a browser reads them."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags that balance, and no reference to anything outside."""

    VOID = ("meta", "br", "path", "use", "circle", "rect", "line", "image", "stop")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href") or (value or "").startswith(("#", "data:")), value
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
