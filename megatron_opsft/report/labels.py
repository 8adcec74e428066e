"""Texts of a figure that come from users: matplotlib would read some characters as its own."""


def shown(text: str) -> str:
    """The text as matplotlib must get it to draw it as it is.

    `$` would begin mathematics, and a legend leaves out whatever begins with `_` (a space before it
    is enough). A line of its own would tear the legend: any white space is one space.
    """
    words = " ".join(text.split()).replace("$", r"\$")
    return f" {words}" if words.startswith("_") else words
