"""Which networks of torchvision, timm and transformers a fit takes as they come.

    python -m benchmarks.downloaded_networks [--list] [NAME ...]

Needs ``pip install '.[networks]'``. Nothing is downloaded: weights are random, architectures have the libraries' own modules at reduced
width and depth. A line for each network: parameters, the first setting that fits it (none, ``unknown="diagonal"``, ``unknown="freeze"``),
seconds of that fit and its evidence, how many parameter tensors have which blocks, and how the setting before was refused.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ella_cuda.laplace import KronLaplace
from ella_cuda.reports.text import columns

CLASSES, IMAGES, LENGTH, WORDS = 3, 4, 8, 50
SETTINGS: tuple[dict[str, str], ...] = ({}, {"unknown": "diagonal"}, {"unknown": "freeze"})
Made = tuple[nn.Module, Any]  # a network and its inputs

# By name: pixels a side, and arguments by which the library's constructor makes the network smaller.
TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "convnext": (32, {}),
    "densenet": (32, {"growth_rate": 8, "block_config": (2, 2), "num_init_features": 16}),
    "efficientnet_b0": (32, {}),
    "googlenet": (32, {"aux_logits": False, "init_weights": False}),
    "maxvit": (64, {}),
    "mnasnet0_5": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "regnet_y_400mf": (32, {}),
    "resnet18": (32, {}),
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_1": (32, {}),
    "swin": (32, {}),
    "swin_v2": (32, {}),
    "vit": (32, {}),
}
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (32, {"embed_dim": 48, "depth": 2, "num_heads": 3}),
    "cait_xxs24_224": (32, {"embed_dim": 48, "depth": 2, "num_heads": 3}),
    "convnextv2_atto": (32, {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 1)}),
    "deit_tiny_distilled_patch16_224": (32, {"embed_dim": 48, "depth": 2}),
    "eva02_tiny_patch14_224": (28, {"embed_dim": 48, "depth": 2, "num_heads": 3}),
    "gmlp_ti16_224": (32, {}),
    "levit_128s": (64, {"embed_dim": (32, 48, 64), "num_heads": (2, 3, 4), "depth": (1, 1, 1)}),
    "maxvit_rmlp_pico_rw_256": (64, {"embed_dim": (32, 32, 64, 64), "depths": (1, 1, 1, 1), "stem_width": (8, 16)}),
    "mixer": (32, {"patch_size": 8, "embed_dim": 48, "num_blocks": 2}),
    "mobilenetv3_small_050": (32, {}),
    "mobilevit_xxs": (64, {}),
    "edgenext_xx_small": (64, {"dims": (16, 24, 32, 48), "depths": (1, 1, 2, 1)}),
    "pvt_v2_b0": (32, {"embed_dims": (8, 16, 40, 64), "depths": (1, 1, 1, 1)}),
    "resnetv2_50": (32, {"layers": (1, 1, 1, 1), "channels": (32, 64, 96, 128), "stem_chs": 16}),
    "swinv2_tiny_window8_256": (64, {"window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}),
    "xcit_nano_12_p16_224": (32, {"embed_dim": 48, "depth": 2, "num_heads": 3}),
}
OF_A_SIZE = (
    "beit",
    "cait",
    "deit",
    "eva02",
    "gmlp",
    "levit",
    "maxvit",
    "swinv2",
    "xcit",
)  # whose constructors ask for it
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
OF_WORDS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": WORDS - 1, "num_labels": CLASSES}
# By class of network: arguments of its configuration.
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "AlbertForSequenceClassification": {**SIZES, "embedding_size": 24},
    "BertForSequenceClassification": {**SIZES, "max_position_embeddings": 16},
    "DistilBertForSequenceClassification": {"dim": 48, "hidden_dim": 96, "n_layers": 2, "n_heads": 3},
    "ElectraForSequenceClassification": {**SIZES, "embedding_size": 24},
    "GPT2ForSequenceClassification": {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 16},
    "LlamaForSequenceClassification": {**SIZES, "num_key_value_heads": 3},
    "RobertaForSequenceClassification": {**SIZES, "max_position_embeddings": 16},
    "T5ForSequenceClassification": {
        "d_model": 48,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 3,
        "decoder_start_token_id": 0,
    },
    "ConvNextForImageClassification": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "Dinov2ForImageClassification": {**SIZES, "image_size": 32, "patch_size": 8},
    "SwinForImageClassification": {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    "ViTForImageClassification": {**SIZES, "image_size": 32, "patch_size": 8},
}


class Logits(nn.Module):
    """A network of transformers as a function of its inputs: the logits alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).logits


def of_torchvision(name: str) -> Made:
    """A network by its constructor, or by the class of its family with few blocks."""
    from torchvision import models as m
    from torchvision.models.convnext import CNBlockConfig
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    size, sizes = TORCHVISION[name]
    swin = {"patch_size": [2, 2], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    reduced: dict[str, Callable[[], nn.Module]] = {
        "convnext": lambda: m.ConvNeXt(
            [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], 0.1, num_classes=CLASSES
        ),
        "densenet": lambda: m.DenseNet(num_classes=CLASSES, **sizes),
        "maxvit": lambda: m.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.1, num_classes=CLASSES),
        "swin": lambda: m.SwinTransformer(num_classes=CLASSES, **swin),
        "swin_v2": lambda: m.SwinTransformer(
            num_classes=CLASSES, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2, **swin
        ),
        "vit": lambda: m.VisionTransformer(size, 8, 2, 3, 48, 96, num_classes=CLASSES),
    }
    make = reduced.get(name, lambda: getattr(m, name)(num_classes=CLASSES, **sizes))
    return make(), torch.randn(IMAGES, 3, size, size)


def of_timm(name: str) -> Made:
    """A network by :func:`timm.create_model`."""
    import timm

    size, sizes = TIMM[name]
    if name == "mixer":
        return timm.models.MlpMixer(CLASSES, size, **sizes), torch.randn(IMAGES, 3, size, size)
    with_size = {"img_size": size} if name.startswith(OF_A_SIZE) else {}
    return timm.create_model(name, num_classes=CLASSES, **with_size, **sizes), torch.randn(IMAGES, 3, size, size)


def of_transformers(name: str) -> Made:
    """A network by its class and configuration."""
    import transformers

    kind = getattr(transformers, name)
    if "Image" in name:
        config = kind.config_class(num_labels=CLASSES, **TRANSFORMERS[name])
        return Logits(kind(config)), torch.randn(IMAGES, 3, 32, 32)
    words = torch.randint(2, WORDS - 1, (IMAGES, LENGTH))
    words[:, -1] = WORDS - 1  # T5's summary is at the end of the sequence
    config = kind.config_class(**OF_WORDS, **TRANSFORMERS[name])
    return Logits(kind(config)), words


def networks() -> dict[str, Callable[[], Made]]:
    """Constructors by name."""
    found: dict[str, Callable[[], Made]] = {}
    families: Mapping[str, tuple[Any, Callable[[str], Made]]] = {
        "torchvision": (TORCHVISION, of_torchvision),
        "timm": (TIMM, of_timm),
        "transformers": (TRANSFORMERS, of_transformers),
    }
    for library, (names, make) in families.items():
        found |= {f"{library}.{name}": (lambda name=name, make=make: make(name)) for name in names}
    return found


def row(name: str, make: Callable[[], Made]) -> list[str]:
    """The cells of a network's line."""
    refusals = []
    for setting in SETTINGS:
        torch.manual_seed(0)
        model, x = make()
        y = torch.randint(CLASSES, (IMAGES,))
        count = f"{sum(p.numel() for p in model.parameters()):,}"
        started = time.perf_counter()
        try:
            la = KronLaplace(model, **setting).fit([(x, y)])
            la.log_marginal_likelihood()
        except (TypeError, ValueError, RuntimeError) as refusal:
            refusals.append(str(refusal).splitlines()[0][:120])
            continue
        seconds = f"{time.perf_counter() - started:.1f}"
        blocks = Counter(line.split()[-1] for line in la.summary().splitlines()[1:-1])
        made_of = ", ".join(f"{count} {kind}" for kind, count in blocks.most_common() if kind != "-")
        words = "as it comes" if not setting else ", ".join(f"{k}={v!r}" for k, v in setting.items())
        return [name, count, words, seconds, made_of, "".join(refusals[-1:])]
    return [name, count, "refused", "-", "-", refusals[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all, if none is named")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    arguments = parser.parse_args()
    made = networks()
    if arguments.list:
        print("\n".join(made))
        return
    for name in arguments.names:
        if name not in made:
            parser.error(f"no network {name!r}; --list prints those there are")
    rows = [row(name, made[name]) for name in tqdm(arguments.names or list(made))]
    head = ["network", "parameters", "fits", "fit, s", "blocks", "refusal before"]
    print(columns([head, *rows]))
    counts = Counter(cells[2] for cells in rows)
    print(f"{len(rows)} networks: " + ", ".join(f"{count} {words}" for words, count in counts.most_common()))


if __name__ == "__main__":
    main()
