"""A trained run, or a folder of runs, as one page of HTML that needs no other file and no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from ella_cuda.reports.results import WHERE, flattened
from ella_cuda.reports.text import (
    AMOUNTS,
    CALIBRATION,
    METRICS,
    OBJECTIVE_TITLES,
    PATH_TITLES,
    counted,
    doubt_of_order,
    duration,
    error_bars_note,
    network_title,
    number,
    run_title,
)
from ella_cuda.run_folder import REPORT_FILE

LARGEST_CONFUSION = 12  # classes of a table of all pairs; of more, the pairs that are confused most
PAIRS = 15
SCALE = 0.6  # pixels of the page in one of a picture: letters of 8 points are as large as the page's small ones
MANY_TENSORS = 12  # from which on a table of tensors is folded
PICTURES = {  # of a run's folder: title, text for who does not see it
    "precisions": (
        "Prior precisions over training",
        "Line plots of every tensor's prior precision over the epochs; the table above has the last values.",
    ),
    "amounts": (
        "Amounts of the augmentation over training",
        "Line plots of the learned amounts over the epochs; the table above has the last values.",
    ),
    "samples": (
        "Images, each as it is and as copies at the learned amounts",
        "Rows of images: the first of each row is an image as it is, the others are transformed copies of it.",
    ),
    "filters": ("Weights over positions", "Images of the weights of each layer that differ by position."),
    "anchors": ("Anchors of sparsified layers", "Positions of the anchors on the grid of each sparsified layer."),
    "curves": (
        "Loss, evidence and accuracy over training",
        "Line plots over the epochs of the training loss, of minus the log evidence per data point, and of the training accuracy.",
    ),
    "reliability": (
        "Confidence against accuracy",
        "Reliability diagrams of the softmax and of the predictive: accuracy by confidence, and how many predictions have it.",
    ),
    "leave_one_out": (
        "Each training image predicted by all others",
        "Histograms over the training images: the leverage, how much an image settles its own prediction, and its loss when left out.",
    ),
    "rotations": (
        "Predictions of images that are turned",
        "Line plots of NLL, accuracy, confidence and entropy over the angle by which test images are turned.",
    ),
}
COMPARED = {  # of a row, beside what a page begins with: title, style
    "nll_leave_one_out": ("NLL, leave-one-out, nats", "{:.3f}"),
    "parameters": ("parameters", "{:,}"),
    "seconds": ("seconds", "{:,.0f}"),
}
# First of networks side by side.
BESIDE = ("neg_log_marginal_likelihood", "nll_leave_one_out", "accuracy", "seconds", "parameters")
STYLE = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{margin:0;font:16px/1.5 system-ui,sans-serif;color:#1b1b1b;background:#fff}
header,main,footer{max-width:62rem;margin:0 auto;padding:0 1rem}
h1{font-size:1.6rem;line-height:1.25;margin:1.5rem 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem;padding-top:.75rem;border-top:1px solid #c8c8c8}
h3{font-size:1rem;margin:1.5rem 0 .25rem}
p{max-width:44rem;overflow-wrap:anywhere}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1rem;padding:0;list-style:none}
a{color:#0b4f9c}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.75rem;margin:1rem 0}
dl div{border:1px solid #c8c8c8;border-radius:.4rem;padding:.5rem .75rem}
dt{font-size:.85rem;color:#4a4a4a}
dd{margin:0;font-size:1.3rem;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;margin:.75rem 0;
background:linear-gradient(90deg,#fff 40%,#fff0) 0 0/2rem 100% local no-repeat,
linear-gradient(270deg,#fff 40%,#fff0) 100% 0/2rem 100% local no-repeat,
linear-gradient(90deg,#0003,#0000) 0 0/.75rem 100% no-repeat,linear-gradient(270deg,#0003,#0000) 100% 0/.75rem 100% no-repeat}
.scroll:focus-visible,a:focus-visible,summary:focus-visible{outline:3px solid #0b4f9c;outline-offset:2px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:#4a4a4a;padding-bottom:.25rem}
th,td{padding:.25rem .6rem;border-bottom:1px solid #dcdcdc;text-align:right;white-space:nowrap}
th:first-child,td:first-child,.text th,.text td{text-align:left}
.help{white-space:normal;min-width:18rem;color:#4a4a4a}
td.right{background:#dbe9f6}
td.wrong{background:#fbe3d0}
figure{margin:1rem 0}
figcaption{font-size:.9rem;color:#4a4a4a}
.picture{display:block;height:auto}
.runs th{white-space:normal;vertical-align:bottom}
.runs th[scope=row]{min-width:14rem}
.images{display:grid;grid-template-columns:repeat(auto-fill,minmax(8rem,1fr));gap:1rem;padding:0;list-style:none}
.images figure{margin:0;overflow-wrap:anywhere}
.images img{width:100%;height:auto;image-rendering:pixelated;border:1px solid #c8c8c8}
.file{display:block;font-size:.8rem;color:#1b1b1b}
@media(max-width:40rem){.runs th[scope=row]{min-width:9rem}.scroll+figcaption::after{content:" (scrolls sideways)"}}
pre{background:#f3f3f3;padding:.75rem;margin:.75rem 0;white-space:pre-wrap;overflow-wrap:anywhere}
"""
PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header>
<h1>$title</h1>
<p>$about</p>
$navigation
</header>
<main>
$sections
</main>
<footer><p>Written by ella_cuda.</p></footer>
</body>
</html>
"""
)


def run_page(
    row: Mapping[str, Any],
    history: Mapping[str, Any],
    examples: Mapping[str, Any],
    run_dir: Path,
    settings: Mapping[str, Sequence[tuple[str, Any, str]]],
    command: str,
) -> str:
    """The page of a run.

    Args:
        row: of ``summary.json``. history: of :func:`ella_cuda.run_folder.read_history`.
        examples: of :func:`ella_cuda.run_folder.read_examples`, empty where there are none.
        run_dir: whose pictures are shown.
        settings: by title, of each its name, value and help.
        command: that does the run again; empty where there is none.
    """
    name = _class_names(examples)
    sections = {
        "learned": ("What was learned", _learned(row, run_dir)),
        "training": ("Training", _training(history) + _pictures(run_dir, "curves")),
        "calibration": (
            "Calibration",
            _calibration(row) + _pictures(run_dir, "reliability", "leave_one_out", "rotations"),
        ),
        "confusion": ("Confusion", _confusion(examples, name)),
        "unsure": ("Least sure", _least_sure(row, examples, name)),
        "suspects": ("Likely wrong labels", _suspects(examples, name)),
        "settings": ("Settings", _settings(settings)),
        "again": ("The same run again", _again(row, command)),
    }
    about = (
        f"{network_title(row)}: {row['parameters']:,} parameters, trained by {OBJECTIVE_TITLES[row['objective']]} on "
        f"{row['train_size']:,} images of {row['data']} in {duration(row['seconds'])}, and evaluated on {row['evaluated_size']:,} "
        f"{WHERE[row['evaluated_on']]}."
    )
    return _page(run_title(row), about, sections, _cards(row))


def overview_page(rows: Sequence[Mapping[str, Any]], count: int, out_dir: Path) -> str:
    """The page of a folder of ``count`` runs, with links to those that are finished, whose rows are given."""
    about = f"{len(rows)} of {counted(count, 'run')} finished."
    if len({(row["evaluated_on"], row["evaluated_size"]) for row in rows}) == 1:
        about += f" Predictions are of {rows[0]['evaluated_size']:,} {WHERE[rows[0]['evaluated_on']]}."
    titles = {**_headline(), **COMPARED}
    evidence = [row["neg_log_marginal_likelihood"] for row in rows]
    of_own_images = all("nll_leave_one_out" in row for row in rows)
    if len(rows) > 1 and None not in evidence and of_own_images:
        titles = {key: titles[key] for key in dict.fromkeys((*BESIDE, *titles))}
        rows = sorted(rows, key=lambda row: row["neg_log_marginal_likelihood"])
        about += " The best by the evidence, the least -log q/N, comes first."
        if doubt := doubt_of_order(rows):
            about += f" {doubt[0].upper()}{doubt[1:]}."
    columns = {key: one for key, one in titles.items() if any(key in row for row in rows)}
    alike = len({(row["data"], row["task"]) for row in rows}) == 1
    lines = [
        [
            f'<a href="{quote(row["run"])}/{REPORT_FILE}">{_text(_short(row) if alike else run_title(row))}</a>',
            *(_value(row.get(key), style) for key, (_, style) in columns.items()),
        ]
        for row in rows
    ]
    table = _table(["run", *(title for title, _ in columns.values())], lines, "Finished runs", "runs", raw=True)
    sections = {"runs": ("Runs", table if rows else "<p>No run is finished.</p>")}
    if alike:
        about = f"{rows[0]['data']}, task {rows[0]['task']}. {about}"
    sections["training"] = ("Training", _pictures(out_dir, "curves", "layers"))
    return _page(f"Runs in {out_dir.resolve().name}", about, sections)


def _short(row: Mapping[str, Any]) -> str:
    """The title of a run among those of the same images."""
    return f"{network_title(row)}, {row['objective']}, seed {row['seed']}"


def _page(title: str, about: str, sections: Mapping[str, tuple[str, str]], first: str = "") -> str:
    there = {key: one for key, one in sections.items() if one[1]}
    links = "".join(f'<li><a href="#{key}">{_text(name)}</a></li>' for key, (name, _) in there.items())
    return PAGE.substitute(
        title=_text(title),
        style=STYLE,
        about=_text(about),
        navigation=f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
        sections=first
        + "\n".join(
            f'<section aria-labelledby="{key}">\n<h2 id="{key}">{_text(name)}</h2>\n{body}\n</section>'
            for key, (name, body) in there.items()
        ),
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _value(value: float | None, style: str) -> str:
    return "-" if value is None else style.format(value)


def _headline() -> dict[str, tuple[str, str]]:
    """Titles and styles of the numbers that are shown first: all but the softmax's calibration."""
    return {key: one for key, one in {**METRICS, **CALIBRATION}.items() if not key.endswith("_plugin")}


def _cards(row: Mapping[str, Any]) -> str:
    """The first numbers of a run."""
    cards = (
        f'<div><dt>{_text(title)}</dt><dd id="{key}">{_value(row.get(key), style)}</dd></div>'
        for key, (title, style) in _headline().items()
        if key in row
    )
    return f"<dl>{''.join(cards)}</dl>"


def _table(head: Sequence[str], lines: Iterable[Sequence[Any]], caption: str, kind: str = "", raw: bool = False) -> str:
    """A table that scrolls by itself where it is wider than the page; the first cell of a line is its heading."""
    shown: Callable[[Any], str] = str if raw else _text
    top = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{shown(first)}</th>{"".join(_cell(cell, shown) for cell in cells)}</tr>\n'
        for first, *cells in lines
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_text(caption)}"><table class="{kind}">'
        f"<caption>{_text(caption)}</caption><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def _cell(cell: Any, shown: Callable[[Any], str]) -> str:
    """A cell, of a class where it is a pair of it and the content."""
    kind, content = cell if isinstance(cell, tuple) else ("", cell)
    return f'<td class="{kind}">{shown(content)}</td>' if kind else f"<td>{shown(content)}</td>"


def _pictures(folder: Path, *names: str) -> str:
    """The pictures of those names that are in the folder."""
    found = []
    for name in names:
        path = folder / f"{name}.png"
        if path.exists():
            title, text = PICTURES.get(name, (name, f"Picture of the {name} of all runs."))
            png = path.read_bytes()
            width = round(SCALE * int.from_bytes(png[16:20], "big"))  # of PNG's header
            data = base64.b64encode(png).decode()
            found.append(
                f'<figure><div class="scroll" role="region" tabindex="0" aria-label="{_text(title)}">'
                f'<img class="picture" width="{width}" alt="{_text(text)}" src="data:image/png;base64,{data}"></div>'
                f"<figcaption>{_text(title)}</figcaption></figure>"
            )
    return "\n".join(found)


def _learned(row: Mapping[str, Any], run_dir: Path) -> str:
    tensors = [
        tensor for layer in row["layers"] for path in layer["paths"].values() for tensor in path["prior_precision"]
    ]
    count = len(tensors) + len(row["other_parameters"])
    if row["objective"] == "evidence":
        text = (
            f"The evidence of the {row['train_size']:,} training images chose {counted(count, 'prior precision')} (a weight decay for each "
            "parameter tensor, larger where the data need it less)"
        )
        text += ", and the amounts of the augmentation" if row.get("augmentation") else ""
        text += ". No validation images were needed. Effective parameters are those that the data determine."
    else:
        text = "MAP learns the weights alone: prior precisions stay what they were set to."
    parts = [f"<p>{_text(text)}</p>"]
    if row.get("augmentation"):
        lines = [
            [name, number(AMOUNTS[name][1] * value), AMOUNTS[name][0] or "logarithm"]
            for name, value in row["augmentation"].items()
        ]
        parts.append(_table(["transformation", "up to ±", "unit"], lines, "Learned augmentation", "text"))
    if row["layers"]:
        parts.append(
            _table(["layer", "type", "path", "share", "effective", "of", "prior precision"], _layers(row), "Layers")
        )
    if row["other_parameters"]:
        lines = [
            [name, number(one["prior_precision"]), number(one["effective_parameters"]), f"{one['parameters']:,}"]
            for name, one in row["other_parameters"].items()
        ]
        title = "Parameter tensors outside of these layers" if row["layers"] else "Parameter tensors"
        table = _table(["tensor", "prior precision", "effective", "of"], lines, title)
        parts.append(
            table
            if len(lines) < MANY_TENSORS
            else f"<details><summary>{len(lines)} parameter tensors</summary>{table}</details>"
        )
    return "\n".join([*parts, _pictures(run_dir, "samples", "amounts", "precisions", "anchors", "filters")])


def _layers(row: Mapping[str, Any]) -> Iterable[list[str]]:
    for layer in row["layers"]:
        name, kind = layer["name"], PATH_TITLES.get(layer["type"], layer["type"] or "-")
        for path, one in layer["paths"].items():
            share = one["relative_effective_parameters"]
            yield [
                name,
                kind,
                PATH_TITLES.get(path, path),
                "-" if share is None else f"{100 * share:.1f} %",
                number(one["effective_parameters"]),
                f"{one['parameters']:,}",
                ", ".join(f"{tensor} {number(value)}" for tensor, value in one["prior_precision"].items()),
            ]


def _training(history: Mapping[str, Any]) -> str:
    last = history["evaluations"][-1]
    return (
        f"<p>After {counted(last['epoch'], 'epoch')} the training loss with the prior was {number(last['loss'])} nats and "
        f"{100 * last['accuracy']:.1f} % of the training images were right.</p>"
    )


def _calibration(row: Mapping[str, Any]) -> str:
    lines = [
        [title, _value(row.get(key), style)] for key, (title, style) in {**METRICS, **CALIBRATION}.items() if key in row
    ]
    told = flattened({"ood": row.get("ood", {})})
    lines += [[f"AUROC, {key.removeprefix('ood ').replace('_', ' ')}", f"{value:.3f}"] for key, value in told.items()]
    reason = row.get("neg_log_marginal_likelihood_reason")
    missing = "evidence is" if "error_bars" in row else "evidence and the predictive are"
    why = f"<p>The {missing} missing: {_text(reason)}.</p>" if reason else ""
    text = (
        "The softmax is the network's own; the predictive averages over the Laplace approximation of the posterior. "
        "Where confidence is calibrated, points lie on the diagonal and the ECE is 0."
    )
    if "error_bars" in row:
        text += f" The predictive has {_text(error_bars_note(row['error_bars']))}."
    return f"<p>{text}</p>{why}\n{_table(['', 'value'], lines, 'Predictions of the evaluated images')}"


def _class_names(examples: Mapping[str, Any]) -> Callable[[int], str]:
    names = examples.get("class_names")
    return (lambda k: str(names[k])) if names else str


def _confusion(examples: Mapping[str, Any], name: Callable[[int], str]) -> str:
    if not examples:
        return ""
    counts = {(label, predicted): count for label, predicted, count in examples["confusion"]}
    wrong = sorted(((n, pair) for pair, n in counts.items() if pair[0] != pair[1]), key=lambda one: (-one[0], one[1]))
    total, errors = sum(counts.values()), sum(n for n, _ in wrong)
    text = f"<p>{errors} of {total} predictions are wrong.</p>"
    classes = sorted({k for pair in counts for k in pair})
    if len(classes) <= LARGEST_CONFUSION:
        lines = [
            [
                name(label),
                *(
                    ("right" if label == k else "wrong" if (label, k) in counts else "", counts.get((label, k), 0))
                    for k in classes
                ),
            ]
            for label in classes
        ]
        return text + _table(
            ["label", *map(name, classes)], lines, "Images by label (row) and predicted class (column)"
        )
    lines = [[name(a), name(b), n] for n, (a, b) in wrong[:PAIRS]]
    return text + (_table(["label", "predicted", "images"], lines, "Classes confused most", "text") if lines else "")


def _least_sure(row: Mapping[str, Any], examples: Mapping[str, Any], name: Callable[[int], str]) -> str:
    shown = [
        (one, f"{name(one['predicted'])} at {100 * one['probability']:.0f} %, label {name(one['label'])}")
        for one in examples.get("least_sure", ())
    ]
    where = WHERE[row["evaluated_on"]]
    return _images(f"The {where} whose most probable class is least probable: look at these first.", shown)


def _suspects(examples: Mapping[str, Any], name: Callable[[int], str]) -> str:
    if not examples:
        return ""
    if examples["reason"]:
        return f"<p>Not examined: {_text(examples['reason'])}.</p>"
    shown = [
        (one, f"label {name(one['label'])}, others expect {name(one['predicted'])} ({one['score']:.1f} nats)")
        for one in examples["suspects"]
    ]
    text = (
        f"Training images whose label all other training images contradict, the most contradicted first, among the "
        f"{examples['examined']} of the largest loss. A hard image with a right label can be among them."
    )
    return _images(text, shown) if shown else f"<p>{_text(text)} None is contradicted.</p>"


def _images(text: str, given: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    if not given:
        return ""
    items = "\n".join(
        f'<li><figure><img alt="Image: {_text(caption)}" src="data:image/png;base64,{one["png"]}">'
        f"<figcaption>{_file(one)}{_text(caption)}</figcaption></figure></li>"
        for one, caption in given
    )
    return f'<p>{_text(text)}</p>\n<ul class="images">{items}</ul>'


def _file(shown: Mapping[str, Any]) -> str:
    """The name of an image's file, where it has one, which may break after each folder; line breaks in it are shown as such."""
    if "name" not in shown:
        return ""
    name = shown["name"] if shown["name"].isprintable() else repr(shown["name"])
    return f'<span class="file">{_text(name).replace("/", "/<wbr>")}</span>'


def _settings(settings: Mapping[str, Sequence[tuple[str, Any, str]]]) -> str:
    tables = (
        _table(
            ["setting", "value", "what it is"],
            ([name, "-" if value in (None, "") else value, ("help", text)] for name, value, text in of),
            title,
            "text",
        )
        for title, of in settings.items()
    )
    return f"<details><summary>All settings of the run</summary>{''.join(tables)}</details>"


def _again(row: Mapping[str, Any], command: str) -> str:
    if not command:
        return f"<p>No command line has these settings; in Python run_one takes those of {_text(row['run'])} in config.json.</p>"
    label = "The command that does the run again"
    return f'<pre role="region" tabindex="0" aria-label="{label}"><code>{_text(command)}</code></pre>'
