"""One page of HTML about finished runs: it loads nothing, and its tables can be sorted."""

import base64
import html
import urllib.parse
from collections.abc import Mapping, Sequence
from string import Template

from fedjaxsim.report.tables import TextTable

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1em 0 0; }
caption { text-align: left; font-weight: 600; padding-bottom: .4em; }
th, td { padding: .2em .8em .2em 0; text-align: left; vertical-align: bottom; }
th { border-bottom: 1px solid #999; cursor: pointer; white-space: pre-line; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tbody tr:hover { background: #f3f3f3; }
.save, .note { color: #555; font-size: .85em; }
img { max-width: 100%; } pre { white-space: pre-wrap; }
@media print { .save { display: none; } body { margin: 0; max-width: none; font-size: 10pt; }
  table, img { break-inside: avoid; } th { cursor: auto; } }
</style>
<h1>$title</h1>
$body
<script>
const number = text => parseFloat(text.replace("∞", "Infinity").replace(/^[≤=] /, ""));
for (const head of document.querySelectorAll("th")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], place = head.cellIndex;
  const sign = head.dataset.sign = head.dataset.sign == 1 ? -1 : 1;
  const key = row => row.cells[place].textContent;
  const compare = (a, b) => {
    const [x, y] = [number(key(a)), number(key(b))];
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || sign * key(a).localeCompare(key(b));
    return x === y ? 0 : sign * (x < y ? -1 : 1);
  };
  body.append(...[...body.rows].sort(compare));
};
</script>
</html>
""")


def page(
    title: str,
    note: str,
    tables: Sequence[TextTable],
    pictures: Mapping[str, bytes],
    sentences: Sequence[str],
    texts: Mapping[str, str],
    links: Mapping[str, str],
) -> bytes:
    """Return the page.

    Args:
      title: its title.
      note: a sentence below it.
      tables: its tables, each with its CSV and LaTeX to save.
      pictures: pictures as PNG, by what they show.
      sentences: what the guarantees assume.
      texts: long texts under their titles, folded.
      links: addresses of named runs.
    """
    parts = [f'<p class="note">{html.escape(note)}</p>']
    for table in tables:
        saved = {"CSV": ("csv", table.csv), "LaTeX": ("tex", table.latex)}
        save = " · ".join(
            f'<a download="table.{ending}" href="data:text/plain;charset=utf-8,'
            f'{urllib.parse.quote(text)}">{name}</a>'
            for name, (ending, text) in saved.items()
        )
        parts += [
            f'<div class="scroll">{table.html(dict(links))}</div>',
            f'<p class="save">{save}</p>',
        ]
    for name, content in pictures.items():
        source = base64.b64encode(content).decode()
        text = html.escape(name)
        parts += [f"<h2>{text}</h2>", f'<img src="data:image/png;base64,{source}" alt="{text}">']
    parts += ["<h2>What the guarantees assume</h2>", "<ul>"]
    parts += [f"<li>{html.escape(sentence)}</li>" for sentence in sentences] + ["</ul>"]
    parts += ["<h2>Guarantees and settings in full</h2>"]
    parts += [
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
        for name, text in texts.items()
    ]
    return _PAGE.substitute(title=html.escape(title), body="\n".join(parts)).encode(
        errors="replace"
    )
