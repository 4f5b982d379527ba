"""Drawing with inline SVG: rectangles, bars and lines, with a tooltip each. No scripts."""

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 960
"""Width of every drawing in pixels; pages scale it."""

COLORS = ("#4e79a7", "#59a14f", "#f28e2b", "#e15759", "#b07aa1", "#76b7b2", "#9c755f", "#edc948")
"""One colour a degree, from the smallest."""


def color(column: int) -> str:
    """The colour of the degree with this place in the chain."""
    return COLORS[column % len(COLORS)]


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    title: str = "",
    opacity: float = 1.0,
) -> str:
    """A rectangle with a tooltip."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.0):.2f}" height="{height:.2f}" '
        f'fill="{fill}" fill-opacity="{opacity:.3f}">{tip}</rect>'
    )


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Some words."""
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = "#333") -> str:
    """A straight line."""
    return (
        f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{stroke}" '
        'stroke-dasharray="4 3"/>'
    )


def drawing(height: float, parts: Iterable[str]) -> str:
    """An SVG element of the usual width."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" font-size="11" '
        f'font-family="sans-serif">{"".join(parts)}</svg>'
    )


def curve(values: Sequence[float], height: float, label: str, unit: str) -> str:
    """A line through the values, from left to right, with the largest at its side."""
    top = max([*values, 1e-12])
    step = (WIDTH - 140) / max(len(values) - 1, 1)
    points = " ".join(
        f"{120 + place * step:.2f},{height - 8 - (height - 24) * value / top:.2f}"
        for place, value in enumerate(values)
    )
    shape = f'<polyline points="{points}" fill="none" stroke="{COLORS[0]}" stroke-width="1.5"/>'
    words = text(112, 18, f"{top:,.4g} {unit}", "end") + text(112, height - 8, "0", "end")
    return drawing(height, [shape, words, text(120, 12, label)])


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """The whole document: a heading and sections of HTML."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>" for name, html in sections)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>"
        "body{font-family:sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
        "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f4f4f4}"
        "svg{width:100%;height:auto}h2{font-size:1.1em;margin-top:2em}p{color:#555}"
        f"</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    cells = "".join(f"<th>{escape(word)}</th>" for word in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(word)}</td>" for word in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{cells}</tr>{lines}</table>"
