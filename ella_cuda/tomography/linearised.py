"""The linearised deep image prior: a reconstruction with calibrated error bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ella_cuda.digest import tensors_digest
from ella_cuda.laplace import TangentModel
from ella_cuda.laplace.parameters import check_choice
from ella_cuda.modes import evaluation_mode
from ella_cuda.ops._precision import in_own_precision
from ella_cuda.tomography.deep_image_prior import Loop, as_image, data_loss, fit_network, require_same
from ella_cuda.tomography.evidence import (
    DenseMeasured,
    IterativeMeasured,
    LinearisedImage,
    LogNormalTerms,
)
from ella_cuda.tomography.filter_prior import FilterPrior
from ella_cuda.tomography.rays import DTYPES, LinearMap, RayTransform
from ella_cuda.tomography.total_variation import differences, expected_absolute
from ella_cuda.training.checks import positive, positive_integer

METHODS = ("auto", "dense", "iterative")
PLACES = ("network", "linear", "linear_tv")
FORMS = ("full", "simple")
LEAST_LOG_VARIANCE = -6.9
FIRST_LENGTHSCALE = 0.1
LINEAR_DECAY = 1e-6  # of weights, in the linear model's Adam


class Hyperparameters(NamedTuple):
    """Of the filter prior and the noise.

    Attributes:
        variance: by block. lengthscale: by block that has one, in pixels. noise: variance of a measurement's noise.
    """

    variance: dict[str, float]
    lengthscale: dict[str, float]
    noise: float


class LinearisedDIP:
    r"""Tomography by a deep image prior, with error bars from the network linearised at its weights.

    A network f is fitted to the measurements :math:`y = A x + \eta` of one image, by mean squared error and total variation. Then
    :math:`h(\theta) = f + J (\theta - \tilde\theta)` with a Gaussian prior of filters, :class:`FilterPrior`, is a Gaussian model of the
    image. Its evidence chooses the prior's variances and lengthscales and the noise; its posterior covariance is
    :math:`\Sigma - \Sigma A' K_{yy}^{-1} A \Sigma`, with :math:`\Sigma = J S J'` and :math:`K_{yy} = A \Sigma A' + \sigma^2 I`. The mean is
    the network's reconstruction.

    ::

        dip = LinearisedDIP(UNet(channels=16), RayTransform(28, 20))
        image = dip.reconstruct(y)
        dip.linearise().optimize_hyperparameters(at="linear")
        dip.variance(), dip.sample(100), dip.log_density(truth)

    Args:
        network: ``(1, C, H, W) -> (1, 1, H, W)``, float32 or float64, such as :class:`UNet`. It is trained in place.
        ray_transform: a :class:`RayTransform`, or a :class:`RayOperator` for functions of yours.
        tv_weight: gamma, of the image's total variation beside the mean squared error. The paper's, for 28 x 28 and 5, 10, 20, 30 angles:
            1e-5, 3e-5, 1e-4, 1e-4 at 5 % noise, 3e-5, 1e-4, 3e-4, 3e-4 at 10 %.
        blocks: names of convolution weights by block of the prior; None is by :func:`filter_blocks`. Other parameters, biases among them, are
            held at their values.
        form: "full", or "simple", which leaves out the offset o = f - J theta where the linear model's weights are found.
        method: "dense" forms Jacobian and covariances; "iterative" takes products with the Jacobian, conjugate gradients and random probes;
            "auto" is dense where that fits ``memory_budget``.
        memory_budget: bytes.
        batch_size: directions and images that go through the network together.
        n_probes, max_iterations, tol, rank: of "iterative", see :class:`IterativeMeasured`.

    Attributes:
        network, ray_transform: as given. prior: the :class:`FilterPrior`.
        reconstruction: ``(H, W)``, or None before :meth:`reconstruct`.
        losses: of every step of :meth:`reconstruct`.
        theta: weights ``(P,)`` whose norm the prior is judged by: the network's, or the linear model's after
            ``optimize_hyperparameters(at=...)``.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.

    Source: Antoran, Barbano, Leuschner, Hernandez-Lobato, Jin, "Uncertainty estimation for computed tomography with a linearised deep image
    prior", TMLR 2023 (arXiv 2203.00479).
    """

    def __init__(
        self,
        network: nn.Module,
        ray_transform: LinearMap,
        *,
        tv_weight: float = 1e-4,
        blocks: Mapping[str, Sequence[str]] | None = None,
        form: str = "full",
        method: str = "auto",
        memory_budget: int = 2 << 30,
        batch_size: int = 16,
        n_probes: int = 10,
        max_iterations: int = 50,
        tol: float = 1e-3,
        rank: int = 200,
    ) -> None:
        reals = {"tv_weight": tv_weight, "tol": tol, "memory_budget": memory_budget}
        counts = {"batch_size": batch_size, "n_probes": n_probes, "max_iterations": max_iterations}
        if rank != 0:  # no preconditioner
            counts["rank"] = rank
        reals = {name: _at_least_zero("LinearisedDIP", name, value) for name, value in reals.items()}
        counts = {name: positive_integer(name, value, "LinearisedDIP") for name, value in counts.items()}
        self.network, self.ray_transform, self.tv_weight = network, ray_transform, reals["tv_weight"]
        self.form, self.method = check_choice("form", form, FORMS), check_choice("method", method, METHODS)
        self.memory_budget, self.batch_size = reals["memory_budget"], counts.pop("batch_size")
        self._iterative = {"rank": 0, **counts, "tol": reals["tol"]}
        with torch.inference_mode(False):
            self.prior = FilterPrior(network, blocks)
        weight = network.get_parameter(self.prior.parameter_names[0])
        if weight.dtype not in DTYPES:
            raise TypeError(f"LinearisedDIP: network must be float32 or float64, got {weight.dtype}.")
        self._kind = {"dtype": weight.dtype, "device": weight.device}
        self.reconstruction: Tensor | None = None
        self.losses: list[float] = []
        self.theta: Tensor | None = None
        self._image: LinearisedImage | None = None
        self._measured: DenseMeasured | IterativeMeasured | None = None
        self._raw: dict[str, Tensor] = {}

    # reconstruction ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @in_own_precision
    def reconstruct(
        self,
        y: Tensor,
        network_input: Tensor | None = None,
        *,
        n_steps: int = 5000,
        lr: float = 1e-4,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 500,
        progress_bar: bool = True,
    ) -> Tensor:
        r"""The image of the measurements, ``(H, W)``: the network minimises
        :math:`\mathrm{mean}((A f(x) - y)^2) + \gamma\, \mathrm{TV}(f(x))`.

        By Adam, with gradients of norm 1 at most and weights within 1000; the network ends at the weights of the least loss, and the image is
        what it makes there in evaluation mode.

        Args:
            y: measurements, ``ray_transform.data_shape``.
            network_input: ``(H, W)`` or ``(1, C, H, W)``; None is ``ray_transform.fbp(y)``.
            n_steps: of Adam, those before an interruption included. The paper takes 7,400 to 50,000, more for less noise and more angles.
            lr: of Adam.
            checkpoint: a file, replaced every ``checkpoint_every`` steps and at the end. Where it exists, steps go on from it, on a CPU with
                as many threads to the same numbers bit for bit.
            progress_bar: show one.

        Raises:
            TypeError, ValueError: an argument does not fit; the checkpoint is damaged, of other data or settings.
            FloatingPointError: a loss is not finite.
            OSError: the checkpoint cannot be written. RuntimeError: another call works on it.
        """
        where = "LinearisedDIP.reconstruct"
        y = self._data(where, y)
        x = self.ray_transform.fbp(y) if network_input is None else network_input
        if not isinstance(x, Tensor) or x.dim() not in (2, 4) or not x.is_floating_point() or not x.isfinite().all():
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{where}: network_input must be finite and of shape (H, W) or (1, C, H, W), got {got}.")
        x = _own(x[None, None] if x.dim() == 2 else x, self._kind)
        if not any(p.requires_grad for p in self.network.parameters()):
            raise ValueError(f"{where}: network must have a parameter that requires a gradient, got none.")
        n_steps = positive_integer("n_steps", n_steps, where)
        checkpoint_every = positive_integer("checkpoint_every", checkpoint_every, where)
        lr = positive("lr", lr, where)
        settings = {
            "data": tensors_digest(y),
            "network_input": tensors_digest(x),
            "ray_transform": self._geometry(),
            "tv_weight": self.tv_weight,
            "lr": lr,
            "parameters": [[name, list(p.shape), p.requires_grad] for name, p in self.network.named_parameters()],
        }
        loop = Loop(where, checkpoint, settings, checkpoint_every, progress_bar)
        with evaluation_mode(self.network), torch.no_grad():
            as_image(self.network(x), self.ray_transform)
        self._image = self._measured = self.reconstruction = self.theta = None
        self.losses = fit_network(self.network, x, y, self.ray_transform, self.tv_weight, n_steps, lr, loop)
        self._x, self._y = x, y
        with evaluation_mode(self.network), torch.no_grad():
            self.reconstruction = as_image(self.network(x), self.ray_transform).clone()
        return self.reconstruction

    # the linear model --------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def linearise(self, progress_bar: bool = False) -> LinearisedDIP:
        """Linearise the network at its weights, and forget hyperparameters: variances are 1, lengthscales 0.1 pixels and the noise the mean
        squared residual. Dense methods form their matrices here. Returns self.

        Args:
            progress_bar: show one, of the terms.

        Raises:
            RuntimeError: there is no reconstruction yet.
            MemoryError: ``method="dense"`` needs more than ``memory_budget``.
        """
        if self.reconstruction is None:
            raise RuntimeError("LinearisedDIP.linearise: call reconstruct first.")
        tangent = TangentModel(self.network, self.form, self.prior.parameter_names)
        image = LinearisedImage(tangent, self._x, self.ray_transform.image_shape, self.batch_size)
        with torch.no_grad():
            self.reconstruction = as_image(tangent.outputs(self._x), self.ray_transform)
            residual = self._residual(self.reconstruction)
            need = DenseMeasured.bytes(image, self.ray_transform, self.prior)
            if self.method == "dense" and need > self.memory_budget:
                raise MemoryError(
                    f"LinearisedDIP.linearise: method='dense' takes {need / 2**20:.0f} MiB, memory_budget is "
                    f"{self.memory_budget / 2**20:.0f} MiB; raise it, or pass method='iterative'."
                )
            self._measured = None  # whose matrices would be there beside the new ones
            if self.method == "dense" or (self.method == "auto" and need <= self.memory_budget):
                self._measured = DenseMeasured(image, self.ray_transform, self.prior, progress_bar)
            else:
                self._measured = IterativeMeasured(image, self.ray_transform, self.prior, **self._iterative)
        self._image, self.theta = image, tangent.point.double()
        noise = residual.square().mean().clamp_min(torch.finfo(torch.float32).tiny)
        count, device = len(self.prior.blocks), self._kind["device"]
        self._raw = {
            "log_variance": torch.zeros(count, dtype=torch.float64, device=device),
            "log_lengthscale": torch.full(
                (len(self.prior.smooth),), math.log(FIRST_LENGTHSCALE), dtype=torch.float64, device=device
            ),
            "log_noise": noise.log(),
        }
        return self

    @property
    def is_dense(self) -> bool:
        """Whether the linear model has dense matrices.

        Raises:
            RuntimeError: :meth:`linearise` was not called.
        """
        self._require_linear("is_dense")
        return isinstance(self._measured, DenseMeasured)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Present ones.

        Raises:
            RuntimeError: :meth:`linearise` was not called.
        """
        self._require_linear("hyperparameters")
        names = [block.name for block in self.prior.blocks]
        variance = self._raw["log_variance"].exp().tolist()
        lengthscale = self._raw["log_lengthscale"].exp().tolist()
        return Hyperparameters(
            dict(zip(names, variance, strict=True)),
            {names[block]: value for block, value in zip(self.prior.smooth, lengthscale, strict=True)},
            self._raw["log_noise"].exp().item(),
        )

    def set_hyperparameters(
        self,
        variance: Mapping[str, float] | float | None = None,
        lengthscale: Mapping[str, float] | float | None = None,
        noise: float | None = None,
    ) -> None:
        """Set some: a number for all blocks, or a mapping by block; None leaves them.

        Raises:
            ValueError: a value is not positive and finite, or a block is unknown.
            RuntimeError: :meth:`linearise` was not called.
        """
        self._require_linear("set_hyperparameters")
        where = "LinearisedDIP.set_hyperparameters"
        names = [block.name for block in self.prior.blocks]
        smooth = [names[i] for i in self.prior.smooth]
        raw = {key: value.clone() for key, value in self._raw.items()}
        for key, given, known in (("variance", variance, names), ("lengthscale", lengthscale, smooth)):
            if given is None:
                continue
            values = given if isinstance(given, Mapping) else dict.fromkeys(known, given)
            for name, value in values.items():
                if name not in known:
                    raise ValueError(f"{where}: {key} must be of the blocks {', '.join(known)}, got {name!r}.")
                raw[f"log_{key}"][known.index(name)] = math.log(positive(f"{key}[{name!r}]", value, where))
        if noise is not None:
            raw["log_noise"] = torch.full_like(raw["log_noise"], math.log(positive("noise", noise, where)))
        self._raw = raw

    @torch.inference_mode(False)
    @in_own_precision
    def optimize_hyperparameters(
        self,
        n_steps: int = 1500,
        lr: float = 0.01,
        *,
        at: str = "network",
        tv_prior: float = 0.0,
        linear_steps: int = 1000,
        linear_lr: float = 1e-4,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 100,
        progress_bar: bool = True,
        generator: torch.Generator | None = None,
    ) -> list[float]:
        r"""Type-II MAP: Adam on the logarithms of variances, lengthscales and noise, to raise

        .. math:: -\tfrac12 \left( \|r\|^2/\sigma^2 + w' S^{-1} w + \log|K_{yy}| + n \log 2\pi \right) + \log p(\ell, \sigma_d^2)

        Args:
            n_steps, lr: of Adam. Logarithms of variances stay above -6.9.
            at: "network": r is the reconstruction's residual and w the network's weights. "linear": both are at the linear model's mode,
                which every step has in closed form; this is the exact evidence :math:`\log N(y; A o, K_{yy})`. "linear_tv": w minimises the
                linear model's squared error and total variation, by Adam before the first step, r is the reconstruction's, as in the paper's
                code; what few small steps leave of the start stays in its norm.
            tv_prior: TV-PredCP's scale c: the prior is the sum over blocks with a lengthscale of
                :math:`-\lambda \kappa_d + \log|\partial \kappa_d / \partial \log \ell_d|`, with :math:`\lambda = c\, n\, \gamma` and
                :math:`\kappa_d` the expected total variation under block d's prior around the reconstruction, in closed form. 0 is none; the
                paper's is 1 for small images.
            linear_steps, linear_lr: of "linear_tv".
            checkpoint, checkpoint_every, progress_bar: see :meth:`reconstruct`; the file is another. "linear_tv" has a second one beside it,
                for its weights, with ``.linear`` at the end of the name.
            generator: of the probes of ``method="iterative"``; None is torch's own. A checkpoint keeps its state too.

        Returns:
            The objective before every step; NaN with ``method="iterative"``, which estimates its gradient alone.

        Raises:
            ValueError: an argument is out of range; the checkpoint does not fit.
            RuntimeError: :meth:`linearise` was not called. FloatingPointError: the objective's gradient is not finite.
            OSError: the checkpoint cannot be written.

        Source: Antoran, Barbano et al., TMLR 2023, sections 4.1 to 4.3; for the weights, Antoran et al., ICML 2022.
        """
        where = "LinearisedDIP.optimize_hyperparameters"
        self._require_linear("optimize_hyperparameters")
        check_choice("at", at, PLACES)
        n_steps = positive_integer("n_steps", n_steps, where)
        linear_steps = positive_integer("linear_steps", linear_steps, where)
        checkpoint_every = positive_integer("checkpoint_every", checkpoint_every, where)
        lr, linear_lr = positive("lr", lr, where), positive("linear_lr", linear_lr, where)
        tv_prior = _at_least_zero(where, "tv_prior", tv_prior)
        settings: dict[str, Any] = {
            "data": tensors_digest(self._y, self._x, self._image.tangent.point),
            "ray_transform": self._geometry(),
            "tv_weight": self.tv_weight,
            "at": at,
            "tv_prior": tv_prior,
            "lr": lr,
            "form": self.form,
            "iterative": None if self.is_dense else self._iterative,
            "blocks": [[block.name, list(block.parameters)] for block in self.prior.blocks],
            "linear": [linear_steps, linear_lr] if at == "linear_tv" else None,
            "generator": generator is not None,
        }
        loop = Loop(where, checkpoint, settings, checkpoint_every, progress_bar)
        projected = self.ray_transform.forward(self.reconstruction)
        if at == "linear_tv":
            own = {"data", "ray_transform", "tv_weight", "form", "blocks"}
            beside = Loop(
                "LinearisedDIP: linear weights",
                None if checkpoint is None else Path(checkpoint).with_name(Path(checkpoint).name + ".linear"),
                {key: settings[key] for key in settings if key in own} | {"linear_lr": linear_lr},
                checkpoint_every,
                progress_bar,
            )
            self.theta = self._linear_weights(linear_steps, linear_lr, projected, beside)
        elif at == "network":
            self.theta = self._image.tangent.point.double()
        raw = {key: value.clone().requires_grad_() for key, value in self._raw.items()}
        optimizer = torch.optim.Adam(raw.values(), lr=lr)
        tv_terms = self._measured.difference_terms(generator) if tv_prior and self.prior.smooth else None
        moments = None if at == "linear" else self.prior.moments(self.theta)

        def step() -> float:
            optimizer.zero_grad()
            value = self._objective(raw, moments, tv_prior, tv_terms, generator)
            (-value).backward()
            if not all(r.grad.isfinite().all() for r in raw.values()):
                raise FloatingPointError(
                    f"{where}: the gradient is not finite; lower lr, or set_hyperparameters first."
                )
            optimizer.step()
            with torch.no_grad():
                raw["log_variance"].clamp_(min=LEAST_LOG_VARIANCE)
            return value.item()

        def state() -> dict[str, Any]:
            return {
                "raw": {key: r.detach() for key, r in raw.items()},
                "optimizer": optimizer.state_dict(),
                "tv_terms": tv_terms,
                "measured": self._measured.state_dict(),
                "projected": projected,
                "generator": None if generator is None else generator.get_state(),
            }

        def restore(kept: Mapping[str, Any]) -> None:
            nonlocal tv_terms
            require_same(kept["projected"], projected)
            with torch.no_grad():
                for key, r in raw.items():
                    r.copy_(kept["raw"][key])
            optimizer.load_state_dict(kept["optimizer"])
            if tv_terms is not None:
                tv_terms = kept["tv_terms"].to(tv_terms)
            self._measured.load_state_dict(kept["measured"])
            if generator is not None:
                generator.set_state(kept["generator"])

        with torch.enable_grad():
            values = loop.run(n_steps, step, state, restore)
        self._raw = {key: r.detach().clone() for key, r in raw.items()}
        if at == "linear":
            self.theta = self.linear_mode()
        return values

    @torch.no_grad()
    @in_own_precision
    def log_marginal_likelihood(self, at: str = "network", generator: torch.Generator | None = None) -> Tensor:
        """The evidence of the measurements at present hyperparameters, nats, without a hyperprior; 0-dim float64. ``method="iterative"``
        estimates it, by random probes.

        Args:
            at: "network", or "linear", see :meth:`optimize_hyperparameters`; "linear_tv" is with :attr:`theta` as that left it.
            generator: of those probes; None is torch's own.

        Raises:
            ValueError: no such place. RuntimeError: :meth:`linearise` was not called.
        """
        self._require_linear("log_marginal_likelihood")
        check_choice("at", at, PLACES)
        weights, noise = self._weights(self._raw), self._raw["log_noise"].exp()
        logdet = self._measured.log_determinant(weights, noise, generator=generator)
        if at == "linear":
            r = self._linear_residual()
            fit = r @ self._measured.solve(weights, noise, r[None])[0]
        else:
            theta = self._image.tangent.point.double() if at == "network" else self.theta
            fit = self._residual(self.reconstruction).square().sum() / noise
            fit = fit + self.prior.penalty(self.prior.moments(theta), weights)
        return -0.5 * (fit + logdet + self._y.numel() * math.log(2 * math.pi))

    @torch.no_grad()
    @in_own_precision
    def linear_mode(self) -> Tensor:
        r"""The linear model's weights at the mode of their posterior, ``(P,)``, float64:
        :math:`S J' A' K_{yy}^{-1} (y - A o)`.

        Raises:
            RuntimeError: :meth:`linearise` was not called.
        """
        self._require_linear("linear_mode")
        weights, noise = self._weights(self._raw), self._raw["log_noise"].exp()
        solved = self._measured.solve(weights, noise, self._linear_residual()[None])
        shaped = solved.to(self._kind["dtype"]).view(1, *self.ray_transform.data_shape)
        pulled = self._image.pull(self.ray_transform.adjoint(shaped)).double()
        return self.prior.multiply(pulled, self.prior.tap_covariances(weights))[0]

    # error bars --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @in_own_precision
    def covariance(self, image_noise: bool = False) -> Tensor:
        r"""Posterior covariance of the image's pixels, row after row: ``(H*W, H*W)``, float64.

        Args:
            image_noise: add :math:`\sigma^2 \, \mathrm{mean\,diag}\,(A'A)^+` to the diagonal, along A's first 100 singular vectors: noise
                of the measurements as the image sees it.

        Raises:
            MemoryError: it does not fit ``memory_budget``: use :meth:`sample`. RuntimeError: :meth:`linearise` was not called.

        Source: Antoran, Barbano et al., TMLR 2023, section 4.3 and appendix.
        """
        self._require_linear("covariance")
        need = 8 * 2 * self._image.n_pixels**2  # a matrix and a copy; dense matrices have their room
        if need > self.memory_budget:
            raise MemoryError(
                f"LinearisedDIP.covariance: {need / 2**20:.0f} MiB are more than memory_budget, {self.memory_budget / 2**20:.0f} MiB; "
                "use sample(n), or variance()."
            )
        noise = self._raw["log_noise"].exp()
        found = self._measured.covariance(self._weights(self._raw), noise)
        if image_noise:
            found.diagonal().add_(noise * self.ray_transform.noise_gain(**self._kind))
        return found

    @in_own_precision
    def variance(
        self, image_noise: bool = False, n_samples: int = 1000, generator: torch.Generator | None = None
    ) -> Tensor:
        """Posterior variance of each pixel, ``(H, W)``, float64: exact with dense matrices, by ``n_samples`` samples else.

        Args:
            image_noise: see :meth:`covariance`. generator: of the samples.

        Raises:
            RuntimeError: :meth:`linearise` was not called.
        """
        if self.is_dense:
            return self.covariance(image_noise).diagonal().view(self._image.image_shape)
        n_samples = positive_integer("n_samples", n_samples, "LinearisedDIP.variance")
        total, left = torch.zeros(self._image.image_shape, dtype=torch.float64, device=self._kind["device"]), n_samples
        while left:
            count = min(left, self.batch_size)
            total += self._deviations(count, generator).square().sum(0)
            left -= count
        found = total / n_samples
        return (
            found + self._raw["log_noise"].exp() * self.ray_transform.noise_gain(**self._kind) if image_noise else found
        )

    @in_own_precision
    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        r"""Images from the posterior, ``(n, H, W)``, float64, by Matheron's rule: prior samples :math:`x_0` and noise :math:`\epsilon` give
        :math:`\hat x + x_0 + \Sigma A' K_{yy}^{-1} (\epsilon - A x_0)`.

        Raises:
            ValueError: n is not positive. RuntimeError: :meth:`linearise` was not called.

        Source: Wilson et al., "Efficiently sampling functions from Gaussian process posteriors", ICML 2020.
        """
        self._require_linear("sample")
        n = positive_integer("n", n, "LinearisedDIP.sample")
        return self.reconstruction.double() + self._deviations(n, generator)

    @torch.no_grad()
    def log_density(
        self,
        x: Tensor,
        image_noise: bool = True,
        patch_size: int | None = None,
        n_samples: int = 4096,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Log density per pixel of a true image under the posterior, 0-dim float64, nats; higher is better.

        Args:
            x: ``(H, W)``.
            image_noise: see :meth:`covariance`.
            patch_size: None is the whole image's covariance; else the mean over square patches of this side, smaller at the border, between
                which nothing is correlated.
            n_samples: with ``method="iterative"`` and patches, of which the covariance of each patch is taken; off its diagonal it is halved.
            generator: of those samples.

        Raises:
            ValueError: x is no finite image of this size. RuntimeError: :meth:`linearise` was not called.
            MemoryError: see :meth:`covariance`. FloatingPointError: the covariance is singular; take ``image_noise``.

        Source: Antoran, Barbano et al., TMLR 2023, section 5.
        """
        self._require_linear("log_density")
        where, shape = "LinearisedDIP.log_density", self._image.image_shape
        if not isinstance(x, Tensor) or tuple(x.shape) != shape or not x.isfinite().all():
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{where}: x must be a finite image {shape}, got {got}.")
        error = (x.to(self._kind["device"]).double() - self.reconstruction.double()).flatten()
        if patch_size is None:
            return _log_normal(where, error, self.covariance(image_noise)) / len(error)
        side = positive_integer("patch_size", patch_size, where)
        n_samples = positive_integer("n_samples", n_samples, where)
        number = torch.arange(len(error), device=error.device).view(shape)
        patches = [part.flatten() for rows in number.split(side, 0) for part in rows.split(side, 1)]
        if self.is_dense:
            whole = self.covariance(image_noise)
            blocks = [whole[patch][:, patch] for patch in patches]
        else:
            blocks = [error.new_zeros(len(patch), len(patch)) for patch in patches]
            extra, left = (
                self._raw["log_noise"].exp() * self.ray_transform.noise_gain(**self._kind) if image_noise else 0.0,
                n_samples,
            )
            while left:
                drawn = self._deviations(min(left, self.batch_size), generator).flatten(1)
                left -= len(drawn)
                for block, patch in zip(blocks, patches, strict=True):
                    block.addmm_(drawn[:, patch].T, drawn[:, patch], alpha=1 / n_samples)
            for block in blocks:
                block.add_(block.diagonal().diag()).mul_(0.5)
                block.diagonal().add_(extra)
        parts = [_log_normal(where, error[patch], block) for patch, block in zip(patches, blocks, strict=True)]
        return torch.stack(parts).sum() / len(error)

    # parts -------------------------------------------------------------------------------------------------------

    def _objective(
        self,
        raw: Mapping[str, Tensor],
        moments: list[Tensor] | None,
        tv_prior: float,
        tv_terms: Tensor | None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """What is raised: see :meth:`optimize_hyperparameters`."""
        weights, noise = self._weights(raw), raw["log_noise"].exp()
        residual = self._linear_residual() if moments is None else None
        terms = LogNormalTerms.apply(self._measured, weights, noise, residual, generator)
        if moments is not None:
            terms = (
                terms
                + self._residual(self.reconstruction).square().sum() / noise
                + self.prior.penalty(moments, weights)
            )
        found = -0.5 * (terms + self._y.numel() * math.log(2 * math.pi))
        if tv_terms is None:
            return found
        return found + self._tv_prior(raw, tv_terms, tv_prior * self._y.numel() * self.tv_weight)

    def _tv_prior(self, raw: Mapping[str, Tensor], terms: Tensor, strength: float) -> Tensor:
        """TV-PredCP's log density, up to a constant."""
        weighted = self._weights(raw)[:, None] * terms
        parts = self.prior.by_block(weighted)
        variances = torch.stack([parts[block].sum(0) for block in self.prior.smooth])
        kappa = expected_absolute(differences(self.reconstruction.double()), variances).sum(1)
        # A block's depends on its own lengthscale alone.
        (slopes,) = torch.autograd.grad(kappa.sum(), raw["log_lengthscale"], create_graph=True)
        sizes = slopes.abs().clamp_min(torch.finfo(slopes.dtype).tiny)
        return sizes.log().sum() - strength * kappa.sum()

    @torch.no_grad()
    def _linear_weights(self, n_steps: int, lr: float, projected: Tensor, loop: Loop) -> Tensor:
        """The linear model's weights by Adam on the loss of the reconstruction, from the network's on, or from 0 in the simple form; those of
        the least loss."""
        tangent, x, best, loss = self._image.tangent, self._x, math.inf, math.inf
        simple, point = self.form == "simple", tangent.point.double()
        theta = torch.zeros_like(point) if simple else point.clone()
        found = theta.clone()
        theta.requires_grad_()
        optimizer = torch.optim.Adam([theta], lr=lr, weight_decay=LINEAR_DECAY)

        def cotangent(f: Tensor, along: Tensor) -> Tensor:
            nonlocal loss
            image = (along if simple else f + along).detach().requires_grad_()
            with torch.enable_grad():
                value = data_loss(image[0, 0], self._y, self.ray_transform, self.tv_weight)
                (slope,) = torch.autograd.grad(value, image)
            loss = value.item()
            return slope

        def step() -> float:
            nonlocal best, found
            along = theta.detach() if simple else theta.detach() - point
            theta.grad = tangent.push_pull(x, along, cotangent)
            if not math.isfinite(loss):
                raise FloatingPointError(
                    "LinearisedDIP.optimize_hyperparameters: the linear loss is not finite; lower linear_lr."
                )
            if loss < best:
                best, found = loss, theta.detach().clone()
            optimizer.step()
            return loss

        def state() -> dict[str, Any]:
            return {
                "theta": theta.detach(),
                "best": [best, found],
                "optimizer": optimizer.state_dict(),
                "projected": projected,
            }

        def restore(kept: Mapping[str, Any]) -> None:
            nonlocal best, found
            require_same(kept["projected"], projected)
            theta.detach().copy_(kept["theta"])
            best, found = float(kept["best"][0]), kept["best"][1].to(theta)
            optimizer.load_state_dict(kept["optimizer"])

        loop.run(n_steps, step, state, restore)
        return found

    def _weights(self, raw: Mapping[str, Tensor]) -> Tensor:
        return self.prior.weights(raw["log_variance"], raw["log_lengthscale"])

    def _residual(self, image: Tensor) -> Tensor:
        """y - A x, flat, float64."""
        return (self._y - self.ray_transform.forward(image)).flatten().double()

    def _linear_residual(self) -> Tensor:
        """y - A o, flat, float64."""
        if self._image.offset is None:
            self._image.offset = as_image(self._image.tangent.offset(self._x), self.ray_transform).detach()
        return self._residual(self._image.offset)

    @torch.no_grad()
    def _deviations(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Posterior samples around a mean of 0, ``(n, H, W)``."""
        weights, noise, measured = self._weights(self._raw), self._raw["log_noise"].exp(), self._measured
        x = measured.prior_draws(weights, n, generator)
        projected = self.ray_transform.forward(x.to(self._kind["dtype"])).reshape(n, -1).double()
        drawn = torch.randn(projected.shape, dtype=torch.float64, device=x.device, generator=generator)
        # Dense matrices are factorised once for all.
        parts = (drawn * noise.sqrt() - projected).split(n if self.is_dense else self.batch_size)
        return x + torch.cat([measured.smoothed(weights, measured.solve(weights, noise, part)) for part in parts])

    def _geometry(self) -> list[Any]:
        """What a checkpoint can tell transforms apart by."""
        rays = self.ray_transform
        return [
            list(rays.data_shape),
            list(rays.image_shape),
            rays.angles.tolist() if isinstance(rays, RayTransform) else None,
        ]

    def _data(self, where: str, y: Tensor) -> Tensor:
        shape = self.ray_transform.data_shape
        if not isinstance(y, Tensor) or tuple(y.shape) != tuple(shape) or not y.is_floating_point():
            got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"{where}: y must be floating point measurements {tuple(shape)}, got {got}.")
        if not y.isfinite().all():
            raise ValueError(f"{where}: y must be finite, got {int((~y.isfinite()).sum())} values that are not.")
        return _own(y, self._kind)

    def _require_linear(self, what: str) -> None:
        if self._measured is None:
            raise RuntimeError(f"LinearisedDIP.{what}: call linearise first, after reconstruct.")


def _own(tensor: Tensor, kind: Mapping[str, Any]) -> Tensor:
    """A copy, which a caller's changes do not reach."""
    return tensor.detach().clone().to(**kind)


def _log_normal(where: str, error: Tensor, covariance: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(covariance)
    if info:
        raise FloatingPointError(f"{where}: the covariance is singular to rounding; pass image_noise=True.")
    white = torch.linalg.solve_triangular(factor, error[:, None], upper=False)
    return -0.5 * (white.square().sum() + len(error) * math.log(2 * math.pi)) - factor.diagonal().log().sum()


def _at_least_zero(where: str, name: str, value: float) -> float:
    return 0.0 if isinstance(value, (int, float)) and value == 0 else positive(name, value, where)
