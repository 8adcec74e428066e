"""Runs a command, and writes what it prints as an animated SVG, for example docs/terminal.svg."""

import argparse
import subprocess
import time
from html import escape
from pathlib import Path

ROWS, COLUMNS, LINE, LETTER, MARGIN = 26, 118, 18, 7.3, 16  # LINE, LETTER and MARGIN in pixels
SECONDS = 14.0  # the picture takes, however long the command took
STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }
.info { fill: #8a98ad } .plain { fill: #d6deeb } .result { fill: #7fd6a2 }
@keyframes hidden { from { opacity: 0 } to { opacity: 0 } }
"""
RESULTS = ("held-out", "mean response", "accuracy")


def record(command: list[str]) -> list[tuple[float, str]]:
    """(seconds, line) of everything that the command prints."""
    started, lines = time.monotonic(), [(0.0, "$ " + " ".join(command))]
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append((time.monotonic() - started, line.rstrip()))
    if process.returncode:
        raise SystemExit(f"error: the command ended with exit code {process.returncode}")
    return lines


def draw(lines: list[tuple[float, str]]) -> str:
    """The picture: lines appear and move up; it ends with the last ones."""
    slower = SECONDS / max(lines[-1][0], 1e-3)
    width, height = COLUMNS * LETTER + 2 * MARGIN, ROWS * LINE + 2 * MARGIN
    texts, moves = [], []
    for i, (seconds, line) in enumerate(lines):
        at, above = seconds * slower, max(i + 1 - ROWS, 0) * LINE
        moves.append(f"{100 * at / SECONDS:.3f}% {{ transform: translateY(-{above}px) }}")
        plain = "plain" if line.startswith(("$", "step")) else "info"
        texts.append(
            f'<text class="{"result" if line.strip().startswith(RESULTS) else plain}" x="{MARGIN}" '
            f'y="{MARGIN + i * LINE + 13}" style="animation: hidden {at:.2f}s">'
            f"{escape(line if len(line) <= COLUMNS else line[: COLUMNS - 1] + '…')}</text>"
        )
    scroll = f"@keyframes scroll {{ {' '.join(moves)} }}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" role="img" '
        f'aria-label="{escape(lines[0][1])}">\n<style>{STYLE}{scroll}\n'
        f"#lines {{ animation: scroll {SECONDS}s step-end forwards }}</style>\n"
        f'<rect width="{width:g}" height="{height}" rx="10" fill="#16202e"/>\n'
        f'<svg y="{MARGIN / 2}" height="{height - MARGIN}"><g id="lines">\n'
        + "\n".join(texts)
        + "\n</g></svg></svg>\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="bash examples/quickstart.sh")
    args = parser.parse_args()
    args.out.write_text(draw(record(args.command)), encoding="utf-8")
