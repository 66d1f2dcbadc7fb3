"""Splits BIPIA-like rows so that neither a context nor a kind of attack is on both sides.

    python -m core_rerank.eval.injection_sets bipia_indirect_train.jsonl --out DIR

writes DIR/bipia_find.jsonl and DIR/bipia_held.jsonl. Attacks of the other side's kinds are left
out, and so are texts over ``--chars``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_rerank.rows import read_rows

from .files import make_folder, write_whole

SIDES = ("find", "held")
MAX_CHARS = 1500


def split_rows(
    rows: Sequence[dict[str, Any]], seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows with ``context_id``, and ``attack_type`` where they are attacks, on two sides."""
    contexts = _halves(sorted({str(row["context_id"]) for row in rows}), seed)
    kinds = _halves(sorted({row["attack_type"] for row in rows if row["label"]}), seed)
    sides = tuple(
        [
            row
            for row in rows
            if str(row["context_id"]) in contexts[side]
            and (not row["label"] or row["attack_type"] in kinds[side])
        ]
        for side in (0, 1)
    )
    return sides[0], sides[1]


def _halves(names: list[str], seed: int) -> tuple[set[str], set[str]]:
    random.Random(seed).shuffle(names)
    middle = (len(names) + 1) // 2
    return set(names[:middle]), set(names[middle:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both sides."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="bipia")
    parser.add_argument("--chars", type=int, default=MAX_CHARS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    rows = [row for _, row in read_rows(given.file) if len(row["text"]) <= given.chars]
    make_folder(given.out)
    for side, kept in zip(SIDES, split_rows(rows, given.seed), strict=True):
        path = given.out / f"{given.name}_{side}.jsonl"
        write_whole(path, "".join(f"{json.dumps(row)}\n" for row in kept))
        print(f"{path}: {len(kept)} rows, {sum(row['label'] for row in kept)} attacks")


if __name__ == "__main__":
    main()
