"""Networks of timm and transformers as they come: factors beside gradients of autograd, one data point after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ella_cuda.laplace import KronLaplace

DOCS = Path(__file__).parents[2] / "docs/networks.md"
NAMES = (
    "torchvision.swin_v2",
    "timm.eva02_tiny_patch14_224",
    "timm.maxvit_rmlp_pico_rw_256",
    "timm.xcit_nano_12_p16_224",
    "transformers.BertForSequenceClassification",
    "transformers.DistilBertForSequenceClassification",
    "transformers.GPT2ForSequenceClassification",
    "transformers.T5ForSequenceClassification",
)
POINTS = 2


def calls_on(model: nn.Module, x: Tensor) -> tuple[Tensor, list[tuple[str, Tensor, Tensor]]]:
    """The outputs for the first data point, and the calls of linear layers and tables: the weight's name, inputs and outputs."""
    calls, handles = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":

            def note(module: nn.Module, args: tuple[Tensor], out: Tensor, name: str = f"{name}.weight") -> Tensor:
                calls.append((name, args[0].detach().clone(), out))
                return out.clone()  # which the next layer may change in place

            handles.append(module.register_forward_hook(note))
    outputs = model(x)[0]
    for handle in handles:
        handle.remove()
    return outputs, calls


def close(found: Tensor, expected: Tensor) -> None:
    """Up to 1e-7 of the largest number, as some norms compute in float32, and up to what is zero but for rounding."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 + 1e-7 * float(expected.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_factors_are_those_of_gradients(name):
    pytest.importorskip(name.partition(".")[0])
    networks = pytest.importorskip("benchmarks.downloaded_networks").networks()
    torch.manual_seed(0)
    model, x = networks[name]()
    model, x = model.double().eval(), (x.double() if x.is_floating_point() else x)[:POINTS]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    la = KronLaplace(model).fit([(x, torch.tensor([0, 2]))])
    parameters = dict(model.named_parameters())
    assert la.parameter_names == list(parameters)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    blocks = {n: 0 for n, f in la.factors.items() if f.shape.constant_input}
    diagonals = {n: 0 for n, f in la.factors.items() if f.shape.inputs == f.shape.outputs == 1 < f.shape.groups}
    seen: dict[str, int] = {}
    for one in x.split(1):
        # Twice: with a batch of one torch's CPU backward of batch norms is wrong at gradients with channels last.
        (f, calls), (_, alone) = calls_on(model, torch.cat([one, one])), calls_on(model, one)
        values, vectors = torch.linalg.eigh(torch.diag(f.softmax(0)) - f.softmax(0).outer(f.softmax(0)))
        for column in (vectors * values.clamp(min=0).sqrt()).detach().T:
            tensors = [*parameters.values(), *(out for *_, out in calls)]
            found = torch.autograd.grad(f, tensors, column, retain_graph=True, materialize_grads=True)
            for parameter, g in zip(parameters, found, strict=False):
                if parameter in blocks:
                    blocks[parameter] = blocks[parameter] + g.flatten().outer(g.flatten())
                elif parameter in diagonals:
                    diagonals[parameter] = diagonals[parameter] + g.flatten().square()
            for (parameter, _, out), g in zip(alone, found[len(parameters) :], strict=True):
                rows = g.flatten(0, -2)[: out.numel() // out.shape[-1]]  # the others are the second's, and zero
                outputs[parameter] = outputs.get(parameter, 0) + rows.T @ rows / len(rows)
        for parameter, a, _ in alone:
            rows = a.flatten(0, -2) if a.is_floating_point() else None
            gram = (
                a.flatten().bincount(minlength=len(model.get_parameter(parameter))) if rows is None else rows.T @ rows
            )
            inputs[parameter] = inputs.get(parameter, 0) + gram / POINTS
            seen[parameter] = seen.get(parameter, 0) + 1
    for parameter, expected in blocks.items():
        close(la.factors[parameter].to_dense()[0], expected)
    for parameter, expected in diagonals.items():
        close(la.factors[parameter].to_dense().flatten(), expected)
    alone = [n for n, count in seen.items() if count == POINTS and n in la.factors]  # called once, tied to no other
    assert len(alone) >= 5
    for parameter in alone:
        found = la.factors[parameter].inputs
        found = found.flatten() if inputs[parameter].dim() == 1 else found[0]
        if not getattr(model.get_submodule(parameter.removesuffix(".weight")), "padding_idx", None):
            close(found, inputs[parameter].double())
            close(la.factors[parameter].outputs[0], outputs[parameter])


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_the_scripts_of_the_documentation_run(library):
    pytest.importorskip(library)
    scripts = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    (script,) = (text for text in scripts if f"import {library}" in text)
    found: dict[str, object] = {}
    exec(script, found)
    assert found["la"].log_marginal_likelihood().isfinite()
    torch.testing.assert_close(found["probabilities"].sum(1), torch.ones(3))


def test_a_head_tied_to_the_words_of_gpt2():
    """Of all parameters one factor of both uses; as the last layer a copy, whose factors are those of the head at its inputs."""
    transformers = pytest.importorskip("transformers")
    networks = pytest.importorskip("benchmarks.downloaded_networks")
    torch.manual_seed(0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=6, vocab_size=7, **ids)
    net = transformers.GPT2LMHeadModel(config).double().eval()
    model, x, y = networks.Logits(net), torch.randint(7, (3, 5)), torch.randint(7, (3, 5))
    whole = KronLaplace(model).fit([(x, y)])
    assert "one with net.transformer.wte.weight" in whole.summary()
    with pytest.raises(ValueError, match=r"'net.lm_head'.*shares.*own copy, module.weight = nn.Parameter\("):
        KronLaplace(model, subset_of_weights="last_layer")
    net.lm_head.weight = nn.Parameter(net.lm_head.weight.detach().clone())
    last = KronLaplace(model, subset_of_weights="last_layer").fit([(x, y)])
    features = net.transformer(x).last_hidden_state.detach()
    p = model(x).detach().softmax(-1)
    hessian = torch.diag_embed(p) - p[..., None] * p[..., None, :]
    (factor,) = last.factors.values()
    close(factor.inputs[0], (features.mT @ features).mean(0))
    close(factor.outputs[0], hessian.sum((0, 1)) / 5)
