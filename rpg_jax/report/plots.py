"""The parts that all figures share: colours, an empty figure, axes without clutter, PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # matplotlib takes a second to import: a run loads it when it draws
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#222222", "#767676", "#e6e6e6"
COLOURS = ("#2a6db0", "#d1495b", "#2e8b57", "#e09f3e", "#7b4ea3", "#4a4a4a", "#17a2a2", "#b5651d", "#9a9a9a", "#e377c2")


def empty_figure(
    width: float, height: float, *, dpi: int = 120, w_pad: float | None = None, h_pad: float | None = None
) -> Figure:
    """Makes a white figure of `width` x `height` inches; `w_pad` and `h_pad` lie around each panel."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=w_pad, h_pad=h_pad)
    return Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout=layout)


def tidy(axes: Axes, title: str, *, title_pad: float | None = None, grid: Literal["both", "x", "y"] = "both") -> None:
    """Titles axes; leaves them the bottom line and a light grid."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=title_pad)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0, which="both")


def png(figure: Figure) -> bytes:
    """Draws a figure without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()


def legend_columns(labels: Sequence[str], width: float) -> int:
    """The columns of a legend in `width` inches: a letter of size 9 takes 0.075, a handle with its gaps 0.6."""
    return max(1, min(len(labels), int(width / (0.6 + 0.075 * max(map(len, labels), default=0)))))
