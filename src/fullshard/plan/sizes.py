"""Round sizes as several rooms have to do alike, since ranks compute each other's offsets by it."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def rows_per_rank(num_rows: int, num_ranks: int) -> int:
    """Return the rows of every rank except the last ones, as ``torch.chunk`` and DTensor cut them.

    Ranks after the rows run out have fewer or none: 5 rows on 4 ranks are 2, 2, 1 and 0.
    """
    return -(-num_rows // num_ranks)
