#!/usr/bin/env python3
"""Writes the tables and the plot of docs/validation.md from `hotbunk validate --json`.

  hotbunk validate --json | scripts/validation_page.py docs
Replaces what stands between the two markers of docs/validation.md, and docs/validation.svg.
"""
import json
import math
import pathlib
import sys

BEGIN, END = "<!-- figures: scripts/validation_page.py -->", "<!-- /figures -->"
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]  # Okabe and Ito


def percent(x, signed=False):
    if x is None:  # of no rows
        return "-"
    return f"{100 * x:+.2f} %" if signed else f"{100 * x:.2f} %"


def table(tables):
    lines = ["| table | quantity | rows | out of scope | mean error | max | bias | left out | other tools |",
             "|---|---|---|---|---|---|---|---|---|"]
    for t in tables:
        peers = ", ".join(f"{p['tool']} {percent(p['mean_abs_error'])}" for p in t["peers"])
        lines.append(f"| {t['name']} | {t['quantity']} | {t['rows']} | {len(t['out_of_scope'])} | {percent(t['mean_abs_error'])} | "
                     f"{percent(t['max_abs_error'])} | {percent(t['bias'], True)} | "
                     f"{percent(t['left_out']['mean_abs_error']) if 'left_out' in t else ''} | {peers} |")
        for part in t.get("parts", []):
            lines.append(f"| | {part['name']} | {part['rows']} | | {percent(part['mean_abs_error'])} | {percent(part['max_abs_error'])} | "
                         f"{percent(part['bias'], True)} | | |")
    return "\n".join(lines)


def plot(tables):
    """One small panel per table: measured across, predicted / measured up, ±10 % shaded."""
    tables = [t for t in tables if t["rows"] >= 4]
    columns, width, height = 3, 300, 190
    rows = math.ceil(len(tables) / columns)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * width}" height="{rows * height}" '
           f'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>']
    for i, t in enumerate(tables):
        left, top = (i % columns) * width + 45, (i // columns) * height + 28
        w, h = width - 60, height - 62
        measured = [math.log10(p["measured"]) for p in t["predictions"]]
        low, high = min(measured), max(measured)
        low, high = low - 0.05 * (high - low) - 0.01, high + 0.05 * (high - low) + 0.01
        up = lambda ratio: top + h * (1 - (min(max(ratio, 0.5), 1.5) - 0.5))
        out.append(f'<text x="{left}" y="{top - 10}" font-weight="bold">{t["name"]}</text>')
        out.append(f'<rect x="{left}" y="{up(1.1):.1f}" width="{w}" height="{up(0.9) - up(1.1):.1f}" fill="#eee"/>')
        out.append(f'<rect x="{left}" y="{top}" width="{w}" height="{h}" fill="none" stroke="#999"/>')
        for ratio in (0.5, 1.0, 1.5):
            out.append(f'<text x="{left - 6}" y="{up(ratio) + 4:.1f}" text-anchor="end">{ratio:g}</text>')
            out.append(f'<line x1="{left}" x2="{left + w}" y1="{up(ratio):.1f}" y2="{up(ratio):.1f}" stroke="#ccc"/>')
        for p, m in zip(t["predictions"], measured):
            x = left + w * (m - low) / (high - low)
            out.append(f'<circle cx="{x:.1f}" cy="{up(p["predicted"] / p["measured"]):.1f}" r="2.2" '
                       f'fill="{COLOURS[i % len(COLOURS)]}" fill-opacity="0.6"/>')
        out.append(f'<text x="{left}" y="{top + h + 15}">{10 ** low:.3g}</text>')
        out.append(f'<text x="{left + w}" y="{top + h + 15}" text-anchor="end">{10 ** high:.3g} {t["unit"]}, measured</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    docs = pathlib.Path(sys.argv[1])
    tables = json.load(sys.stdin)["tables"]
    page = docs / "validation.md"
    text = page.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(text[:begin] + "\n" + table(tables) + "\n" + text[end:])
    (docs / "validation.svg").write_text(plot(tables))


if __name__ == "__main__":
    main()
