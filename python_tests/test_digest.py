"""Digests differ where what they are of differs, and nowhere else."""

from __future__ import annotations

import json

import torch

from ella_cuda import digest
from ella_cuda.digest import broken_seal, sealed, tensors_digest


def test_tensors_are_told_apart_by_type_shape_and_every_value(monkeypatch):
    x = torch.arange(24, dtype=torch.float32).view(4, 6)
    other = x.clone()
    other[3, 5] = 22.999998
    found = [x, other, x.view(6, 4), x.double(), x.to(torch.int32).view(torch.float32), x[:3], x.flip(0), x[:0]]
    assert len({tensors_digest(t) for t in found}) == len(found)
    assert tensors_digest(x, other) != tensors_digest(other, x)
    expected = tensors_digest(x)
    strided = torch.stack([x, x], dim=-1)[..., 1]
    monkeypatch.setattr(digest, "CHUNK_BYTES", 30)
    assert expected == tensors_digest(strided) == tensors_digest(x.clone().requires_grad_())
    assert tensors_digest(torch.tensor(1.0)) != tensors_digest(torch.tensor(2.0))


def test_a_seal_survives_json_and_finds_edits():
    row = {"run": "a", "nll": 0.1 + 0.2, "layers": [{"paths": {"conv": None}}], "shape": (1, 2), "seconds": 3.0}
    read = json.loads(json.dumps(sealed(row, ["row", (1, 2)], without=["seconds"])))

    def broken(values, of=("row", [1, 2])):
        return broken_seal(values, of, without=["seconds"])

    assert broken(read) is None and broken({**read, "seconds": 4.0}) is None
    for changed in (
        {**read, "nll": 0.3},
        {**read, "layers": [{"paths": {"conv": 0}}]},
        {key: value for key, value in read.items() if key != "nll"},
    ):
        assert broken(changed) == "its digest does not fit"
    assert broken(read, ["row", [1, 3]]) == broken(read, ["diary", [1, 2]]) == "its digest does not fit"
    assert broken({key: value for key, value in read.items() if key != "digest"}) == "its digest is gone"
