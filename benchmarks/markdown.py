"""Tables of benchmarks as Markdown, and where they stand in a page."""


def between(text: str, start: str, stop: str, content: str) -> str:
    """`text` with `content` in place of what stands between two marks. Raises ValueError where one is missing."""
    before, found, rest = text.partition(start)
    _, ends, after = rest.partition(stop)
    if not found or not ends:
        raise ValueError(f"no {start} ... {stop} to write a table between: add both marks")
    return f"{before}{start}\n\n{content}\n\n{stop}{after}"


def table(head: list[str], lines: list[list[str]]) -> str:
    """A table from its head and its lines, all cells text."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def or_dash(value: float | None, form: str) -> str:
    """`value` in the format `form`; a dash where there is none."""
    return "-" if value is None else form.format(value)
