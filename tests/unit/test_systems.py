"""Systems by name, what decides their rankings, and the engines they share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from evaluations import DATA, QUERIES, run_file
from fake_backend import FakeBackend

from core_rerank.backends import OpenBackend
from core_rerank.errors import HeadSetError, ModelError
from core_rerank.eval import (
    AttentionSystem,
    CrossEncoderSystem,
    FusedSystem,
    GenerationSystem,
    attention_system,
    evaluate,
    find_candidates,
    name_systems,
)
from core_rerank.eval.systems import DEFAULT_CROSS_ENCODER, with_random_heads
from core_rerank.fusion import Fusion
from core_rerank.heads import HeadSet
from hook_runtime.specs import Head

MODEL = "test/fake"
HEADS = HeadSet(MODEL, 4, 3, (Head(1, 0), Head(0, 2)), "core", window=2, weights=(1.0, 0.5))


def main(**options: Any) -> AttentionSystem:
    return attention_system(MODEL, heads=HEADS, **options)


def test_the_main_system_has_the_rerankers_defaults() -> None:
    system = main()
    assert (system.name, system.window, system.head_set) == ("core", 2, HEADS)
    assert system.settings["heads"] == ["1-0", "0-2"]
    assert system.settings["head_weights"] == [1.0, 0.5]
    assert system.need.layers == 2
    assert attention_system(MODEL, strategy="icr").settings["heads"] == "all"
    with pytest.raises(HeadSetError, match="no head set is known for test/fake"):
        attention_system(MODEL)


def test_a_head_set_says_whether_to_calibrate() -> None:
    raw = attention_system(MODEL, heads=dataclasses.replace(HEADS, calibrate=False))
    assert not raw.settings["calibrate"]
    assert main().settings["calibrate"]
    given = attention_system(
        MODEL, heads=dataclasses.replace(HEADS, calibrate=False), calibrate=True
    )
    assert given.settings["calibrate"]
    icr = name_systems(raw, ["icr"])[1]
    assert icr.settings["calibrate"]


def test_every_name_is_a_variant_of_the_main_system() -> None:
    names = [
        "qr", "icr", "pointwise", "core:listwise", "icr:3", "random-heads:7",
        "cross-encoder:some/m", "cross-encoder", "rankgpt", "fusion", "fusion:0.25",
    ]  # fmt: skip
    systems = {system.name: system for system in name_systems(main(dtype="float32"), names)}
    assert list(systems) == ["core", *names[:-2], "core+rrf", "core+0.25"]
    attention = {n: s for n, s in systems.items() if isinstance(s, AttentionSystem)}
    assert {n: (s.strategy, s.window) for n, s in attention.items()} == {
        "core": ("core", 2),
        "qr": ("qr", 2),
        "icr": ("icr", 2),
        "pointwise": ("core", 1),
        "core:listwise": ("core", "all"),
        "icr:3": ("icr", 3),
        "random-heads:7": ("core", 2),
    }
    assert attention["icr"].head_set is None
    assert attention["qr"].head_set == HEADS
    assert [n for n, s in attention.items() if s.pointwise] == ["pointwise"]
    assert systems["cross-encoder"] == CrossEncoderSystem("cross-encoder", DEFAULT_CROSS_ENCODER)
    assert systems["cross-encoder:some/m"].settings["model"]["id"] == "some/m"
    generation = systems["rankgpt"]
    assert isinstance(generation, GenerationSystem)
    assert generation.engine == {"dtype": "float32"}
    assert systems["core+0.25"] == FusedSystem("core+0.25", "core", Fusion(0.25))


def test_fusion_is_shown_for_every_reranker() -> None:
    systems = name_systems(main(), ["icr", "fusion"], Fusion())
    assert [system.name for system in systems] == ["core", "icr", "core+rrf", "icr+rrf"]


def test_what_would_only_repeat_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    systems = name_systems(main(), ["core:2", "icr", "icr:2"])
    assert [system.name for system in systems] == ["core", "icr"]
    assert [record.getMessage() for record in caplog.records] == [
        "core:2 is what core is here, and is left out",
        "icr:2 is what icr is here, and is left out",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bm25", "no system 'bm25'. Systems are:\ncore, qr, icr"),
        ("pointwise:2", "no system"),
        ("icr:some", "window must be pointwise, listwise or a number"),
        ("icr:0", "window must be 'all' or a whole number"),
        ("random-heads:x", "seed must be a whole number"),
        ("fusion:2", "a fusion must be 'rrf'"),
    ],
)
def test_what_is_no_system_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        name_systems(main(), [name])


def test_generation_needs_vllm_and_random_heads_need_heads() -> None:
    with pytest.raises(ValueError, match="rankgpt generates on vLLM, not on transformers"):
        name_systems(main(backend="transformers"), ["rankgpt"])
    with pytest.raises(HeadSetError, match="random heads stand beside a head set"):
        name_systems(attention_system(MODEL, strategy="icr"), ["random-heads"])


def test_random_heads_are_calibrated_where_the_weights_they_lose_were_not() -> None:
    signed = dataclasses.replace(HEADS, weights=(1.0, -0.5), calibrate=False)
    control = with_random_heads(attention_system(MODEL, heads=signed), 0)
    assert control.settings["calibrate"]
    assert control.settings["head_weights"] is None
    plain = dataclasses.replace(HEADS, weights=None, calibrate=False)
    assert not with_random_heads(attention_system(MODEL, heads=plain), 0).settings["calibrate"]


def test_random_heads_are_as_many_unweighted_and_by_their_seed() -> None:
    drawn = [with_random_heads(main(), seed) for seed in (0, 0, 1, 2)]
    sets = [s.head_set for s in drawn if isinstance(s, AttentionSystem) and s.head_set]
    assert [len(s.heads) for s in sets] == [2] * 4
    assert sets[0] == sets[1]
    assert len({s.heads for s in sets}) > 1
    assert all(s.weights is None and s.scores is None for s in sets)


def test_a_models_folder_is_told_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"12")
    before = CrossEncoderSystem("x", str(folder)).settings
    assert CrossEncoderSystem("x", str(folder)).settings == before
    (folder / "model.safetensors").write_bytes(b"123")
    assert CrossEncoderSystem("x", str(folder)).settings != before


def test_a_cross_encoder_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelError, match="could not be loaded"):
        CrossEncoderSystem("x", str(folder)).start(None)


def test_a_real_cross_encoder_is_a_system(tmp_path: Path) -> None:
    import transformers

    library: Any = transformers
    words = sorted({w for text in QUERIES.values() for w in text.lower().strip("?").split()})
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    folder = tmp_path / "model"
    config = library.BertConfig(
        vocab_size=len(words) + 5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    library.BertForSequenceClassification(config).save_pretrained(folder)
    library.BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
    candidates = find_candidates(DATA, f"run:{run_file(tmp_path)}", 3)
    system = CrossEncoderSystem("tiny", str(folder), options={"device": "cpu"})
    found = evaluate(DATA, [system], candidates)["tiny"]
    assert {q: set(s) for q, s in found.run.items()} == {
        q: set(s) for q, s in candidates.run.items()
    }
    assert found.depth_curve_exact
    assert found.cost.input_tokens > 0


class Opened(FakeBackend):
    """An engine whose prefix cache can be emptied."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.llm = self
        self.resets = 0

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True


def test_systems_share_an_engine_where_they_can(
    smollm2_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, Any, Opened]] = []

    def open_backend(backend: str, resolved: Any, heads: Any, options: Any) -> OpenBackend:
        assert all(engine.closed for _, _, engine in opened)  # one at a time
        kept = 4 if heads is None else 1 + max(head.layer for head in heads)
        engine = Opened(smollm2_tokenizer, layers_kept=kept)
        opened.append((heads, dict(options), engine))
        return OpenBackend(engine, engine.model, resolved.model_id, engine.close)

    monkeypatch.setattr("core_rerank.eval.engines.open_backend", open_backend)
    candidates = find_candidates(DATA, f"run:{run_file(tmp_path)}", 5)
    systems = name_systems(main(dtype="float32"), ["icr", "qr", "pointwise", "icr:listwise"])
    report = evaluate(DATA, systems, candidates)
    assert [system.name for system in report.systems[1:]] == [system.name for system in systems]
    assert [(heads, engine.resets) for heads, _, engine in opened] == [
        (HEADS.heads, 3),  # core, qr, pointwise
        (None, 2),
    ]
    assert all(options == {"dtype": "float32"} for _, options, _ in opened)
    assert all(engine.closed for _, _, engine in opened)
    core, icr = report["core"], report["icr"]
    assert (core.facts["layers_kept"], icr.facts["layers_kept"]) == (2, 4)
    assert core.facts["prompt_hash"] == icr.facts["prompt_hash"]
    assert core.cost.input_tokens > 0
    assert core.means["nDCG@10"] > report["first-stage"].means["nDCG@10"]
