"""The attention store: resumed after SIGKILL, byte for byte; damage and other inputs refused."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import PlantedBackend, labelled

from core_rerank.errors import DataError
from core_rerank.head_attention import HeadAttention, Measurement, QueryAttention
from core_rerank.head_measuring import MeasureSettings, measure_attention
from core_rerank.head_store import MANIFEST, AttentionStore
from hook_runtime.specs import ModelInfo

TESTS = Path(__file__).parent.parent
SLOW_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from planted import PlantedBackend, labelled
from transformers import AutoTokenizer
from core_rerank.head_measuring import measure_attention
backend = PlantedBackend(AutoTokenizer.from_pretrained(sys.argv[2]), seconds=0.05)
measure_attention(backend, labelled(40), store=sys.argv[3], data="toy")
"""


@pytest.fixture(scope="module")
def backend(smollm2_tokenizer: Any) -> PlantedBackend:
    return PlantedBackend(smollm2_tokenizer)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_equal(one: HeadAttention, other: HeadAttention) -> None:
    assert one.measurement == other.measurement
    for name in ("query", "null", "tokens", "positive"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_a_store_holds_what_was_measured(backend: PlantedBackend, tmp_path: Path) -> None:
    queries = labelled(3)
    queries[1] = dataclasses.replace(queries[1], negatives=queries[1].negatives[:1])
    plain = measure_attention(backend, queries, data="toy")
    stored = measure_attention(backend, queries, store=tmp_path / "deep" / "store", data="toy")
    assert_equal(stored, plain)
    assert np.isnan(stored.query[1, 2]).all()
    again = AttentionStore.open(tmp_path / "deep" / "store").load()
    assert_equal(again, plain)
    assert (plain.digest, again.digest) == ("", stored.digest)


def test_views_of_larger_arrays_are_kept_as_they_look(
    backend: PlantedBackend, tmp_path: Path
) -> None:
    measured = measure_attention(backend, labelled(1))
    wide = np.random.default_rng(0).random((3, 2, *measured.query.shape[2:]), dtype=np.float32)
    given = QueryAttention(
        wide[:, 0], wide[:, 1], np.arange(1, 4, dtype=np.int32), wide[:, 0, 0, 0] > 2
    )
    store = AttentionStore.create(tmp_path, measured.measurement, [3])
    store.put(0, given)
    kept = store.get(0)
    np.testing.assert_array_equal(kept.query, wide[:, 0])
    np.testing.assert_array_equal(kept.null, wide[:, 1])


def test_a_complete_store_asks_the_engine_nothing(backend: PlantedBackend, tmp_path: Path) -> None:
    first = measure_attention(backend, labelled(3), store=tmp_path)
    calls = backend.calls
    second = measure_attention(backend, labelled(3), store=tmp_path)
    assert backend.calls == calls
    assert_equal(first, second)


def test_a_run_that_was_killed_goes_on_and_gives_the_same_files(
    backend: PlantedBackend, smollm2_dir: Path, tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-c", SLOW_RUN, str(TESTS), str(smollm2_dir), str(killed)]
    with subprocess.Popen(command) as process:
        limit = time.monotonic() + 60
        while len(list(killed.glob("*.safetensors"))) < 3:
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    done = len(list(killed.glob("*.safetensors")))
    assert 3 <= done < 40
    # What a kill in the middle of a write leaves behind.
    (killed / ".00039-00.safetensors.12-34.partial").write_bytes(b"half a file")
    calls = backend.calls
    resumed = measure_attention(backend, labelled(40), store=killed, data="toy")
    assert backend.calls - calls == 40 - done
    assert_equal(resumed, measure_attention(backend, labelled(40), store=whole, data="toy"))
    assert contents(killed) == contents(whole)
    assert AttentionStore.open(killed).digest() == AttentionStore.open(whole).digest()


@pytest.mark.parametrize("kind", ["bit", "cut", "empty", "swapped", "foreign"])
def test_damage_is_noticed(kind: str, backend: PlantedBackend, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    queries = labelled(3)
    queries[2] = dataclasses.replace(queries[2], negatives=queries[2].negatives[:1])
    measure_attention(backend, queries, store=folder)
    path, other = sorted(folder.glob("*.safetensors"))[1:]
    content = bytearray(path.read_bytes())
    if kind == "bit":
        content[-5] ^= 1
    elif kind == "cut":
        content = content[:-40]
    elif kind == "empty":
        content = bytearray()
    elif kind == "swapped":
        content = bytearray(other.read_bytes())
    else:
        measure_attention(backend, queries, MeasureSettings(seed=1), store=tmp_path / "b")
        (foreign,) = (tmp_path / "b").glob("00001-*.safetensors")
        content = bytearray(foreign.read_bytes())
        path.unlink()
        path = folder / foreign.name
    path.write_bytes(content)
    store = AttentionStore.open(folder)
    with pytest.raises(DataError, match=f"{path.name} is damaged, or is not of this store"):
        store.get(1)
    with pytest.raises(DataError, match="Delete it and run the command"):
        store.load()
    path.unlink()
    calls = backend.calls
    measure_attention(backend, queries, store=folder)
    assert backend.calls == calls + 1


def test_a_damaged_manifest_is_refused(backend: PlantedBackend, tmp_path: Path) -> None:
    measure_attention(backend, labelled(2), store=tmp_path)
    path = tmp_path / MANIFEST
    for content in (
        b"",
        b"[]",
        b"{}",
        path.read_bytes().replace(b'"seed": 0', b'"seed": 1'),
        b"\xff\xfe",
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"manifest\.json is damaged, or was written by"):
            AttentionStore.open(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"holds no measured attention \(manifest.json is missing"):
        AttentionStore.open(tmp_path)
    with pytest.raises(DataError, match=r"holds \.safetensors files but no manifest\.json"):
        measure_attention(backend, labelled(2), store=tmp_path)


def test_a_store_of_other_inputs_is_refused(backend: PlantedBackend, tmp_path: Path) -> None:
    measure_attention(backend, labelled(3), store=tmp_path, data="toy")
    before = contents(tmp_path)
    other_model = dataclasses.replace(backend.model, name="some/other")
    for queries, settings, model, message in (
        (labelled(3), MeasureSettings(seed=5), None, "seed was 0, now 5"),
        (labelled(3), MeasureSettings(window="all"), None, "window was 1, now 'all'"),
        (labelled(2), None, None, "data_hash was"),
        (labelled(3), None, other_model, "model was 'some/model', now 'some/other'"),
        (labelled(3), None, dataclasses.replace(backend.model, revision="x"), "revision was 'abc'"),
        (labelled(3), None, dataclasses.replace(backend.model, dtype="bfloat16"), "dtype was"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            measure_attention(backend, queries, settings, store=tmp_path, model=model)
        assert "or another folder" in str(caught.value)
    assert contents(tmp_path) == before
    measure_attention(backend, labelled(3), store=tmp_path, data="the same under another name")


def test_an_incomplete_store_cannot_be_chosen_from(backend: PlantedBackend, tmp_path: Path) -> None:
    measure_attention(backend, labelled(3), store=tmp_path)
    next(tmp_path.glob("00002-*")).unlink()
    store = AttentionStore.open(tmp_path)
    assert store.missing() == [2]
    with pytest.raises(DataError, match="holds 2 of 3 queries: measure the rest"):
        store.load()
    with pytest.raises(DataError, match="holds nothing for query 2"):
        store.get(2)


def test_a_query_that_is_stored_twice_is_refused(backend: PlantedBackend, tmp_path: Path) -> None:
    measure_attention(backend, labelled(2), store=tmp_path)
    (tmp_path / "00001-abc.safetensors").write_bytes(b"x")
    with pytest.raises(DataError, match="or its query is there twice"):
        AttentionStore.open(tmp_path).load()


def test_two_processes_do_not_write_at_once(backend: PlantedBackend, tmp_path: Path) -> None:
    measure_attention(backend, labelled(2), store=tmp_path)
    with (
        AttentionStore.open(tmp_path).writing(),
        pytest.raises(DataError, match="another process is measuring into"),
    ):
        measure_attention(backend, labelled(2), store=tmp_path)
    measure_attention(backend, labelled(2), store=tmp_path)


def test_the_manifest_says_what_was_measured(backend: PlantedBackend, tmp_path: Path) -> None:
    measure_attention(backend, labelled(2), store=tmp_path, data="toy")
    about = json.loads((tmp_path / MANIFEST).read_text())
    measurement = about["measurement"]
    assert measurement["model"]["name"] == "some/model"
    assert measurement["model"]["revision"] == "abc"
    assert measurement["query_ids"] == ["q0", "q1"]
    assert {"data_hash", "prompt_hash", "window", "seed", "versions"} <= set(measurement)
    assert about["documents"] == [3, 3]


# ---------------------------------------------------------------- at the size of a real model

SCALE = """
import sys
import numpy as np
from core_rerank.head_attention import HeadAttention, Measurement
from core_rerank.head_detection import Selection, find_heads
from core_rerank.head_store import AttentionStore
attention = AttentionStore.open(sys.argv[1]).load()
assert attention.query.shape == (200, 50, 32, 32)
for method in sys.argv[2:]:
    heads = find_heads(attention, Selection(method=method)).heads
    assert str(heads[0]) == "20-7", heads
with open("/proc/self/status") as lines:  # getrusage counts the parent before exec too
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20)
"""


def big_measurement(queries: int) -> Measurement:
    model = ModelInfo("big", None, 32, 32, 32, 8192, "float32", "cpu", "made")
    ids = tuple(f"q{i}" for i in range(queries))
    return Measurement(model, "made", "0", ids, "all", "query", 1, True, 512, 0, "0", {})


def big_query(generator: np.random.Generator) -> QueryAttention:
    """50 documents of noise, in which head 20-7 likes the one positive."""
    query = generator.random((50, 32, 32), dtype=np.float32) / 50
    query[0, 20, 7] += 0.02
    positive = np.arange(50) == 0
    return QueryAttention(query, query * 0.01, np.full(50, 100, np.int32), positive)


def test_a_query_costs_four_bytes_a_head_document_and_pass(tmp_path: Path) -> None:
    store = AttentionStore.create(tmp_path, big_measurement(1), [50])
    store.put(0, big_query(np.random.default_rng(0)))
    (path,) = tmp_path.glob("*.safetensors")
    expected = 50 * 32 * 32 * 2 * 4
    assert expected < path.stat().st_size < expected + 2000
    # 1,000 of them in memory, and their calibrated difference, leave most of 4 GiB free.
    assert 1000 * 1.5 * path.stat().st_size < 2**30


@pytest.mark.slow
def test_a_thousand_queries_of_a_large_model_would_fit_in_four_gib(tmp_path: Path) -> None:
    """Memory is in proportion to the queries, so a fifth of them may take a fifth of it."""
    store = AttentionStore.create(tmp_path, big_measurement(200), [50] * 200)
    generator = np.random.default_rng(0)
    for number in range(200):
        store.put(number, big_query(generator))
    command = [sys.executable, "-c", SCALE, str(tmp_path), "core", "qr", "ndcg", "weighted"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 4 / 5
