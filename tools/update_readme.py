"""Writes the generated config reference into README.md."""

from pathlib import Path

from megatron_opsft.config_file import reference_table

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- config reference -->", "<!-- end of config reference -->"


def main() -> None:
    before, rest = README.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    README.write_text(f"{before}{START}\n{reference_table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
