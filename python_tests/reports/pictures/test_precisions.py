"""Prior precisions over training, read back from matplotlib."""

from __future__ import annotations

from matplotlib.colors import to_hex

from ella_cuda.reports import draw_precisions
from ella_cuda.reports.pictures import PATH_STYLES
from python_tests.reports.pictures.pages import shown
from python_tests.reports.rows import evaluations, row


def test_every_tensor_has_its_line_in_its_layers_panel():
    made = row()
    history = evaluations(made)
    figure = draw_precisions(made, history)
    axes = shown(figure)
    assert [a.get_title() for a in axes] == [
        "layer 1 (blocks.0)", "layer 2 (blocks.1)", "layer 3 (blocks.2)", "outside the layers",
    ]  # fmt: skip
    for axis, layer in zip(axes[:3], made["layers"], strict=True):
        names = [f"{layer['name']}.{p}.{t}" for p in ("f_fc", "conv") for t in ("weight", "bias")]
        assert [list(line.get_ydata()) for line in axis.lines] == [
            [e["prior_precision"][n] for e in history] for n in names
        ]
        assert all(list(line.get_xdata()) == [2, 4, 6] for line in axis.lines)
        expected = [PATH_STYLES[p][0] for p in ("f_fc", "f_fc", "conv", "conv")]
        assert [to_hex(line.get_color()) for line in axis.lines] == expected
        assert axis.lines[0].get_linestyle() != axis.lines[1].get_linestyle()
        assert axis.get_yscale() == "log"
    assert list(axes[3].lines[0].get_ydata()) == [e["prior_precision"]["head.bias"] for e in history]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "F-FC weight", "F-FC bias", "CONV weight", "CONV bias", "head.bias",
    ]  # fmt: skip
    assert axes[0].get_ylabel() == "δ, 1/weight², log scale"
    assert axes[3].get_xlabel() == "epoch"
    assert axes[0].get_ylim() == axes[3].get_ylim()  # layers can be compared
    assert "task digit, F-FC+CONV, evidence, seed 0: prior precisions δ" in figure.get_suptitle()


def test_many_tensors_are_told_apart_by_their_order():
    made = row()
    names = [f"layer{i}.weight" for i in range(40)]
    made = {**made, "layers": [], "other_parameters": dict.fromkeys(names)}
    history = [{"epoch": e, "prior_precision": {n: 1.0 + e * i for i, n in enumerate(names)}} for e in (1, 2)]
    figure = draw_precisions(made, history)
    (axis,) = shown(figure)
    assert axis.get_title() == "parameter tensors" and len({to_hex(line.get_color()) for line in axis.lines}) == 40
    assert [list(line.get_ydata()) for line in axis.lines] == [[1.0 + i, 1.0 + 2 * i] for i in range(40)]
    texts = [t.get_text() for t in figure.legends[0].get_texts()]
    assert texts == ["layer0.weight", "38 tensors between them, in order", "layer39.weight"]
