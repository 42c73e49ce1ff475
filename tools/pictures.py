"""The pictures of docs/images: three drawn, and what the demo prints and reports.

python -m tools.pictures [RUN]   (RUN: where the demo writes; report.png needs
Chromium)
"""

import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

FOLDER = Path(__file__).parent.parent / "docs" / "images"
INK, DIM, BLUE, ORANGE, GREEN, GRAY = (
    "#1c2127",
    "#5a6470",
    "#dceaf7",
    "#fbe5d0",
    "#d9f0e3",
    "#eef0f3",
)
# characters of the terminal; pixels of the report
COLUMNS, WIDTH, HEIGHT = 118, 1100, 1035


def svg(width: int, height: int, title: str, *parts: str, page: str = "#ffffff") -> str:
    """A picture with a title for those who cannot see it."""
    font = f'role="img" fill="{INK}" font-family="{SANS}" font-size="14"'
    tip = (
        'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
        f' orient="auto" fill="{DIM}"'
    )
    lines = (
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f" {font}>"
        ),
        f"<title>{escape(title)}</title>",
        f'<defs><marker id="tip" {tip}><path d="M0 0 8 4 0 8z"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="{page}"/>',
        *parts,
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def label(
    x: float,
    y: float,
    text: str,
    size: int = 14,
    anchor: str = "middle",
    fill: str = INK,
) -> str:
    """One line of text, bold where it begins with a star."""
    where = (
        f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"'
    )
    bold = ' font-weight="600"' * (text[0] == "*")
    return f"<text {where}{bold}>{escape(text.removeprefix('*'))}</text>"


def note(x: float, y: float, text: str, size: int = 12, anchor: str = "middle") -> str:
    """A line beside the boxes."""
    return label(x, y, text, size, anchor, DIM)


def box(x: float, y: float, width: float, height: float, fill: str, *lines: str) -> str:
    """A rectangle with lines of text in its middle, the first in bold."""
    first = y + height / 2 - 9 * (len(lines) - 1) + 5
    rows = [(f"*{line}", 14) if i == 0 else (line, 12) for i, line in enumerate(lines)]
    texts = [
        label(x + width / 2, first + 18 * i, text, size)
        for i, (text, size) in enumerate(rows)
    ]
    where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
    return "\n".join([f'<rect {where} fill="{fill}" stroke="{DIM}"/>', *texts])


def arrow(*points: float) -> str:
    """A line through points x, y, ... with a tip at its end."""
    path = " ".join(f"{value:g}" for value in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{DIM}" stroke-width="1.5"'
        ' marker-end="url(#tip)"/>'
    )


def pipeline() -> str:
    """Draw pretraining, views, heads, Sinkhorn and the objective (paper, Fig. 2)."""
    return svg(
        1040,
        452,
        "UNO: pretraining on the labeled images, then discovery with two views, heads,"
        " labels of Sinkhorn-Knopp, and one objective for known and novel classes",
        label(20, 32, "*1  Pretraining", 16, "start"),
        box(20, 48, 170, 58, BLUE, "labeled images", "of the known classes"),
        arrow(190, 77, 228, 77),
        box(230, 48, 160, 58, GRAY, "encoder"),
        arrow(390, 77, 428, 77),
        box(430, 48, 200, 58, GRAY, "known head", "one output per class"),
        arrow(630, 77, 668, 77),
        box(670, 48, 350, 58, GREEN, "cross-entropy with the labels"),
        arrow(310, 106, 310, 241),
        note(322, 136, "encoder and known head are kept", 12, "start"),
        label(20, 172, "*2  Discovery", 16, "start"),
        box(20, 190, 170, 58, BLUE, "labeled images", "of the known classes"),
        box(20, 300, 170, 58, ORANGE, "unlabeled images", "with novel classes"),
        arrow(190, 219, 228, 255),
        arrow(190, 329, 228, 292),
        box(230, 243, 160, 62, GRAY, "encoder", "two views per image"),
        arrow(390, 262, 428, 219),
        arrow(390, 274, 428, 290),
        arrow(390, 286, 428, 361),
        box(430, 190, 200, 58, GRAY, "known head", "logits of known classes"),
        box(430, 261, 200, 58, GRAY, "4 novel heads", "logits of novel classes"),
        box(
            430,
            332,
            200,
            58,
            GRAY,
            "4 overclustering heads",
            "three times as many clusters",
        ),
        arrow(630, 290, 668, 304),
        arrow(630, 361, 668, 330),
        box(670, 286, 140, 62, ORANGE, "Sinkhorn-Knopp", "clusters of equal size"),
        arrow(810, 317, 858, 317),
        note(834, 308, "pseudo-", 10),
        note(834, 330, "labels", 10),
        arrow(630, 212, 858, 212),
        note(744, 204, "known and novel logits, one softmax"),
        box(
            860,
            190,
            160,
            200,
            GREEN,
            "unified objective",
            "cross-entropy over all",
            "classes; its target:",
            "the label, or the",
            "pseudo-label of",
            "the other view",
        ),
        note(
            520,
            428,
            "The novel head with the lowest training loss gives the classes; "
            "overclustering heads only help training.",
        ),
    )


def shape(kind: str, x: float, y: float, fill: str) -> str:
    """A square, circle, triangle or diamond of about 24 px around a point."""
    if kind == "circle":
        return f'<circle cx="{x:g}" cy="{y:g}" r="12" fill="{fill}" stroke="{INK}"/>'
    around = f'transform="translate({x:g} {y:g})" fill="{fill}" stroke="{INK}"'
    return f'<polygon points="{CORNERS[kind]}" {around}/>'


CORNERS = {
    "square": "-11,-11 11,-11 11,11 -11,11",
    "triangle": "0,-13 13,11 -13,11",
    "diamond": "0,-15 13,0 0,15 -13,0",
}


def settings() -> str:
    """The two settings: what the unlabeled set may hold."""
    known, fills = ["square", "circle"] * 6, {"square": "#6ea8dc", "circle": "#f0a35e"}
    novel = ["triangle", "diamond", "diamond", "triangle"] * 3
    mixed = [
        "triangle",
        "square",
        "diamond",
        "circle",
        "diamond",
        "triangle",
        "circle",
        "square",
    ]
    parts = []
    for left, title, text, unlabeled in (
        (
            20,
            "*Novel class discovery (NCD)",
            "every unlabeled image belongs to a novel class",
            novel,
        ),
        (
            510,
            "*Generalized category discovery (GCD)",
            "unlabeled images can belong to known or novel classes",
            mixed + mixed[:4],
        ),
    ):
        parts += [label(left + 235, 34, title, 16), note(left + 235, 56, text, 13)]
        for side, name, kinds in ((0, "labeled", known), (240, "unlabeled", unlabeled)):
            parts += [
                box(left + side, 72, 230, 176, "#ffffff"),
                note(left + side + 115, 238, name, 13),
            ]
            for i, kind in enumerate(kinds):
                fill = fills[kind] if name == "labeled" else "#e3e6ea"
                parts.append(
                    shape(
                        kind, left + side + 40 + 50 * (i % 4), 100 + 46 * (i // 4), fill
                    )
                )
    text = (
        "Squares and circles are the known classes; triangles and diamonds are novel."
        " Gray: no label."
    )
    title = (
        "The unlabeled set holds novel classes only (NCD), or known and novel classes"
        " (GCD)"
    )
    return svg(1000, 296, title, *parts, note(500, 278, text, 13))


def cluster() -> str:
    """A streaming run on a cluster: Ray Data, workers, storage."""
    workers = []
    for i, name in enumerate(("worker 0", "worker 1", "worker N - 1")):
        y = 82 + 84 * i
        workers += [
            box(560, y, 170, 60, GREEN, name, "one GPU: views, step"),
            arrow(490, 196, 558, y + 30),
            arrow(730, y + 30, 798, 166 + 30 * i),
        ]
    return svg(
        1000,
        400,
        "A run on a cluster: Ray Data reads and decodes images from storage, workers of"
        " Ray Train train, checkpoints and results go to storage",
        label(500, 34, "*uno discover --workers N", 16),
        note(
            500,
            54,
            "The driver starts the workers, and restarts them from the newest"
            " checkpoint.",
        ),
        box(
            20,
            146,
            170,
            100,
            BLUE,
            "storage",
            "folders, Parquet or tar",
            "shards, on disk or s3://",
        ),
        arrow(190, 196, 258, 196),
        box(
            260,
            116,
            230,
            160,
            ORANGE,
            "Ray Data",
            "on the CPUs of all nodes:",
            "decodes each image once,",
            "cuts its crops, ships",
            "8-bit views in the order",
            "that the seed decides",
        ),
        *workers,
        box(
            800,
            136,
            180,
            120,
            BLUE,
            "storage",
            "checkpoints, metrics,",
            "model, report",
        ),
        f'<path d="M645 144v20M645 228v20" stroke="{DIM}" stroke-width="1.5"'
        ' stroke-dasharray="4 3"/>',
        note(645, 340, "gradients are averaged, and Sinkhorn-Knopp balances"),
        note(645, 357, "the global batch: N workers train as one"),
        note(
            500,
            387,
            "A set that fits in memory is decoded once per node, without Ray Data.",
        ),
    )


DRAWN = {"pipeline.svg": pipeline, "ncd-gcd.svg": settings, "cluster.svg": cluster}


def terminal(text: str) -> str:
    """Draw the lines of a console as they are."""
    parts = [
        f'<circle cx="{22 + 20 * i}" cy="20" r="6" fill="{color}"/>'
        for i, color in enumerate(LIGHTS)
    ]
    parts.append(f'<g font-family="{MONO}" font-size="13" fill="#e4e8ec">')
    lines = text.splitlines()
    for i, line in enumerate(lines):
        parts.append(
            f'<text x="16" y="{58 + 18 * i}" xml:space="preserve">{escape(line)}</text>'
        )
    size = 32 + round(7.83 * COLUMNS), 66 + 18 * len(lines)
    return svg(*size, "What the demo prints", *parts, "</g>", page="#15181c")


LIGHTS = ("#ed6a5e", "#f4bf4f", "#61c554")
SANS = "system-ui, 'DejaVu Sans', Arial, sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, monospace"


def shortened(text: str, most: int = 3) -> str:
    """Shorten a console: ``most`` lines for each phase, no line after the protocols."""
    found: list[str] = []
    for line in text.split("\nChance")[0].splitlines():
        phase = re.match(r"\w+(?=  epoch |  step )", line)
        if (
            phase
            and "ETA 00:00" not in line
            and sum(phase[0] in other[:9] for other in found) >= most - 1
        ):
            continue
        found += [line[:COLUMNS], *[line[COLUMNS:]] * (len(line) > COLUMNS)]
    return "\n".join(found)


def chromium() -> str | None:
    """A browser that draws pages, if one is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


def draw(page: Path, picture: Path, width: int, height: int) -> None:
    """The top of ``page`` as a PNG of 256 colors, without metadata."""
    with TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        flags = (
            "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run"
            " --disable-sync"
        )
        where = [f"--user-data-dir={folder}/profile", f"--screenshot={shot}"]
        command = [
            chromium(),
            *flags.split(),
            *where,
            f"--window-size={width},{height}",
        ]
        subprocess.run(
            [*command, page.resolve().as_uri()],
            check=True,
            capture_output=True,
            timeout=120,
        )
        with Image.open(shot) as image:
            image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
                picture, optimize=True
            )


def main(run: str = "runs/demo") -> None:
    """Draw all, from a demo that trains anew in ``run``."""
    FOLDER.mkdir(exist_ok=True)
    for name, picture in DRAWN.items():
        (FOLDER / name).write_text(picture())
    demo = ["uno", "demo", "--workers", "0", "--compute.threads", "1", "--output", run]
    done = subprocess.run(
        [*demo, "--overwrite"], check=True, stdout=subprocess.PIPE, text=True
    )
    shown = done.stdout.replace(str(Path(run).resolve()), run)
    (FOLDER / "terminal.svg").write_text(
        terminal(shortened(f"$ {' '.join(demo)}\n{shown}"))
    )
    if chromium() is None:
        sys.exit("no Chromium on this machine: report.png was not drawn")
    page = Path(run, "report.html")
    draw(page, FOLDER / "report.png", WIDTH, HEIGHT)


if __name__ == "__main__":
    main(*sys.argv[1:])
