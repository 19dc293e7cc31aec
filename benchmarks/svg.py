"""Small multiples as one SVG: a panel a curve, its mean as a line in a band of its spread, the others faintly behind.

Plain text on a white ground, so that it reads the same in a browser, in a dark theme and in print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL = (200, 130)
"""Width and height of the area that a panel draws in, in pixels."""
GAP = (34, 46)
"""Between panels, for the numbers on the axes and the titles."""
MARGIN = (52, 40)
"""Left of the panels and above them."""
TICKS = 4
LINE, BAND, OTHERS, GRID, TEXT = "#1f5fa8", "#9dc1e6", "#d5d5d5", "#eeeeee", "#333333"


@dataclass(frozen=True, slots=True)
class Curve:
    """One panel. ``x``, ``mean`` and ``spread`` are equally long; the band is mean plus and minus spread."""

    name: str
    x: Sequence[float]
    mean: Sequence[float]
    spread: Sequence[float]


def small_multiples(
    curves: Sequence[Curve], title: str, x_label: str, y_label: str, y_most: float | None = None, columns: int = 4
) -> str:
    """The picture, all panels with the same axes from 0, the upright one to ``y_most`` or to what the bands reach.

    Raises ``ValueError`` without curves.
    """
    if not curves:
        raise ValueError("there are no curves to draw")
    columns = min(columns, len(curves))
    rows = math.ceil(len(curves) / columns)
    width = MARGIN[0] + columns * (PANEL[0] + GAP[0])
    height = MARGIN[1] + rows * (PANEL[1] + GAP[1]) + 16
    x_step = tick_step(max(x for curve in curves for x in curve.x))
    reached = max(m + s for curve in curves for m, s in zip(curve.mean, curve.spread, strict=True))
    y_step = tick_step(reached if y_most is None else y_most)
    most = (x_step * TICKS, y_step * TICKS)
    body = [
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(MARGIN[0], 16, title, size=13, weight="bold"),
        _text(MARGIN[0] + (width - MARGIN[0] - GAP[0]) / 2, height - 6, x_label, anchor="middle"),
        f'<g transform="translate(12 {height / 2}) rotate(-90)">{_text(0, 0, y_label, anchor="middle")}</g>',
    ]
    for number, curve in enumerate(curves):
        left = MARGIN[0] + number % columns * (PANEL[0] + GAP[0])
        top = MARGIN[1] + number // columns * (PANEL[1] + GAP[1])
        others = [other for other in curves if other is not curve]
        body.append(f'<g transform="translate({left} {top})">{_panel(curve, others, most)}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif">\n' + "\n".join(body) + "\n</svg>\n"
    )


def tick_step(most: float) -> float:
    """The distance of ticks, a round number, of which :data:`TICKS` reach ``most``."""
    if most <= 0:
        return 1.0 / TICKS
    power = 10.0 ** math.floor(math.log10(most / TICKS))
    return next(
        step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power * TICKS >= most * (1 - 1e-9)
    )


def _panel(curve: Curve, others: Sequence[Curve], most: tuple[float, float]) -> str:
    width, height = PANEL

    def points(x: Sequence[float], y: Sequence[float]) -> str:
        pairs = zip(x, y, strict=True)
        return " ".join(f"{width * a / most[0]:.1f},{height * (1 - min(max(b / most[1], 0), 1)):.1f}" for a, b in pairs)

    parts = [_text(0, -6, curve.name, weight="bold")]
    for tick in range(TICKS + 1):
        x, y = width * tick / TICKS, height * (1 - tick / TICKS)
        parts.append(f'<path d="M0 {y:.1f}H{width}M{x:.1f} 0V{height}" stroke="{GRID}"/>')
        parts.append(_text(x, height + 12, f"{most[0] * tick / TICKS:g}", size=9, anchor="middle"))
        parts.append(_text(-4, y + 3, f"{most[1] * tick / TICKS:g}", size=9, anchor="end"))
    parts += [
        f'<polyline points="{points(other.x, other.mean)}" fill="none" stroke="{OTHERS}" stroke-width="0.8"/>'
        for other in others
    ]
    upper = [m + s for m, s in zip(curve.mean, curve.spread, strict=True)]
    lower = [m - s for m, s in zip(curve.mean, curve.spread, strict=True)]
    outline = points([*curve.x, *reversed(curve.x)], [*upper, *reversed(lower)])
    parts.append(f'<polygon points="{outline}" fill="{BAND}" fill-opacity="0.6"/>')
    parts.append(f'<polyline points="{points(curve.x, curve.mean)}" fill="none" stroke="{LINE}" stroke-width="1.8"/>')
    return "".join(parts)


def _text(x: float, y: float, text: str, size: int = 11, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{TEXT}">{escape(text)}</text>'
    )
