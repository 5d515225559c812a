"""One page about a plan to send round: no network, no script, pictures inside.

verdict, headline, reasons, tables, PNGs -> page -> HTML text
"""

import base64
import html
from collections.abc import Mapping, Sequence

from hexijax.report.explain import Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1040px;
  margin: 2.5em auto; padding: 0 1.5em; }
h1 { font-size: 1.5em; line-height: 1.25; } h2 { font-size: 1.1em; margin-top: 2em; }
img { width: 100%; } pre { font-size: 12px; overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
td { font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; border-bottom: 1px solid #999; }
th, td { padding: .25em .9em .25em 0; } td { border-bottom: 1px solid #e6e6e6; }
footer { margin-top: 3em; font-size: 12px; color: #777; }
"""


def page(
    *,
    title: str,
    verdict: str,
    lines: Sequence[str],
    pictures: Mapping[str, bytes],
    tables: Mapping[str, Table],
    text: str,
    made_by: str,
) -> str:
    """The page.

    Args:
        title: of the window.
        verdict: the one sentence to remember.
        lines: sentences below it.
        pictures: PNG files by their headings.
        tables: rows by their headings; the first row is the heading of the columns.
        text: the plan itself, or nothing.
        made_by: what wrote the page.
    """
    parts = [f"<h1>{html.escape(_sentence(verdict))}</h1>"]
    parts += [f"<p>{html.escape(_sentence(line))}</p>" for line in lines]
    parts += [
        f"<h2>{html.escape(name)}</h2>\n{_image(name, png)}"
        for name, png in pictures.items()
    ]
    parts += [
        f"<h2>{html.escape(name)}</h2>\n{_table(rows)}" for name, rows in tables.items()
    ]
    if text:
        parts.append(f"<h2>The plan itself</h2>\n<pre>{html.escape(text)}</pre>")
    parts.append(f"<footer>{html.escape(made_by)}</footer>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", ":")) else ".")


def _image(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'


def _table(rows: Table) -> str:
    head, *body = [
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th", *["td"] * (len(rows) - 1)], rows, strict=True)
    ]
    lines = "\n".join(f"<tr>{row}</tr>" for row in body)
    return f"<table><tr>{head}</tr>\n{lines}</table>"
