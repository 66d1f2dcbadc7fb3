"""The comparison of methods on stored attention."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from core_rerank.eval.head_methods import main, transfer
from core_rerank.head_attention import Measurement, QueryAttention
from core_rerank.head_store import AttentionStore
from hook_runtime.specs import ModelInfo

MODEL = ModelInfo("org/model", None, 8, 8, 5, 512, "float32", "cpu", "made")


def make_store(folder: Path, model: ModelInfo = MODEL, seed: int = 0) -> AttentionStore:
    """24 queries of 5 documents; head 3-2 always sees the positive."""
    generator = np.random.default_rng(seed)
    ids = tuple(f"q{i}" for i in range(24))
    about = Measurement(model, folder.name, "0", ids, 1, "query", 1, True, 512, 0, "0", {})
    store = AttentionStore.create(folder, about, [5] * 24)
    for row in range(24):
        query = generator.random((5, 8, 5), dtype=np.float32)
        query[0, 3, 2] += 1
        positive = np.arange(5) == 0
        store.put(row, QueryAttention(query, query * 0, np.full(5, 9, np.int32), positive))
    return store


def test_a_table_for_each_store_and_each_pair(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 1)):
        make_store(tmp_path / name, seed=seed)
    output = tmp_path / "table.md"
    main([str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(output)])
    text = output.read_text()
    assert text.count("## ") == 4
    assert "## one (24 queries, pointwise)" in text
    assert (
        "## Chosen on two (24 queries, pointwise), ranking one (24 queries, pointwise), first"
        in text
    )
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| core")]
    assert [row[1] for row in rows] == ["1.000"] * 4
    assert len(rows[0]) == len(["k", "1", "2", "4", "8", "12", "16", "32", "all", "overlap"])
    weighted = next(line for line in text.splitlines() if line.startswith("| weighted"))
    assert weighted.split(" | ")[1] == "1.000 (+0.000 to +0.000)"


def test_heads_do_not_transfer_between_models(tmp_path: Path) -> None:
    one = make_store(tmp_path / "one")
    other = make_store(tmp_path / "two", dataclasses.replace(MODEL, name="org/other"))
    with pytest.raises(ValueError, match=r"model id differs .*org/other"):
        transfer([one.load()], other.load(), 0.01)
