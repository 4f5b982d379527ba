"""A page of which one part is written from a table, between two marks."""

END = "<!-- end -->"


def with_section(page: str, begin: str, section: str) -> str:
    """A page with a section between its marks.

    Args:
        page: the page.
        begin: the line that the section stands after; it ends before the line `END`.
        section: what is to stand there, as Markdown.

    Raises:
        ValueError: the page has not both marks, once each.
    """
    before, mark, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not (mark and end) or begin in rest or END in after:
        raise ValueError(f"the page needs the lines {begin} and {END}, once each")
    return f"{before}{begin}\n\n{section}\n\n{END}{after}"


def cell(text: str) -> str:
    """A text as it stands in a cell of a table."""
    return text.replace("|", "\\|")
