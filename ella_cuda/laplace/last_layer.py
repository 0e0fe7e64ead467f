"""Linear last layers: their inputs, the features, collected in one pass through the network, after which all else is algebra."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.augment import AveragedFunction
from ella_cuda.laplace.batches import Inputs, data_points, merged, run_model, take
from ella_cuda.laplace.copies import is_changed
from ella_cuda.laplace.evidence import Evidence
from ella_cuda.laplace.interception import hooks
from ella_cuda.laplace.rules.base import Rule
from ella_cuda.laplace.rules.linear import LinearRule
from ella_cuda.laplace.tangent_model import Cotangent
from ella_cuda.laplace.test_time import at_test_time, in_plain_products
from ella_cuda.ops._precision import without_autocast

SHARE = 2  # features may take one part in so many of the memory that a device has available
COPIES = 16  # float64 copies of a row's outputs that a product with the curvature makes, roughly


class LastLayer:
    """The :class:`torch.nn.Linear` that alone has a posterior, and whose output is the network's.

    Attributes:
        module: the layer.
        names: of its parameters with a posterior, by their names inside it those in the network.
    """

    def __init__(self, model: nn.Module, rule: Rule) -> None:
        self.model, self.module = model, rule.module
        self.names = {name: rule.full_name(name) for name in rule.parameters() if name in rule.trainable}

    @classmethod
    def of(cls, model: nn.Module, rules: Sequence[Rule]) -> LastLayer | None:
        """The last layer of a network with these rules; None where these are of several layers, or of one that is not plain."""
        if len(rules) != 1 or type(rules[0]) is not LinearRule or isinstance(model, AveragedFunction):
            return None
        (rule,) = rules
        plain = type(rule.module) is nn.Linear and not is_changed(rule.module) and not rule.tied
        return cls(model, rule) if plain else None

    def features(self, x: Inputs, at_once: int | None = None) -> tuple[Tensor, Tensor] | None:
        """The layer's inputs ``(N, ..., D)`` and the network's outputs ``(N, ..., K)``, in runs of ``at_once`` data points; None where the
        network's output is not what the layer's first call returned, or the layer's input has another dtype than its weight."""
        parts, count = [], data_points(x)
        step = max(at_once or count, 1)
        for begin in range(0, max(count, 1), step):
            found = self._some(take(x, slice(begin, begin + step)))
            if found is None:
                return None
            parts.append(found)
        features, outputs = (torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True))
        return features, outputs

    def _some(self, x: Inputs) -> tuple[Tensor, Tensor] | None:
        weight, seen = self.module.weight, []

        def note(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            seen.append((args[0].detach().clone() if args else None, out, out._version))  # what follows may change it

        with (
            hooks([self.module], after=note),
            at_test_time(self.model),
            in_plain_products(),
            without_autocast(weight.device.type),
            torch.no_grad(),
        ):
            outputs = run_model(self.model, x)
        if not seen:
            return None
        features, out, version = seen[0]
        ours = outputs is out and out._version == version and type(out) is Tensor
        if not ours or features is None or features.dim() < 2 or features.dtype != weight.dtype:
            return None
        return features, outputs

    def tangent(self, form: str = "full") -> LinearTangent:
        """The linearised network, a function of features."""
        return LinearTangent(self.module, list(self.names), form)

    def kernel(self, features: Tensor, variances: Tensor) -> Tensor:
        """The covariance ``(N ... K, N ... K)``, float64, of the outputs at features ``(N, ..., D)`` where the parameters' entries are
        independent, of one variance for each of :attr:`names`."""
        rows = features.flatten(0, -2).double()
        grams = {"weight": rows @ rows.T, "bias": rows.new_ones(len(rows), len(rows))}
        gram = sum(variance * grams[name] for name, variance in zip(self.names, variances.unbind(), strict=True))
        return torch.kron(gram, torch.eye(self.module.out_features, dtype=gram.dtype, device=gram.device))


class LinearTangent:
    """What :class:`ella_cuda.laplace.TangentModel` is for a network, for a linear layer, by products with the layer's inputs. Theta is the
    layer's named parameters, flattened one after the other."""

    def __init__(self, layer: nn.Linear, names: list[str], form: str) -> None:
        self.form, self._layer, self._names = form, layer, names
        self._sizes = [layer.get_parameter(name).numel() for name in names]

    @property
    def point(self) -> Tensor:
        return torch.cat([self._layer.get_parameter(name).detach().flatten() for name in self._names])

    def outputs(self, x: Tensor) -> Tensor:
        """The network's, ``(N, ..., K)``."""
        with torch.no_grad(), without_autocast(x.device.type):
            return self._layer(x)

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        """The linearised network's outputs at theta ``(P,)``: ``(N, ..., K)``."""
        if self.form == "simple":
            return self.jvp(x, theta)
        return self.outputs(x) + self.jvp(x, theta - self.point)

    def jvp(self, x: Tensor, u: Tensor) -> Tensor:
        """J(x) u of a direction ``(P,)``: ``(N, ..., K)``; of several ``(S, P)``, ``(S, N, ..., K)``."""
        parts = dict(zip(self._names, u.to(x.dtype).split(self._sizes, -1), strict=True))
        found = x.new_zeros(())
        with without_autocast(x.device.type):
            if "weight" in parts:
                weights = parts["weight"].reshape(-1, x.shape[-1])  # (S K, D)
                of_samples = (x @ weights.T).unflatten(-1, (*u.shape[:-1], -1))
                found = of_samples.movedim(-2, 0) if u.dim() > 1 else of_samples
            if "bias" in parts:
                bias = parts["bias"]
                found = found + bias.view(*u.shape[:-1], *[1] * (x.dim() - 1), -1)
        return found.expand(*u.shape[:-1], *x.shape[:-1], -1)

    def vjp(self, x: Tensor, r: Tensor) -> Tensor:
        """J(x)^T r of a cotangent ``(N, ..., K)``, summed over the data points: ``(P,)``."""
        x, r = x.flatten(0, -2), r.to(x.dtype).flatten(0, -2)
        with without_autocast(x.device.type):
            parts = {"weight": lambda: (r.T @ x).flatten(), "bias": lambda: r.sum(0)}
            return torch.cat([parts[name]() for name in self._names])

    def push_pull(self, x: Tensor, u: Tensor, cotangent: Cotangent) -> Tensor:
        """``J^T c``, ``(P,)``, float64, of the cotangent c that ``cotangent(f, J u)`` gives."""
        return self.vjp(x, cotangent(self.outputs(x), self.jvp(x, u))).double()


class Features:
    """The last layer's inputs at all data of a fit, with the targets, on the device: a loader of batches as large as algebra wants them.

    Attributes:
        layer: the :class:`LastLayer`.
        loader: of the data.
    """

    def __init__(self, layer: LastLayer, loader: Iterable[Any], batches: list[tuple[Tensor, Tensor]]) -> None:
        self.layer, self.loader, self._batches = layer, loader, batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)

    def sums(self) -> Tensor:
        """The sum over all rows of the features and of ones, ``(D + 1,)``, float64."""
        parts = [x.flatten(0, -2).sum(0, dtype=torch.float64) for x, _ in self._batches]
        count = sum(x[..., 0].numel() for x, _ in self._batches)
        return torch.cat([sum(parts), parts[0].new_full((1,), count)])


def batches_of_fit(la: Evidence, loader: Iterable[Any], where: str) -> Iterator[tuple[Inputs, Tensor]]:
    """The batches of the data that la was fitted to, on the model's device; ValueError where the loader yields another number of data points.
    ``where`` begins messages."""
    count = 0
    for batch in loader:
        x, y = la.fitted_model.batch(batch, where)
        count += data_points(x)
        if data_points(x):
            yield x, y
    if count != la.n_data:
        what = "its loader, re-iterable: an iterator can be consumed once only" if not count else "its loader"
        raise ValueError(
            f"{where}: the loader must yield the {la.n_data} data points of the fit, got {count}; pass {what}."
        )


def with_features(la: Evidence, loader: Iterable[Any], where: str, available: int | None, depth: int) -> Iterable[Any]:
    """The :class:`Features` of a loader of the fit's data, by one pass through the network; the loader itself where the posterior is not of
    a linear last layer alone.

    Args:
        where: who asks, for messages.
        available: how many bytes the device has, None where nothing tells.
        depth: how many calls ago a warning is about.

    Warns:
        UserWarning: the features would take more than half of the memory that the device has available, and are not kept.
    """
    layer = LastLayer.of(la.model, la._rules)
    if layer is None or isinstance(loader, Features):
        return loader
    kept: list[tuple[Tensor, Tensor]] = []
    with la.fitted_model.filling():
        for x, y in batches_of_fit(la, loader, where):
            found = layer.features(x)
            if found is None:
                return loader
            if not kept:
                needed = la.n_data * found[0][0].numel() * found[0].element_size()
                if available is not None and needed * SHARE > available:
                    warnings.warn(
                        f"{where}: the inputs of the last layer at {la.n_data:,} data points take {needed:,} bytes, more than half of the "
                        f"{available:,} that {y.device} has available, so that every pass over the data runs the network. Use a device with "
                        "more memory, or fewer data.",
                        stacklevel=depth,
                    )
                    return loader
            kept.append((found[0], y.clone()))  # a loader may use its memory again

    def room(x: Inputs) -> int:
        row = x[0].numel() // layer.module.in_features * (layer.module.out_features * COPIES + layer.module.in_features)
        return max(la.memory_budget // (row * torch.float64.itemsize), 1)

    return Features(layer, loader, list(merged(kept, room)))
