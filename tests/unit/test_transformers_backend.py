"""TransformersBackend against the independent oracle, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from oracle import reference_attention
from tiny_models import ARCHITECTURES

from hook_runtime.backend import CaptureBackend
from hook_runtime.errors import ClosedError, ProbeError, UnsupportedModelError
from hook_runtime.specs import AttentionProbe, CaptureRequest, Head
from hook_runtime.transformers_backend import TransformersBackend

PROMPT = tuple(int(i) for i in np.random.default_rng(7).integers(10, 40000, 150))
SPANS = ((5, 40), (40, 61), (64, 118))


def heads(*names: str) -> tuple[Head, ...]:
    return tuple(Head.parse(name) for name in names)


def _requests() -> list[CaptureRequest]:
    return [
        CaptureRequest(PROMPT, AttentionProbe("all", (120, 145), SPANS)),
        CaptureRequest(PROMPT[:149], AttentionProbe(heads("3-1", "0-2"), (120, 149), SPANS)),
        CaptureRequest(PROMPT, AttentionProbe(heads("2-0"), (149, 150), SPANS, "documents")),
        # Columns among and after the rows: a row sees itself and what precedes it, no more.
        CaptureRequest(PROMPT, AttentionProbe(heads("1-3"), (80, 100), ((0, 3), (90, 150)))),
    ]


def _assert_equal(captures: list, expected: list[np.ndarray], tolerance: float = 1e-4) -> None:
    assert len(captures) == len(expected)
    for capture, reference in zip(captures, expected, strict=True):
        assert capture.values.dtype == np.float32
        assert capture.values.shape == reference.shape
        error = np.abs(capture.values - reference).max() / np.abs(reference).max()
        assert error <= tolerance


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Iterator[TransformersBackend]:
    backend = TransformersBackend(str(tiny_model("llama")), name="tiny-llama")
    yield backend
    backend.close()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_matches_the_oracle(arch: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(arch)
    requests = _requests()
    expected = reference_attention(folder, requests)
    backend = TransformersBackend(str(folder))
    _assert_equal(backend.capture(requests), expected)
    # The same in chunks of 7 rows: queries straddle chunks, the last chunk is short.
    backend._max_elements = 7 * backend.model.num_heads * len(PROMPT)
    _assert_equal(backend.capture(requests), expected)


def test_matches_the_oracle_on_the_embedded_model(smollm2_dir: Path) -> None:
    requests = [
        CaptureRequest(PROMPT, AttentionProbe(heads("15-7", "10-0", "29-8"), (120, 145), SPANS)),
        CaptureRequest(PROMPT[::-1], AttentionProbe("all", (120, 145), SPANS, "documents")),
    ]
    backend = TransformersBackend(str(smollm2_dir))
    _assert_equal(backend.capture(requests), reference_attention(smollm2_dir, requests))


def test_bfloat16_matches_the_oracle_in_bfloat16(tiny_model: Callable[[str], Path]) -> None:
    import torch

    folder = tiny_model("llama")
    backend = TransformersBackend(str(folder), dtype="bfloat16")
    assert backend.model.dtype == "bfloat16"
    expected = reference_attention(folder, _requests(), dtype=torch.bfloat16)
    _assert_equal(backend.capture(_requests()), expected)


def test_is_a_capture_backend_that_describes_its_model(llama: TransformersBackend) -> None:
    assert isinstance(llama, CaptureBackend)
    info = llama.model
    assert (info.name, info.backend, info.dtype) == ("tiny-llama", "transformers", "float32")
    assert (info.num_layers, info.layers_kept, info.num_heads) == (4, 4, 6)
    assert info.max_model_len == 2048
    assert llama.tokenizer.decode(llama.tokenizer.encode("hello")) == "hello"


def test_captures_name_their_heads_in_the_order_asked(llama: TransformersBackend) -> None:
    captures = llama.capture(_requests())
    assert captures[0].heads == tuple(Head(i, h) for i in range(4) for h in range(6))
    assert captures[1].heads == (Head(3, 1), Head(0, 2))
    assert llama.capture([]) == []


@pytest.mark.parametrize(("layers", "kept"), [("auto", 3), (3, 3), (None, 4)])
def test_fewer_layers_give_the_same_numbers(
    layers: int | str | None, kept: int, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model("gemma2")
    request = CaptureRequest(PROMPT, AttentionProbe(heads("2-1", "0-0"), (120, 145), SPANS))
    backend = TransformersBackend(str(folder), heads=["2-1", "0-0"], layers=layers)  # type: ignore[arg-type]
    assert backend.model.layers_kept == kept
    assert len(backend._decoder.layers) == kept
    _assert_equal(backend.capture([request]), reference_attention(folder, [request]))


def test_all_heads_means_those_of_the_kept_layers(tiny_model: Callable[[str], Path]) -> None:
    backend = TransformersBackend(str(tiny_model("llama")), layers=2)
    capture = backend.capture([_requests()[0]])[0]
    assert capture.heads == tuple(Head(i, h) for i in range(2) for h in range(6))


def test_refuses_heads_that_do_not_exist_or_were_dropped(
    llama: TransformersBackend, tiny_model: Callable[[str], Path]
) -> None:
    missing = CaptureRequest(PROMPT, AttentionProbe(heads("4-0"), (120, 145), SPANS))
    with pytest.raises(ProbeError, match="head 4-0 does not exist in tiny-llama"):
        llama.capture([missing])
    with pytest.raises(ProbeError, match="head 0-6 does not exist"):
        TransformersBackend(str(tiny_model("llama")), heads=["0-6"])
    with pytest.raises(ProbeError, match="head 3-0 lies beyond the 2 layers kept of 4"):
        TransformersBackend(str(tiny_model("llama")), heads=["3-0"], layers=2)
    short = TransformersBackend(str(tiny_model("llama")), heads=["1-0"], layers="auto")
    with pytest.raises(ProbeError, match="head 3-0 lies beyond the 2 layers kept of 4"):
        short.capture([CaptureRequest(PROMPT, AttentionProbe(heads("3-0"), (120, 145), SPANS))])


def test_refuses_prompts_that_are_too_long(tiny_model: Callable[[str], Path]) -> None:
    backend = TransformersBackend(str(tiny_model("llama")), max_model_len=149)
    with pytest.raises(ProbeError, match=r"request 1 .* 150 tokens.* at most 149"):
        backend.capture(_requests()[1::-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"layers": "auto"}, "layers='auto' needs heads"),
        ({"layers": 0}, "1 to 4, not 0"),
        ({"layers": 5}, "1 to 4, not 5"),
        ({"layers": True}, "1 to 4, not True"),
        ({"max_model_len": 4096}, "1 to the model's 2048, not 4096"),
    ],
)
def test_refuses_arguments_out_of_range(
    arguments: dict, message: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersBackend(str(tiny_model("llama")), **arguments)


def test_refuses_a_model_without_attention_in_every_layer(
    tmp_path: Path, smollm2_dir: Path
) -> None:
    from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(smollm2_dir).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="attention"):
        TransformersBackend(str(tmp_path))


def test_threads_take_turns_and_each_gets_its_own(llama: TransformersBackend) -> None:
    requests = _requests()
    alone = [llama.capture([request])[0].values for request in requests]
    got: dict[int, np.ndarray] = {}

    def work(index: int) -> None:
        for _ in range(5):
            got[index] = llama.capture([requests[index]])[0].values

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, values in enumerate(alone):
        np.testing.assert_array_equal(got[index], values)


def test_progress_goes_to_stderr_and_only_when_asked(
    llama: TransformersBackend, capfd: pytest.CaptureFixture[str]
) -> None:
    llama.capture(_requests())
    assert capfd.readouterr() == ("", "")
    llama.capture(_requests(), progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "4/4" in err


def test_closed(tiny_model: Callable[[str], Path]) -> None:
    backend = TransformersBackend(str(tiny_model("llama")), name="tiny-llama")
    backend.close()
    backend.close()
    with pytest.raises(ClosedError, match="tiny-llama was closed"):
        backend.capture(_requests())
