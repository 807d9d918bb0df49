"""Checks of a built site that need no browser: `python docs/check_site.py build/docs`. `make docs` runs them.

Every link inside the site leads to a page and an anchor that exist; nothing is loaded from elsewhere; each page has a
language, a title, one first heading and no level left out, texts for its pictures and links, headings for all columns
or for none, anchors that are there once, and a bounded weight. Our own styles name no colour: the theme's are legible.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# With the theme's styles and scripts, which all pages share; fonts and icons are most of it.
_PAGE_BYTES = 4 << 20
# Of text beyond 4.5 to one a reader with weak eyes can read it (WCAG 2.1, 1.4.3).
_CONTRAST = 4.5


@dataclasses.dataclass
class Page(HTMLParser):
    """What a page has of what is checked."""

    path: Path
    anchors: set[str] = dataclasses.field(default_factory=set)
    links: list[str] = dataclasses.field(default_factory=list)
    loaded: list[str] = dataclasses.field(default_factory=list)
    headings: list[int] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    tags: set[str] = dataclasses.field(default_factory=set)
    is_for_print: bool = False
    # Text of the link and of the headings of columns that are being read; None outside of one.
    link: str | None = None
    columns: list[str] | None = None

    def __post_init__(self):
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        # The theme's header for paper, which no screen shows and no reader of screens reads.
        self.is_for_print = values.get("id") == "jb-print-docs-body" or (
            self.is_for_print and tag != "section" and not (tag == "h1" and "id" in values)
        )
        if values.get("id", "") in self.anchors:
            self.problems.append(f"an anchor that is there twice: {values['id']}")
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
            self.link = values.get("aria-label") or values.get("title") or ""
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(values.get("href", ""))
        elif tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loaded.append(values["src"])
        if self.link is not None and tag == "img":
            self.link += values.get("alt", "")
        if tag == "thead":
            self.columns = []
        elif tag == "th" and self.columns is not None:
            self.columns.append("")
        if tag == "img" and not values.get("alt", "").strip():
            self.problems.append(f"a picture without a text: {values.get('src')}")
        elif tag == "svg" and values.get("role") == "img" and not values.get("aria-label"):
            self.problems.append("a drawing without a label")
        elif tag == "html" and not values.get("lang"):
            self.problems.append("no language")
        elif re.fullmatch(r"h[1-6]", tag) and not self.is_for_print:
            self.headings.append(int(tag[1]))

    def handle_data(self, data: str) -> None:
        if self.link is not None:
            self.link += data
        if self.columns:
            self.columns[-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            if self.link is not None and not self.link.strip():
                self.problems.append(f"a link without a text: {self.links[-1]}")
            self.link = None
        elif tag == "thead" and self.columns is not None:
            texts = [text.strip() for text in self.columns]
            if any(texts) and not all(texts):
                self.problems.append(f"a column without a heading: {texts}")
            self.columns = None


def headings(page: Page) -> Iterator[str]:
    if page.headings.count(1) != 1:
        yield f"{page.headings.count(1)} first headings"
    for before, after in zip(page.headings, page.headings[1:], strict=False):
        if after > before + 1:
            yield f"a heading of level {after} after one of level {before}"


def broken_links(page: Page, pages: dict[Path, Page], root: Path) -> Iterator[str]:
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
        if path.is_dir():
            path /= "index.html"
        if not path.is_relative_to(root) or not path.exists():
            yield f"a link to nothing: {link}"
        elif parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].anchors:
            yield f"a link to an anchor that is not there: {link}"


def loads(page: Page) -> Iterator[str]:
    weight = page.path.stat().st_size
    for source in {urlsplit(source)._replace(query="").geturl() for source in page.loaded if source}:
        if urlsplit(source).netloc:
            yield f"loaded from elsewhere: {source}"
        elif not source.startswith("data:"):
            path = page.path.parent / unquote(source)
            if path.exists():
                weight += path.stat().st_size
            else:
                yield f"loaded, and not there: {source}"
    if weight > _PAGE_BYTES:
        yield f"{weight / 2**20:.1f} MiB with all that it loads"


def luminance(colour: str) -> float:
    """Returns WCAG's relative luminance of `#rrggbb` or `#rgb`."""
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    channels = [int(digits[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def code_contrasts(styles: str) -> Iterator[str]:
    """Yields colours of highlighted code that are too near to their background, in the light and in the dark theme."""
    colour = r"#[0-9a-fA-F]{3}(?:[0-9a-fA-F]{3})?\b"
    for theme in ("light", "dark"):
        rules = re.findall(rf'html\[data-theme="{theme}"\] ([^{{]*)\{{([^}}]*)\}}', styles)
        whole = "".join(body for name, body in rules if name.strip() == ".highlight")
        backgrounds = re.findall(rf"background:\s*({colour})", whole)
        for name, body in rules:
            found = re.search(rf"(?<![-\w])color:\s*({colour})", body)
            for background in backgrounds:
                if found and contrast(found[1], background) < _CONTRAST and "linenos" not in name:
                    yield f"{theme} {name.strip()}: {found[1]} on {background}"


def own_colours(styles: str) -> Iterator[str]:
    """Yields declarations that name a colour where the theme's variables have one for each ground."""
    for declaration in re.findall(r"[\w-]+:\s*[^;{}]*(?:#[0-9a-fA-F]{3,8}\b|\b(?:rgb|hsl)a?\()[^;}]*", styles):
        yield f"site.css: a colour of its own: {declaration}"


def problems(root: Path) -> Iterator[str]:
    root = root.resolve()
    # What the theme keeps beside its files are templates.
    pages = {path: Page(path) for path in sorted(root.rglob("*.html")) if "_static" not in path.parts}
    for path, page in pages.items():
        found = [*page.problems, *broken_links(page, pages, root), *loads(page), *headings(page)]
        if "title" not in page.tags:
            found.append("no title")
        yield from (f"{path.relative_to(root)}: {problem}" for problem in found)
    own = root / "_static" / "site.css"
    yield from own_colours(own.read_text() if own.exists() else "")
    yield from code_contrasts((root / "_static" / "pygments.css").read_text())


if __name__ == "__main__":
    wrong = list(problems(Path(sys.argv[1])))
    print("\n".join(wrong) or "links, anchors, headings, pictures, weights, colours and contrasts of code: no problem")
    sys.exit(bool(wrong))
