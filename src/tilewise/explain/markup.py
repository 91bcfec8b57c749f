"""Pieces of a page: sections, tables that scroll by themselves, pictures to fold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .svg import Picture, tag

__all__ = ["figure", "number", "scroll", "section", "table"]

# Rows of a picture's table beyond which the rest is only counted.
_ROWS = 64


def figure(picture: Picture, name: str, style: str = "", *, is_open: bool = False) -> str:
    """A picture to fold: title, sentence, drawing, legend, and the same as a table."""
    chip = '<span class="badge unsure">▲ wasteful</span>' if picture.shows_a_problem else ""
    if picture.shows_a_problem and "barrier" in picture.title:
        chip = '<span class="badge bad">✘ race</span>'
    rows = [tuple(escape(cell) for cell in row) for row in picture.rows[:_ROWS]]
    left = tuple(range(len(picture.columns)))
    as_table = table(picture.title, picture.columns, rows, left=left)
    more = len(picture.rows) - len(rows)
    rest = f"<p class=intro>{more:,} more rows are left out.</p>" if more else ""
    legend = f'<p class="legend">{picture.legend}</p>' if picture.legend else ""
    readout = '<p class="readout" aria-live="polite"></p>' if 'class="rows"' in picture.svg else ""
    return (
        f'<details class="picture {style}" id="{name}"{" open" if is_open else ""}>'
        f"<summary><b>{escape(picture.title)}</b> {chip}</summary>"
        f"<figure><figcaption>{escape(picture.sentence)}</figcaption>"
        f"{scroll(picture.svg, picture.title)}{readout}{legend}</figure>"
        f"<details><summary>The same as a table</summary>{as_table}{rest}</details></details>\n"
    )


def section(name: str, title: str, level: int, content: str) -> str:
    return f'<section id="{name}"><h{level + 1}>{escape(title)}</h{level + 1}>{content}</section>\n'


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = ()
) -> str:
    """A table that scrolls in a box of its own; cells are markup, those of ``left`` are text."""

    def cells(row: Sequence[str], kind: str) -> str:
        scope = ' scope="col"' if kind == "th" else ""
        return "".join(
            f"<{kind}{scope}{' class=text' if i in left else ''}>{cell}</{kind}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    table = (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{cells(heads, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
    return scroll(table, caption)


def scroll(content: str, label: str) -> str:
    return tag("div", content, class_="scroll", data_label=label)


def number(number: float | None) -> str:
    if number is None:
        return "–"
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.2f}"
