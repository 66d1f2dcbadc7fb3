"""What programs read, in files: what is written is found again, and what is no such file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hook_runtime.analyzers import Reading
from hook_runtime.errors import ProbeError
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe, States
from hook_runtime.state_files import load_states, save_reading


def test_states_in_a_file(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    states = (
        States(HiddenStateProbe([3, 1], positions=(2, 5)), (2, 5), values),
        States(HeadOutputProbe(["1-1"], positions="generated"), (9, 9), np.zeros((1, 0, 2))),
    )
    saved = save_reading(tmp_path / "a.safetensors", Reading("7", (1, 2), (3,), None, None, states))
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    assert (saved.request_id, saved.token_ids) == ("7", (3,))
    for found in (saved.states, load_states(tmp_path / "a.safetensors")):
        assert [s.probe for s in found] == [s.probe for s in states]
        assert [s.positions for s in found] == [(2, 5), (9, 9)]
        np.testing.assert_array_equal(found[0].values, values)
        assert found[1].values.shape == (1, 0, 2)
    from safetensors.numpy import save_file

    save_file({"x": values}, tmp_path / "other.safetensors")
    with pytest.raises(ProbeError, match="holds no states"):
        load_states(tmp_path / "other.safetensors")


def test_files_that_hold_no_states(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    values = np.ones((1, 3, 4), np.float32)
    states = States(HiddenStateProbe([1], positions="all"), (0, 3), values)
    save_reading(path, Reading("7", (1,), (), None, None, (states,)))
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    wrong = {
        "text": b"# A readme, which is text and no header",
        "three bytes": b"abc",
        "empty": b"",
        "cut off in its header": whole[: 8 + size // 2],
        "cut off in its values": whole[:-8],
        "a header of noise": whole[:8] + b"\xff" * size,
        "a list": (2).to_bytes(8, "little") + b"[]",
        "a probe missing": whole.replace(b"states.0", b"states.9"),
        "another program": whole.replace(b"hidden_state", b"hidden_stale"),
    }
    for name, content in wrong.items():
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(ProbeError, match=name):
            load_states(file)
    with pytest.raises(ProbeError, match="there is no file"):
        load_states(tmp_path / "none")
    with pytest.raises(ProbeError, match="not a safetensors file"):
        load_states(tmp_path)
