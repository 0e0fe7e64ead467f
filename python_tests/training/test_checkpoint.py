"""Checkpoints: whole or absent, refused when they do not fit, and never executed."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from ella_cuda.training.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint


def test_round_trip(tmp_path):
    path = tmp_path / "new folder" / "run.pt"
    state = {"epoch": 3, "numbers": [1.5, None], "nested": {"tensor": torch.arange(4)}}
    save_checkpoint(path, state)
    read = read_checkpoint(path)
    assert (
        read["epoch"] == 3 and read["numbers"] == [1.5, None] and torch.equal(read["nested"]["tensor"], torch.arange(4))
    )
    assert [p.name for p in path.parent.iterdir()] == ["run.pt"]


def test_failed_write_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"epoch": 1})

    def full(state, file):
        file.write(b"part of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"could not be written.*No space left.*free space or choose another folder.*untouched"
    ):
        save_checkpoint(path, {"epoch": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    assert read_checkpoint(path)["epoch"] == 1


def test_truncated_at_any_point(tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"epoch": 1, "tensor": torch.randn(10_000)})
    content = path.read_bytes()
    for length in range(0, len(content), 397):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="not a readable checkpoint"):
            read_checkpoint(path)


def test_a_flipped_bit_is_found(tmp_path):
    """Anywhere in what is stored: read as it was, or refused; never read as something else."""
    path = tmp_path / "run.pt"
    tensor = torch.randn(3_000)
    save_checkpoint(path, {"epoch": 1, "tensor": tensor})
    content = path.read_bytes()
    refused = 0
    for position in range(50, len(content), 101):
        path.write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
        try:
            read = read_checkpoint(path)
        except ValueError:
            refused += 1
        else:
            assert read["epoch"] == 1 and torch.equal(read["tensor"], tensor)
    assert refused > 12_000 // 101  # all flips in the 12,000 bytes of the tensor at least


def test_code_in_a_file_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("the checkpoint executed code",))

    (tmp_path / "run.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        read_checkpoint(tmp_path / "run.pt")


def test_another_runs_checkpoint_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    model = nn.Linear(2, 3)
    save_checkpoint(path, {"settings": {"n_epochs": 5, "fisher": "mc"}, "model": model.state_dict()})
    assert load_checkpoint(path, {"n_epochs": 5}, model)["settings"]["fisher"] == "mc"
    with pytest.raises(ValueError, match="n_epochs=5, this run has 6"):
        load_checkpoint(path, {"n_epochs": 6}, model)
    with pytest.raises(ValueError, match=r"weight of shape \(3, 2\), the model \(4, 2\)"):
        load_checkpoint(path, {}, nn.Linear(2, 4))
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="not a checkpoint of this version"):
        read_checkpoint(path)
