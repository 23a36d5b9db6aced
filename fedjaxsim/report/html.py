"""Pages of HTML, one file each: text, tables and pictures, without scripts and without a network.

A page is a tree of elements, so all text is escaped where the tree is written. Its policy forbids a
browser to load anything that does not stand in the file.
"""

import base64
import struct
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from fedjaxsim.report.plots import DPI

Section = tuple[str, list[Element]]
"""A heading, and what stands below it."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --line: #d4d8dd; --soft: #f3f4f6; --dim: #57606a; }
@media (prefers-color-scheme: dark) { :root { --line: #3b4048; --soft: #1e2227; --dim: #9da7b3; } }
* { box-sizing: border-box; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { margin: 0.5rem 0 0; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 0.6rem; padding-top: 0.4rem; border-top: 1px solid var(--line); }
h3 { margin: 1.2rem 0 0.4rem; font-size: 1rem; overflow-wrap: anywhere; }
p, li { max-width: 46rem; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 0 1rem; }
.dim, caption { color: var(--dim); }
.wide { overflow-x: auto; margin: 0.8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: 0.3rem; }
th, td { padding: 0.25rem 0.8rem 0.25rem 0; text-align: right; vertical-align: top; }
td { white-space: nowrap; }
th { font-weight: 600; }
thead th { border-bottom: 1px solid var(--line); vertical-align: bottom; }
tbody th { font-weight: 400; }
.left { text-align: left; min-width: 6rem; overflow-wrap: break-word; white-space: normal; }
td.left { min-width: 10rem; }
figure { margin: 0; }
img { display: block; max-width: 100%; min-width: 36rem; height: auto; background: white;
  border-radius: 4px; }
pre { background: var(--soft); padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
summary { cursor: pointer; }
@media print {
  body { max-width: none; padding: 0; font-size: 0.75rem; }
  nav { display: none; }
  figure, tr { break-inside: avoid; }
  h2, h3, caption { break-after: avoid; }
  img { min-width: 0; }
  .wide { overflow: visible; }
  pre { white-space: pre-wrap; overflow: visible; columns: 3 14rem; font-size: 0.6rem; }
  details::details-content { content-visibility: visible; display: block; }
}
"""


def element(tag: str, *children: Element | str, **attributes: str) -> Element:
    """An element with texts and elements in it.

    Args:
      tag: its name.
      *children: what is in it, in order.
      **attributes: by name; `_` at the end is left out, and others stand for `-`.
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    made = Element(tag, named)
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


def paragraph(text: str) -> Element:
    """A paragraph."""
    return element("p", text)


def bullets(texts: Iterable[str]) -> Element:
    """A list of sentences."""
    return element("ul", *(element("li", text) for text in texts))


def verbatim(text: str) -> Element:
    """A text as it is, such as a command or a file."""
    return element("pre", element("code", text), tabindex="0")


def folded(title: str, *children: Element) -> Element:
    """What most readers do not need; it is printed."""
    return element("details", element("summary", title), *children)


def table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1
) -> Element:
    """A table in a frame that scrolls where the page is too narrow for it.

    Args:
      caption: what it is about.
      headings: of the columns.
      rows: texts, one for each column; the first one names the row.
      left: so many columns are flush left, and the others flush right.
    """

    def cell(tag: str, index: int, text: str, **attributes: str) -> Element:
        return element(tag, text, **attributes, **({"class_": "left"} if index < left else {}))

    top = [cell("th", i, text.replace("\n", " "), scope="col") for i, text in enumerate(headings)]
    body = [
        element(
            "tr",
            *(
                cell("td", i, text) if i else cell("th", i, text, scope="row")
                for i, text in enumerate(row)
            ),
        )
        for row in rows
    ]
    parts = element("thead", element("tr", *top)), element("tbody", *body)
    return _scrolling(caption, element("table", element("caption", caption), *parts))


def image(png: bytes, description: str) -> Element:
    """A picture, at its size on paper, on white.

    Args:
      png: the content of a PNG file.
      description: what it shows, for who cannot see it.
    """
    width = struct.unpack(">I", png[16:20])[0] * 96 // DPI
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    shown = element("img", src=source, alt=description, width=str(width))
    return _scrolling(description, element("figure", shown))


def page(title: str, introduction: Sequence[str], sections: Sequence[Section]) -> bytes:
    """A page as the content of a file.

    Args:
      title: of it.
      introduction: paragraphs below the title.
      sections: in order.
    """
    places = [(f"part-{index}", *section) for index, section in enumerate(sections, 1)]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", _STYLE),
    )
    header = element("header", element("h1", title), *map(paragraph, introduction))
    nav = element("nav", aria_label="Sections")
    nav.extend(element("a", heading, href=f"#{place}") for place, heading, _ in places)
    main = element("main")
    for place, heading, content in places:
        main.append(element("section", element("h2", heading, id=place), *content))
    root = element("html", head, element("body", header, nav, main), lang="en")
    text = ElementTree.tostring(root, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text}\n".encode(errors="replace")


def _scrolling(name: str, content: Element) -> Element:
    return element("div", content, class_="wide", role="region", aria_label=name, tabindex="0")
