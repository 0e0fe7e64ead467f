"""Fits of laplace-torch on the CONV network, 1,000 images, exact generalised Gauss-Newton: with its own backends, curvlinops and ASDL
(asdfghjkl 0.1a4), with ours in their place, and with our block structure.

Every candidate is a ``laplace.Laplace`` that fits and gives its evidence. The peers run the network with explicit padding, in torch's own
convolutions, for which they are right. Ours run that too, and the same function in this package's own layers, which only ours can fit.
Log determinants of the weights are compared on a few images first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.bench_factors import BATCH, CLASSES, IMAGES, WIDTH, batches, explicit_padding
from benchmarks.counting import count
from ella_cuda import models
from ella_cuda.testing import float32_convolutions

laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed", exc_type=ImportError)
plug = pytest.importorskip("ella_cuda.compat.laplace", exc_type=ImportError)

OWN = ", own layers"
WHO = ("curvlinops", "ASDL", "EllaGGN", "ella_kron", f"EllaGGN{OWN}", f"ella_kron{OWN}")
PEERS = {"curvlinops": "CurvlinopsGGN", "ASDL": "AsdlGGN"}


def log_determinants(la: Any) -> list[torch.Tensor]:
    """``log|A x B + I|`` of every weight."""
    if isinstance(la, plug.EllaKronLaplace):
        one = torch.ones((), dtype=torch.float64, device=la.mean.device)
        return [f.logdet(one) for n, f in la.ella.factors.items() if n.endswith("weight")]
    sides = [s for s, p in zip(la.H.eigenvalues, la.params, strict=True) if p.dim() > 1]
    return [torch.log1p(torch.outer(*(v.double() for v in values))).sum() for values in sides]


def maker(who: str, model: torch.nn.Module) -> Callable[[], Any]:
    """What makes an unfitted approximation."""
    who, _, _ = who.partition(",")
    if who == "ella_kron":
        return lambda: laplace.Laplace(model, "classification", "all", "ella_kron")
    backend = plug.EllaGGN if who == "EllaGGN" else getattr(laplace.curvature, PEERS[who], None)
    if backend is None:
        pytest.skip(f"laplace-torch has no {PEERS[who]} here")
    return lambda: laplace.Laplace(model, "classification", "all", "kron", backend=backend)


@pytest.mark.parametrize("who", WHO)
def test_fits_through_laplace_torch(time, device, who):
    ours = models.neyshabur("conv", 3, CLASSES, WIDTH).to(device)
    images = IMAGES[device.type]
    x, y = torch.randn(images, 3, 32, 32, device=device), torch.randint(CLASSES, (images,), device=device)
    model = ours if who.endswith(OWN) else explicit_padding(ours)
    make = maker(who, model)

    few, found, expected = batches(x[:20], y[:20], 10), make(), maker("ella_kron", ours)()
    with float32_convolutions():
        found.fit(few)
        expected.fit(few)
    wanted = log_determinants(expected)
    assert len(wanted) == 10
    for theirs, value in zip(log_determinants(found), wanted, strict=True):
        torch.testing.assert_close(theirs, value, rtol=1e-3, atol=1e-3)

    loader = batches(x, y, BATCH[device.type])

    def evidence() -> None:
        la = make()
        la.fit(loader)
        assert torch.isfinite(la.log_marginal_likelihood())

    time(
        evidence,
        work=f"fit + evidence of CONV through laplace-torch, {images:,} images",
        who=who,
        flops=images * count(ours, x[:1]).fit(CLASSES - 1),
        bytes=0,
        rounds=3,
        warmups=0,
    )
