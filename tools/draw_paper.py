"""Draws docs/paper_accuracy_length.svg from the first table of docs/paper.md."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "paper.md"
ROW = re.compile(r"^\| ([^|]+?) \| ([\d.]+)[^|]*\| [\d.]+ \| ([\d.]+)", re.M)
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 470"><style>
text { font: 12px sans-serif; fill: #334155 } circle { fill: #2563eb }
.own * { fill: #c2410c; font-weight: 700 } path { fill: none; stroke: #cbd5e1 }
.front { stroke: #475569 }</style><rect width="1000" height="470" rx="10" fill="#fff"/>
<text x="20" y="28">Accuracy (%) by mean response tokens, and the Pareto front</text>"""


def panel(rows: list, left: int, width: int, xs: range, low: float) -> str:
    """rows: (tokens, accuracy, method); left, width: pixels; xs, low: numbers on the axes."""
    lines, dots, front, best = "", "", "", 0.0
    across, down = width / (xs[-1] - xs[0]), 240 / (100 - low)
    for n in xs:
        lines += f'<text x="{left + across * (n - xs[0]) - 7:.0f}" y="452">{n}</text>'
    for y in range(190, 431, 60):
        lines += f'<text x="{left - 34}" y="{y + 4}">{100 - (y - 190) / down:g}</text>'
        lines += f'<path d="M{left} {y}h{width}"/>'
    for place, (tokens, accuracy, name) in enumerate(sorted(rows, key=lambda r: (r[0], -r[1]))):
        x, y = round(left + across * (tokens - xs[0])), round(190 + down * (100 - accuracy))
        if accuracy > best:
            front, best = f"{front}H{x}V{y}" if front else f"M{x} {y}", accuracy
        top, own = round(left + (place + 0.5) * width / len(rows)), name == "On-policy SFT"
        lines += f'<path d="M{top} 114v10L{x} {y}"/>'
        dots += f'<g class="{"own" * own}"><circle cx="{x}" cy="{y}" r="4"/>'
        dots += f'<text transform="translate({top + 4} 110) rotate(-55)">{name}</text></g>'
    return f'{lines}<path class="front" d="{front}H{left + width}"/>{dots}'


page = PAGE.read_text(encoding="utf-8").partition("| question |")[0]
rows = [(float(tokens), float(accuracy), name) for name, accuracy, tokens in ROW.findall(page)]
far = [row for row in rows if row[0] > 24 or row[1] < 99]
drawn = panel([*far, (20, 100, "the others")], 50, 280, range(0, 161, 40), 0)
drawn += panel([row for row in rows if row not in far], 400, 570, range(18, 24), 99.2)
PAGE.with_name("paper_accuracy_length.svg").write_text(f"{HEAD}{drawn}</svg>\n", "utf-8")
