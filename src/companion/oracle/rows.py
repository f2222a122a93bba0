"""The checks of the token ids that batches are made from."""

import operator
from collections.abc import Sequence

TokenIds = Sequence[Sequence[int]]


def check_rows(**columns: TokenIds) -> None:
    """Require columns of equally many rows, each row made of at least one token id.

    Raises:
        ValueError: names the column and its first bad row.
    """
    first_name, first = next(iter(columns.items()))
    if len(first) == 0:
        raise ValueError(f"{first_name} is empty")
    for name, rows in columns.items():
        if len(rows) != len(first):
            raise ValueError(
                f"{name} must have {len(first)} rows like {first_name}, got {len(rows)}"
            )
        for i, row in enumerate(rows):
            try:
                ids = [operator.index(token) for token in row]
            except TypeError:
                raise ValueError(f"{name}[{i}] must be token ids, not {row!r}") from None
            if not ids:
                raise ValueError(f"{name}[{i}] is empty")
