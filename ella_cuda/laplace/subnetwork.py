"""Masks of the parameters that have a posterior, for :class:`ella_cuda.laplace.SubnetLaplace`; names are laplace-torch's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ella_cuda.laplace.base import BaseLaplace
from ella_cuda.laplace.exact_ggn import DiagLaplace
from ella_cuda.laplace.parameters import checked_names, is_inside, trainable
from ella_cuda.nn._sizes import as_count


class SubnetMask(ABC):
    """A choice among the elements of a model's trainable parameters, flattened one after the other in ``model.named_parameters()`` order.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = trainable(model)
        self._indices: Tensor | None = None

    @property
    def indices(self) -> Tensor:
        """The indices that :meth:`select` chose, int64, ascending.

        Raises:
            AttributeError: nothing is chosen yet.
        """
        if self._indices is None:
            raise AttributeError(f"{type(self).__name__}: call select first.")
        return self._indices

    @property
    def n_params_subnet(self) -> int:
        """How many elements are chosen."""
        return len(self.indices)

    def select(self, train_loader: Iterable[Any] | None = None) -> Tensor:
        """Choose; the indices ``(S,)``, int64, ascending.

        Args:
            train_loader: yields ``(x, y)``, for masks that look at data.
        """
        self._indices = self._mask(train_loader).flatten().nonzero().flatten()
        return self._indices

    @abstractmethod
    def _mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Bool, one entry for each element."""

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])


class ScoreBasedSubnetMask(SubnetMask):
    """The elements with the largest scores.

    Args:
        model: the network.
        n_params_subnet: how many.

    Raises:
        ValueError: there are not that many.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int) -> None:
        super().__init__(model)
        count = sum(p.numel() for p in self.parameters.values())
        if not 0 < as_count("n_params_subnet", n_params_subnet) <= count:
            raise ValueError(
                f"n_params_subnet must be from 1 to the model's {count} trainable parameters, got {n_params_subnet!r}."
            )
        self._count = n_params_subnet

    def _mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        scores = self.scores(train_loader)
        mask = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        mask[scores.topk(self._count).indices] = True
        return mask

    @abstractmethod
    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """A score for each element."""


class RandomSubnetMask(ScoreBasedSubnetMask):
    """Elements drawn from torch's global generator, or from ``generator``."""

    def __init__(self, model: nn.Module, n_params_subnet: int, generator: torch.Generator | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self._generator = generator

    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        count, on = sum(p.numel() for p in self.parameters.values()), self._generator
        return torch.rand(count, generator=on, device=on.device if on else "cpu")


class LargestMagnitudeSubnetMask(ScoreBasedSubnetMask):
    """The elements with the largest magnitudes."""

    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        return self._flat().abs()


class LargestVarianceDiagLaplaceSubnetMask(ScoreBasedSubnetMask):
    """The elements with the largest variances under an approximation: under independent marginals the choice that is nearest to the whole
    posterior in the 2-Wasserstein distance.

    Args:
        model: the network.
        n_params_subnet: how many.
        diag_laplace_model: of the model, a :class:`ella_cuda.laplace.DiagLaplace` or another of this package's approximations of all
            parameters, whose marginal variances count; fitted to the loader where it is not yet. None makes a DiagLaplace for
            classification.

    Source: Daxberger et al., "Bayesian deep learning via subnetwork inference", ICML 2021, section 4.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int, diag_laplace_model: BaseLaplace | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self.diag_laplace_model = DiagLaplace(model) if diag_laplace_model is None else diag_laplace_model
        if self.diag_laplace_model.parameter_names != list(self.parameters):
            raise ValueError("diag_laplace_model: expected an approximation of all trainable parameters of the model.")

    def scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        if not self.diag_laplace_model.n_data:
            if train_loader is None:
                raise ValueError(f"{type(self).__name__}.select: pass train_loader, or a fitted diag_laplace_model.")
            self.diag_laplace_model.fit(train_loader)
        return self.diag_laplace_model.posterior_precision.diag(-1)


class ParamNameSubnetMask(SubnetMask):
    """All elements of named parameters.

    Raises:
        ValueError: no name is given, or one is no trainable parameter's.
    """

    def __init__(self, model: nn.Module, parameter_names: Sequence[str]) -> None:
        super().__init__(model)
        self._names = checked_names("parameter_names", parameter_names, self.parameters)

    def _mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        parts = [torch.full((p.numel(),), name in self._names, device=p.device) for name, p in self.parameters.items()]
        return torch.cat(parts)


class ModuleNameSubnetMask(SubnetMask):
    """All elements of the parameters inside of named modules.

    Raises:
        ValueError: no name is given, or one is no module's that has trainable parameters.
    """

    def __init__(self, model: nn.Module, module_names: Sequence[str]) -> None:
        super().__init__(model)
        known = {m for m, _ in model.named_modules() if any(is_inside(p, m) for p in self.parameters)}
        self._names = checked_names("module_names", module_names, known)

    def _mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        chosen = {p for p in self.parameters if any(is_inside(p, name) for name in self._names)}
        return torch.cat([torch.full((p.numel(),), n in chosen, device=p.device) for n, p in self.parameters.items()])


class LastLayerSubnetMask(ModuleNameSubnetMask):
    """All elements of the last layer's parameters.

    Args:
        model: the network.
        last_layer_name: None is the last module of ``model.named_modules()`` that itself has trainable parameters.
    """

    def __init__(self, model: nn.Module, last_layer_name: str | None = None) -> None:
        name = list(trainable(model))[-1].rpartition(".")[0] if last_layer_name is None else last_layer_name
        super().__init__(model, [name])
