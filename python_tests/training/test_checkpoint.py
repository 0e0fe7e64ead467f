"""Checkpoints: whole or absent, refused when they do not fit, and never executed."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from ella_cuda.data import TensorLoader
from ella_cuda.training import MarglikTrainer
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
    with pytest.raises(OSError, match=r"No space left.*free space or choose another folder.*untouched"):
        save_checkpoint(path, {"epoch": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    assert read_checkpoint(path)["epoch"] == 1


def test_a_write_that_the_system_cuts_short_is_said_in_the_systems_words(tmp_path, beside_the_tests):
    """The operating system refuses to go on writing, of which torch makes an error of its own."""
    code = """
import resource, signal, sys, torch
from ella_cuda.training.checkpoint import save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    save_checkpoint(sys.argv[1], {"tensor": torch.zeros(100_000)})
except OSError as error:
    print(error.errno == 27, error)
"""
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"epoch": 1})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-c", code.replace("27", str(errno.EFBIG)), str(path)]
    done = subprocess.run(call, cwd=beside_the_tests, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.startswith(f"True [Errno {errno.EFBIG}] {path} could not be written (File too large); free")
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
    torch.save({"format": 4, "model": Evil()}, tmp_path / "run.pt", pickle_module=pickle)
    with pytest.raises(ValueError, match=r"something else, \S+\._Fail, than tensors and plain values") as raised:
        read_checkpoint(tmp_path / "run.pt")
    assert "weights_only" not in str(raised.value) and "trust" not in str(raised.value)


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
    save_checkpoint(path, {"settings": {}, "model": model.state_dict()})
    with pytest.raises(ValueError, match="does not say with which n_epochs it was written"):
        load_checkpoint(path, {"n_epochs": 5}, model)
    with pytest.raises(ValueError, match=r"has weight in torch\.float32, the model torch\.float64"):
        load_checkpoint(path, {}, nn.Linear(2, 3).double())
    with pytest.raises(ValueError, match="has bias, which the model has not"):
        load_checkpoint(path, {}, nn.Linear(2, 3, bias=False))


def test_fields_are_compared_exactly_but_for_rates_that_follow_from_sums(tmp_path):
    path, model = tmp_path / "run.pt", nn.Linear(2, 3)
    rate = 0.0123456789
    settings = {"lr_hyp": rate, "optimizer_groups": [{"lr": repr(rate), "betas": "(0.9, 0.999)"}]}
    save_checkpoint(path, {"settings": settings, "model": model.state_dict()})
    for change, message in (
        ({"optimizer_groups": [{"lr": repr(rate * (1 + 1e-8)), "betas": "(0.9, 0.999)"}]}, None),
        (
            {"optimizer_groups": [{"lr": repr(rate * (1 + 1e-5)), "betas": "(0.9, 0.999)"}]},
            r"optimizer_groups\[0\]\['lr'\]=",
        ),
        ({"optimizer_groups": [{"lr": repr(rate), "betas": "(0.9, 0.99)"}]}, r"optimizer_groups\[0\]\['betas'\]="),
        ({"lr_hyp": rate * (1 + 1e-15)}, "lr_hyp="),
    ):
        if message is None:
            load_checkpoint(path, settings | change, model)
        else:
            with pytest.raises(ValueError, match=message):
                load_checkpoint(path, settings | change, model)


def made(path, **options):
    """The trainer of a small network, with everything that a checkpoint can have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    loader = TensorLoader(torch.randn(12, 4), torch.arange(12) % 2, 4, shuffle=True, generator=torch.Generator())
    defaults = {"scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR, "scheduler_kwargs": {"T_max": 6}}
    defaults |= {"optimizer_cls": torch.optim.Adam}
    return MarglikTrainer(model, loader, n_epochs=2, progress_bar=False, checkpoint=path, **{**defaults, **options})


def train(path, **options):
    trainer = made(path, **options)
    trainer.run()
    return trainer.model


DAMAGES = {
    "optimizer is of another form": lambda s: s["optimizer"].pop("param_groups"),
    "optimizer is of another form .*different number": lambda s: s["optimizer"]["param_groups"].append({}),
    "learner prior is of another form .*log_precision": lambda s: s["learners"]["prior"].pop("log_precision"),
    "learner prior is of another form .*size": lambda s: s["learners"]["prior"].update(log_precision=torch.ones(3)),
    "learner prior is of another form .*None": lambda s: s["learners"].pop("prior"),
    "has no scheduler": lambda s: s.update(scheduler=None),
    "has no learners": lambda s: s.pop("learners"),
    "has no model": lambda s: s.pop("model"),
    "has no settings": lambda s: s.pop("settings"),
    "data of its settings is a int": lambda s: s["settings"].update(data=5),
    "has no margliks": lambda s: s.pop("margliks"),
    "epoch is a str": lambda s: s.update(epoch="2"),
    "losses has 1 entries of 2 epochs": lambda s: s["losses"].pop(),
    "random is of another form .*numpy": lambda s: s["random"].pop("numpy"),
    "random is of another form .*size": lambda s: s["random"].update(torch=torch.zeros(7, dtype=torch.uint8)),
    "random is of another form": lambda s: s["random"].update(loaders=[]),
}


@pytest.mark.parametrize("name", ["pipe", "device", "folder"])
def test_no_file_is_no_checkpoint(tmp_path, name):
    path = tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    elif name == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(OSError, match=r"checkpoint must be a file, but .* is a"):
        train(path)
    with pytest.raises(ValueError, match=f"not a readable checkpoint .it is a {name if name == 'folder' else 'pipe'}"):
        read_checkpoint(path)
    assert [p.name for p in tmp_path.iterdir()] == [name] and path.exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run.pt"
    train(path)
    return read_checkpoint(path)


@pytest.mark.parametrize("words", DAMAGES)
def test_an_entry_that_does_not_fit_is_named_and_nothing_changes(tmp_path, whole, words):
    state, path = copy.deepcopy(whole), tmp_path / "run.pt"
    DAMAGES[words](state)
    save_checkpoint(path, state)
    before = path.read_bytes()
    trainer = made(path)
    was = copy.deepcopy(trainer.state_dict())
    with pytest.raises(ValueError, match=rf"run\.pt cannot be gone on with: {words}"):
        trainer.run()
    now = trainer.state_dict()
    assert_same_state(now, was)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["run.pt"]  # and no claim is left


def assert_same_state(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for parts in zip(one, other, strict=True):
            assert_same_state(*parts)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
