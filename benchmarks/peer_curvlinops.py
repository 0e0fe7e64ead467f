"""curvlinops' own tests of its Kronecker factors and diagonals with this package's numbers in their place: a plugin of pytest, for
:mod:`benchmarks.peer_suites`.

``KFACLinearOperator``, ``EKFACLinearOperator`` and ``GGNDiagonalLinearOperator`` are curvlinops' own, and so is their algebra; what they are
made of comes from :class:`ella_cuda.laplace.KronLaplace` and :class:`~ella_cuda.laplace.DiagLaplace`. Skipped, with the reason, is what
is not there: the empirical and the forward-only Fisher, sampled diagonals, joint blocks of a weight and its bias, models that are no modules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

import curvlinops.computers.ggn_diagonal
import curvlinops.ggn_diagonal
import pytest
import torch
from curvlinops.computers._base import ParamGroup, ParamGroupKey, _BaseKFACComputer, _EKFACMixin
from curvlinops.ekfac import EKFACLinearOperator
from curvlinops.kfac import KFACLinearOperator
from torch import Tensor, nn

from ella_cuda.laplace import DiagLaplace, KronLaplace
from ella_cuda.laplace.posterior import eigenbases_of

LIKELIHOODS = {nn.MSELoss: "regression", nn.CrossEntropyLoss: "classification", nn.BCEWithLogitsLoss: "binary"}
Sides = dict[ParamGroupKey, Tensor]
# Of backends that trace, of functions that are no modules, of joint blocks of weights and biases, or of curvlinops' own errors.
NOT_OURS = ("make_fx", "callable", "conflicting_biases", "mixed_bias", "unsupported_layer_params")


class _Network(nn.Module):
    """A network as our fits take it: inputs are a tensor, outputs ``(N, ..., K)``."""

    def __init__(self, net: nn.Module, key: str | None, classes_second: bool) -> None:
        super().__init__()
        self.net, self.key, self.classes_second = net, key, classes_second

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x if self.key is None else {self.key: x})
        out = out.movedim(1, -1) if self.classes_second and out.dim() > 2 else out
        return out if len(out) == len(x) else out.unflatten(0, (len(x), -1))  # positions among the data points


class _Fit:
    """A computer of curvlinops whose numbers are those of a fit of ours."""

    def __init__(self, model: Any, loss: nn.Module, params: dict[str, Tensor], data: Any, **settings: Any) -> None:
        self._module = model
        super().__init__(model, loss, params, data, **settings)

    def _fitted(self, kind: type, settings: dict[str, Any], **how: Any) -> Any:
        """Our approximation at these parameters, of those that are given."""
        if not isinstance(self._module, nn.Module):
            pytest.skip("a model that is no module")
        first, _ = next(iter(self._data))
        key = next(iter(first)) if isinstance(first, MutableMapping) else None
        net = copy.deepcopy(self._module)
        for name, p in net.named_parameters():
            p.requires_grad_(name in self._params)
            if name in self._params:
                p.data = self._params[name].detach().clone()
        network = _Network(net, key, isinstance(self._loss_func, nn.CrossEntropyLoss))
        return kind(network, LIKELIHOODS[type(self._loss_func)], **settings).fit([*self._pairs(key)], **how)

    def _pairs(self, key: str | None) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self._data:
            x = x if key is None else x[key]
            if isinstance(self._loss_func, nn.BCEWithLogitsLoss):
                y = y.round()  # soft labels have the same Hessian
            yield x, y if len(y) == len(x) else y.unflatten(0, (len(x), -1))

    def _scale(self) -> float:
        """What curvlinops' sum over the data is times ours, which has Gaussians of variance 1."""
        total = 2.0 if isinstance(self._loss_func, nn.MSELoss) else 1.0
        return total if self._loss_func.reduction == "sum" else total / sum(y.numel() for _, y in self._data)


class EllaKFAC(_Fit, _BaseKFACComputer):
    """Kronecker factors of :class:`ella_cuda.laplace.KronLaplace`."""

    def _kron(self, **settings: Any) -> tuple[KronLaplace, list[ParamGroup]]:
        fisher, approximation = (str(getattr(v, "value", v)) for v in (self._fisher_type, self._kfac_approx))
        layers = [name.rpartition(".")[0] for name in self._params]
        if fisher in ("empirical", "forward-only"):
            pytest.skip(f"the {fisher} Fisher")
        if not self._separate_weight_and_bias and len(set(layers)) < len(layers):
            pytest.skip("one block of a weight and its bias")
        settings |= {"fisher": "mc", "mc_samples": self._mc_samples} if fisher == "mc" else {}
        generator = torch.Generator().manual_seed(self._seed)
        la = self._fitted(KronLaplace, settings | {"approximation": approximation}, generator=generator)
        return la, [{"b" if p.dim() == 1 else "W": name} for name, p in self._params.items()]

    def compute(self) -> tuple[Any, ...]:
        la, mapping = self._kron()
        inputs: Sides = {}
        outputs: Sides = {}
        for name, p in self._params.items():
            factor = la.factors[f"net.{name}"]
            if p.dim() == 1:
                outputs[(name,)] = factor.to_dense()[0].to(p.dtype) * self._scale()
                continue
            # A is curvlinops' mean over data and positions, B its sum; of ours A has the positions' sum.
            positions = factor.input_moment.rows / la.n_data
            outputs[(name,)] = (factor.outputs[0] * positions).to(p.dtype) * self._scale()
            inputs[(name,)] = (factor.inputs[0] / positions).to(p.dtype)
        return inputs, outputs, mapping


class EllaEKFAC(_EKFACMixin, EllaKFAC):
    """Eigenbases and corrected eigenvalues of :class:`ella_cuda.laplace.KronLaplace`."""

    def compute(self) -> tuple[Any, ...]:
        la, mapping = self._kron(eigenvalue_correction=True)
        inputs: Sides = {}
        outputs: Sides = {}
        values: Sides = {}
        for name, p in self._params.items():
            basis = eigenbases_of(la)[f"net.{name}"]
            values[(name,)] = basis.values.whole()[0].mT.to(p.dtype) * self._scale()
            outputs[(name,)] = basis.vectors_out[0]
            inputs |= {} if basis.vectors_in is None else {(name,): basis.vectors_in[0]}
        return inputs, outputs, values, mapping


class EllaDiagonal(_Fit, curvlinops.computers.ggn_diagonal.GGNDiagonalComputer):
    """The diagonal of :class:`ella_cuda.laplace.DiagLaplace`."""

    def compute(self) -> dict[str, Tensor]:
        if self._mc_samples:
            pytest.skip("sampled diagonals")
        la = self._fitted(DiagLaplace, {})
        parts = dict(
            zip(
                la.parameter_names,
                la.H.split([p.numel() for p in la.model.parameters() if p.requires_grad]),
                strict=True,
            )
        )
        return {n: (parts[f"net.{n}"] * self._scale()).to(p.dtype).view(p.shape) for n, p in self._params.items()}


class _Ours(dict[str, type]):
    """The backends of an operator: the one of ours, whatever it is asked for."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> type:
        return self["make_fx"]


def pytest_configure(config: pytest.Config) -> None:
    """Put our numbers where the tests import from. Of the two backends there is the one that is exact for a weight's several uses."""
    KFACLinearOperator._BACKENDS = _Ours(make_fx=EllaKFAC)
    EKFACLinearOperator._BACKENDS = _Ours(make_fx=EllaEKFAC)
    for module in (curvlinops.computers.ggn_diagonal, curvlinops.ggn_diagonal):
        module.GGNDiagonalComputer = EllaDiagonal


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of curvlinops' own code alone."""
    dropped = [item for item in items if any(word in item.originalname for word in NOT_OURS)]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]
