"""Draws the pictures of ``docs/`` that are not screenshots, into ``docs/images``.

Each shows a run on a server of the bundled model, or is made of a table of the code, so that it cannot
contradict them. Colours of text and lines are variables: ``scripts/documentation.py`` puts the drawings into
their pages, where the theme sets them; elsewhere the reader's colour scheme does.

    python -m scripts.drawings [NAME ...] [--base-url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import html
import io
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from api_schemas.points import MODEL_POINTS
from examples.sae_on_server.client import ExampleError, Server
from nnsight_engine import viz
from nnsight_engine.core.model_spec import RESIDUAL_LEAVES
from nnsight_engine.viz.numbers import Array, numbers, shown
from scripts.example_prompts import JOY

PROJECT: Final = Path(__file__).resolve().parents[1]
IMAGES: Final = PROJECT / "docs/images"
NUM_LAYERS: Final = 30
LAYERS_OF_LENS, PATCHED_LAYERS = range(18, NUM_LAYERS), range(1, NUM_LAYERS, 2)
TOWER: Final = "The Eiffel Tower is in the city of"
"""As in docs/viz.md."""

INK, SOFT, BACK = (f"var(--{name})" for name in "isb")
_COLORS_OF_TEXT: Final = """\
<style>
.drawing{--i:var(--md-default-fg-color,#1f2328);--s:var(--md-default-fg-color--light,#59636e);
--b:var(--md-default-bg-color,#fff)}
@media(prefers-color-scheme:dark){
.drawing{--i:var(--md-default-fg-color,#e6edf3);--s:var(--md-default-fg-color--light,#9198a1);
--b:var(--md-default-bg-color,#0d1117)}}
</style>
<rect width="100%" height="100%" style="fill:var(--b)"/>
"""
"""Those of the site's theme where there are any."""
BLUE, ORANGE, FILL = "#3d85d8", "#e8710a", "#8b949e38"
_COLORS: Final = (BLUE, ORANGE, "#2e9e6b", "#a266d9", "#d9485f", "#8c8c3e")
"""They can be seen on light and on dark."""
_STAND_INS: Final = {"#010203": INK, "#040506": SOFT}
"""matplotlib takes colours, not variables."""
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#010203"),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), "#040506"),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "grid.alpha": 0.25,
    "axes.prop_cycle": cycler(color=_COLORS),
}


def _file(width: float, height: float, scale: float, parts: Sequence[str]) -> str:
    size = f'width="{width * scale:.0f}" height="{height * scale:.0f}"'
    font = 'font-family="system-ui,sans-serif" style="max-width:100%;height:auto"'
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="drawing"'
    head = f'<svg {names} viewBox="0 0 {width:g} {height:g}" {size} {font}>\n{_COLORS_OF_TEXT}'
    return head + "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, ink: str = INK, size: int = 13, at: str = "start") -> str:
    """Return a line of text, in a font of equal widths where it is in backquotes."""
    font = ' font-family="monospace"' if text[:1] == "`" else ""
    style = f'font-size="{size}" text-anchor="{at}" style="fill:{ink}"{font} xml:space="preserve"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(text.strip("`"))}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str = FILL, more: str = "") -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="2" style="fill:{fill};{more}"/>'


def _line(path: str, ink: str = SOFT, more: str = "") -> str:
    return f'<path d="{path}" style="fill:none;stroke:{ink};stroke-width:1.3;{more}"/>'


def _dot(x: float, y: float, ink: str, radius: float = 5) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" style="fill:{ink}"/>'


@contextmanager
def _axes(
    width: float, height: float, *, rows: int = 1, columns: int = 1
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a new figure, in inches, and its axes, in the style of drawings."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False, sharex=True).flat)


def _plotted(figure: Figure) -> str:
    """Return a figure of matplotlib as such a file, with its text as text."""
    content = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "drawings"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    text = content.getvalue()
    ((width, height),) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    unused = r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->"
    body = re.sub(r"\n\s*", "\n", re.sub(unused, "", body, flags=re.DOTALL)).strip()
    for color, variable in _STAND_INS.items():
        body = body.replace(color, variable)
    return _file(float(width), float(height), 4 / 3, [body])


def _tokens(server: Server, text: str) -> list[str]:
    return [one["text"] for one in server.send("POST", "/v1/tokenize", json={"prompt": text})["tokens"]]


def _results(server: Server, prompt: str, *operations: dict[str, Any], max_tokens: int = 1) -> dict[str, Any]:
    """Return the text of an answer, the results of its operations by name, and the positions of writes."""
    (choice,) = server.complete([prompt], operations, max_tokens=max_tokens, temperature=0)
    found = choice["interventions"]
    writes = [one["positions"] for one in found["applied"] if one["op"] == "steer"]
    return {"text": choice["text"], "writes": writes, **found["results"]}


def concepts(server: Server) -> str:
    """One step of the engine: the rows of three prompts, one of them steered from its third token on."""
    prompts = ("The capital of France is", "I think dogs are", "Two and two is")
    steered, start, layer = 1, 2, 12
    capture: dict[str, Any] = {"op": "capture", "at": "layers.*.output", "dtype": "float32", "name": "stream"}
    steer: dict[str, Any] = {"op": "steer", "at": f"layers.{layer}.output", "vector": "example-joy",
             "where": {"range": [start, None]}, "prompts": [steered]}  # fmt: skip
    plain, other = (_in_one_step(server, prompts, operations) for operations in ([capture], [steer, capture]))
    changes = [
        np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
        for before, after in zip(plain, other, strict=True)
    ]
    largest = max(float(change.max()) for change in changes)
    cell, row, left, top = 12, 20, 150, 56
    at = left + cell * (layer + 0.5)
    parts = [
        _text(left, top - 10, "layer 0", SOFT, 11),
        _text(left + cell * NUM_LAYERS, top - 10, str(NUM_LAYERS - 1), SOFT, 11, "end"),
        _text(at, top - 36, f"steer at layers.{layer}.output", ORANGE, 12, "middle"),
        _line(f"M{at} {top - 30}V{top - 4}", ORANGE),
    ]
    y = top
    for index, (prompt, change) in enumerate(zip(prompts, changes, strict=True)):
        tokens = _tokens(server, prompt)
        parts.append(_line(f"M{left - 62} {y + 1}H{left - 66}V{y + row * len(tokens) - 5}H{left - 62}"))
        parts.append(_text(0, y + 14, f"request {'ABC'[index]}"))
        if index == steered:
            parts.append(_text(0, y + 32, "steered from", ORANGE, 12))
            parts.append(_text(0, y + 48, f"position {start}", ORANGE, 12))
        for position, token in enumerate(tokens):
            parts.append(_text(left - 6, y + 13, shown(token), INK, 12, "end"))
            for number, size in enumerate(change[:, position]):
                look = (ORANGE, f"fill-opacity:{0.3 + 0.7 * size / largest:.2f}") if size else (FILL,)
                parts.append(_box(left + cell * number, y, cell - 2, row - 4, *look))
            y += row
        y += 12
    parts += [
        _box(0, y, 14, 14),
        _text(20, y + 12, "exactly as without the steering"),
        _box(240, y, 14, 14, ORANGE),
    ]
    parts.append(_text(260, y + 12, f"changed, by up to {largest:.0%} of its norm"))
    return _file(left + cell * NUM_LAYERS, y + 18, 1, parts)


def _in_one_step(server: Server, prompts: Sequence[str], operations: Sequence[dict[str, Any]]) -> list[Array]:
    """Return the stream of each prompt, ``[layers, positions, width]``, from a run of a single step."""

    def steps() -> float:
        time.sleep(3)  # the server asks its engine at most once a second, and waits up to two
        text = httpx.get(f"{server.base_url}/metrics").text
        return sum(map(float, re.findall(r"^nnsight_engine_steps_total\{.*\} (\S+)", text, re.MULTILINE)))

    for _ in range(20):
        before = steps()
        choices = server.complete(prompts, operations, max_tokens=1, temperature=0)
        if steps() - before == 1:
            found = [choice["interventions"]["results"]["stream"]["points"] for choice in choices]
            layers = [f"layers.{layer}.output" for layer in range(NUM_LAYERS)]
            return [
                np.stack([numbers(one[layer], dimensions=2, shape="") for layer in layers]) for one in found
            ]
    raise ExampleError("the engine never ran all prompts in one step; do others use it?")


BLOCK: Final = {
    "attention": {
        "norm": (), "projections": ("attn.q", "attn.k", "attn.v"), "softmax(q·k)": ("attn.pattern",),
        "sum of values": ("attn.heads",), "output projection": ("attn.output",),
    },
    "MLP": {
        "norm": ("mlp.input",), "gate and up projections": ("mlp.gate", "mlp.up"),
        "act(gate) · up": ("mlp.act",), "down projection": ("mlp.output",),
    },
}  # fmt: skip
"""A block of Llama's family: the parts of its sublayers, and the points after each part."""
_AFTER: Final = {"norm": "norm.output", "unembedding": "logits", "sampler": "samples"}


def points(_: Server | None = None) -> str:
    """A transformer block with the names of its points where they are."""
    stream, branch, width, step, top = 34, 130, 180, 50, 60
    lines, parts = [], [_box(0, 0, 110, 26), _text(55, 17, "embedding", at="middle")]

    def named(x: float, y: float, name: str) -> float:
        is_tap = name in MODEL_POINTS or name.removeprefix("layers.N.") in RESIDUAL_LEAVES
        parts.extend([_dot(x, y, BLUE if is_tap else ORANGE), _text(x + 10, y + 4, f"`{name}`")])
        return x + 24 + 7.9 * len(name)

    named(stream, 42, "embed.output")
    named(stream, top + 22, "layers.N.input")
    y = top + 26
    for title, block in BLOCK.items():
        y += 20
        lines.append(_line(f"M{stream} {y + 13}H{branch}"))
        parts.append(_text(stream + 10, y + 8, title, SOFT))
        for part, names in block.items():
            parts += [_box(branch, y, width, 26), _text(branch + width / 2, y + 17, part, at="middle")]
            x: float = branch + 20
            lines.append(_line(f"M{x} {y + 26}V{y + step}" + f"H{stream}" * (part == list(block)[-1])))
            for name in names:
                x = named(x, y + 38, name)
            y += step
        parts += [_dot(stream, y, SOFT, 8), _text(stream, y + 5, "+", BACK, 16, "middle")]
    named(stream, y + 26, "layers.N.output")
    y += 44
    parts.append(_text(400, top + 20, "block N", SOFT, at="end"))
    lines.append(_line(f"M1 {top}H409V{y}H1Z", more="stroke-dasharray:4 4"))
    y += 14
    lines.append(_line(f"M{stream} 26V{y + 2 * step}"))
    for part, name in _AFTER.items():
        parts += [_box(0, y, 110, 26), _text(55, y + 17, part, at="middle")]
        lines.append(_line(f"M{stream} {y + 26}V{y + 38}"))
        named(stream, y + 38, name)
        y += step
    parts += [_dot(222, y - 40, BLUE), _text(234, y - 36, "tap: in the usual step")]
    parts += [_dot(222, y - 16, ORANGE), _text(234, y - 12, "eager: uncompiled step")]
    return _file(410, y, 1, [*lines, *parts])


def where(server: Server) -> str:
    """The positions of a prompt and its answer, and those that conditions of ``where`` name."""
    prompt = "The dog chased the cat and the"
    clauses: tuple[dict[str, Any], ...] = (
        {"phase": "prompt"}, {"phase": "generated"}, {"positions": [0, -1]}, {"range": [2, -2]},
        {"tokens": [" the"]}, {"tokens": [" the"], "range": [4, None]},
        {"phase": "prompt", "exclude": {"positions": [0]}},
    )  # fmt: skip
    read = {"op": "capture", "at": "layers.0.output"}
    reads = [{**read, "where": clause, "name": str(number)} for number, clause in enumerate(clauses)]
    results = _results(server, prompt, *reads, max_tokens=5)
    before, tokens = len(_tokens(server, prompt)), _tokens(server, prompt + results["text"])
    parts, places, x = [_text(0, 12, "prompt", SOFT, 12)], [], 0.0
    for number, token in enumerate(tokens):
        width, is_last = 7.3 * len(shown(token)) + 10, number == len(tokens) - 1
        if number == before:
            x += 12
            parts.append(_text(x, 12, "generated", SOFT, 12))
        parts.append(_box(x, 20, width, 26, *(("none", f"stroke:{SOFT}") if is_last else ())))
        parts.append(_text(x + width / 2, 37, f"`{shown(token)}`", INK, 12, "middle"))
        if not is_last:
            places.append((x, width))
            parts.append(_text(x + width / 2, 61, str(number), INK, 12, "middle"))
        if number < before:
            parts.append(_text(x + width / 2, 76, str(number - before), SOFT, 12, "middle"))
        x += width + 4
    for number, clause in enumerate(clauses):
        y = 104 + number * 42
        parts.append(_text(0, y, f"`{json.dumps(clause)[1:-1]}`", INK, 12))
        chosen = results[str(number)]["positions"]
        for position, (left, width) in enumerate(places):
            parts.append(_box(left, y + 7, width, 14, BLUE if position in chosen else FILL))
    return _file(x - 2, 96 + len(clauses) * 42, 1, parts)


def conditions(server: Server) -> str:
    """The score of a detector along a prompt, its threshold, and the positions where it triggered."""
    prompt = "The shop is closed today. When does it open again? It opens at nine. Is that too late for you?"
    name = "example-question"
    detect: dict[str, Any] = {"op": "detect", "detector": name, "name": "score"}
    steer: dict[str, Any] = {
        "op": "steer", "at": "layers.15.output", "vector": "example-joy", "when": {"detector": name},
    }  # fmt: skip
    detect["where"] = steer["where"] = {"exclude": {"positions": [0]}}  # whose state is unlike all others
    results = _results(server, prompt, detect, steer)
    scores = dict(zip(results["score"]["positions"], results["score"]["scores"], strict=True))
    (steered,), tokens = results["writes"], list(map(shown, _tokens(server, prompt)))
    threshold = server.send("GET", "/v1/detectors", params={"name": name})["data"][0]["threshold"]
    with _axes(5.7, 3.2) as (figure, (ax,)):
        for label, color, is_chosen in (("steer acts", ORANGE, True), ("it does not", BLUE, False)):
            bars = {at: score for at, score in scores.items() if (at in steered) is is_chosen}
            ax.bar(list(bars), list(bars.values()), color=color, label=label)
        ax.axhline(threshold, color="#010203", lw=1, ls="--", label=f"threshold, {threshold:.2f}")
        ax.set_xticks(range(len(tokens)), tokens, rotation=60, ha="right", rotation_mode="anchor")
        ax.set_ylim(0, 1)
        ax.set_ylabel("score")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        return _plotted(figure)


def vectors(server: Server) -> str:
    """The scores of each layer's row on held-out prompts, of a training of joyful against sad sentences."""
    positive, negative = zip(*JOY, strict=True)
    body = {"name": "drawing", "position": "mean", "positive": positive, "negative": negative}
    made = server.send("POST", "/v1/vectors/train", json=body)
    httpx.delete(f"{server.base_url}/v1/vectors/{made['id']}")
    rows, best = made["training"]["layers"], made["training"]["best_layer"]
    with _axes(5.6, 3.6, rows=2) as (figure, axes):
        for ax, field, label, low in zip(
            axes, ("auroc", "separation"), ("AUROC", "separation"), (0.5, 0), strict=True
        ):
            ax.plot([row["layer"] for row in rows], [row[field] for row in rows], marker="o", markersize=4)
            ax.axvline(best, color=ORANGE, linestyle="--", linewidth=1)
            ax.set_ylabel(label)
            ax.set_ylim(low)
            ax.grid(axis="y")
        axes[0].text(best + 0.4, 0.55, f"best_layer {best}", color=ORANGE)
        axes[1].set_xlabel("layer")
        return _plotted(figure)


def lens_map(server: Server) -> str:
    """``viz.lens_map`` of a prompt."""
    start = 3
    where = {"phase": "prompt", "range": [start, None]}
    lens = {"op": "logit_lens", "layers": list(LAYERS_OF_LENS), "top_k": 1, "where": where, "name": "lens"}
    with matplotlib.rc_context(_STYLE):
        tokens = _tokens(server, TOWER)[start:]
        return _plotted(viz.lens_map(_results(server, TOWER, lens)["lens"], tokens=tokens))


def attention_maps(server: Server) -> str:
    """``viz.attention_maps`` of two heads."""
    capture = {"op": "capture", "at": "layers.3.attn.pattern", "where": {"phase": "prompt"}, "name": "heads"}
    with matplotlib.rc_context(_STYLE):
        found = _results(server, TOWER, capture)["heads"]
        return _plotted(viz.attention_maps(found, tokens=_tokens(server, TOWER), heads=[0, 1]))


def patching_map(server: Server) -> str:
    """``viz.patching_map`` of the gain of an answer's log-probability, at each layer and position."""
    clean, corrupted, answer = "The capital of France is", "The capital of Spain is", " Paris"
    at, tokens = [f"layers.{layer}.output" for layer in PATCHED_LAYERS], _tokens(server, corrupted)
    capture = {"op": "capture", "at": at, "where": {"phase": "prompt"}, "dtype": "float32", "name": "clean"}
    values = _results(server, clean, capture)["clean"]["points"]
    cells = [(point, position) for point in at for position in range(len(tokens))]
    clean_rows = {point: numbers(values[point], dimensions=2, shape="").tolist() for point in at}
    operations = [
        {"op": "patch", "at": point, "where": {"positions": [position]}, "prompts": [index],
         "values": [clean_rows[point][position]]}
        for index, (point, position) in enumerate(cells)
    ]  # fmt: skip
    last = {"positions": [-1]}
    read = {
        "op": "logit_lens",
        "layers": [-1],
        "top_k": 0,
        "targets": [answer],
        "where": last,
        "name": "read",
    }
    choices = server.complete([corrupted] * (len(cells) + 1), [*operations, read], max_tokens=1)
    reads = (one["interventions"]["results"]["read"]["layers"][str(NUM_LAYERS - 1)] for one in choices)
    *found, without = (read[0]["targets"][0]["logprob"] for read in reads)
    effects = np.reshape(found, (len(at), len(tokens))) - without
    with matplotlib.rc_context(_STYLE):
        label = "gain of log-probability of “Paris”"
        return _plotted(viz.patching_map(effects, tokens=tokens, layers=PATCHED_LAYERS, label=label))


PANELS: Final = (
    ("overview", "Requests by route"),
    ("interventions", "Operations"),
    ("overview", "Time to first token, by kind"),
    ("interventions", "Points"),
    ("overview", "Tokens a second"),
    ("interventions", "Intervention time of a step"),
)
SCENARIOS: Final = ("steered", "capture", "traces")
LOAD_S, SCRAPE_S, RATE_S = 60, 5, 30


def grafana(server: Server) -> str:
    """Panels of the dashboards, from Prometheus' answers to their own queries during load tests."""
    with (
        _prometheus(server.base_url) as prometheus,
        tempfile.TemporaryDirectory() as folder,
        _axes(10, 9, rows=3, columns=2) as (figure, axes),
    ):
        start = time.time()
        for scenario in SCENARIOS:
            load = [scenario, "--time", str(LOAD_S), "--url", server.base_url, "--output", folder]
            subprocess.run([sys.executable, "-m", "loadtests", *load], cwd=PROJECT, check=False)  # noqa: S603 - our own
        times = {"start": start + RATE_S, "end": time.time(), "step": SCRAPE_S}
        for ax, (dashboard, title) in zip(axes, PANELS, strict=True):
            path = PROJECT / f"deploy/grafana/dashboards/nnsight-engine-{dashboard}.json"
            panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
            (panel,) = (one for one in panels if one["title"] == title)
            for target in panel["targets"]:
                query = target["expr"].replace("$instance", ".*").replace("$__rate_interval", f"{RATE_S}s")
                answer = httpx.get(f"{prometheus}/api/v1/query_range", params={"query": query, **times})
                for series in answer.raise_for_status().json()["data"]["result"]:
                    legend = target["legendFormat"].replace("{{", "{").replace("}}", "}")
                    moments, values = zip(*series["values"], strict=True)
                    label = legend.format_map(series["metric"])
                    if any(map(float, values)):
                        ax.plot(np.array(moments) - start, np.array(values, float), label=label)
            unit = panel["fieldConfig"]["defaults"]["unit"]
            ax.set_title(title, loc="left", fontweight="bold")
            ax.set_ylabel({"reqps": "requests/s", "s": "seconds", "short": ""}[unit])
            ax.set_ylim(0)
            ax.grid(axis="y")
            ax.tick_params(labelbottom=True)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
        figure.supxlabel("seconds", fontsize="medium")
        return _plotted(figure)


@contextmanager
def _prometheus(url: str) -> Iterator[str]:
    """Run a Prometheus, as ``scripts/promtool.sh`` installs, that scrapes a server; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    scrape = {"job_name": "server", "static_configs": [{"targets": [httpx.URL(url).netloc.decode()]}]}
    config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [scrape]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # which is YAML
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        command = ["prometheus", *options, f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: S603 - a program of Debian's
        try:
            time.sleep(RATE_S)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


DRAWINGS: Final[Mapping[str, Callable[[Server], str]]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        concepts, points, where, conditions, vectors, lens_map, attention_maps, patching_map, grafana
    )
}  # fmt: skip


def main() -> None:
    """Draw those that are named, all by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DRAWINGS))
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    if unknown := set(args.names) - set(DRAWINGS):
        parser.error(f"unknown: {', '.join(unknown)}; NAME is one of {', '.join(DRAWINGS)}")
    IMAGES.mkdir(exist_ok=True)
    with Server(args.base_url) as server:
        for name in args.names or DRAWINGS:
            path = IMAGES / f"{name}.svg"
            path.write_text(DRAWINGS[name](server), encoding="utf-8")
            print(f"{path.relative_to(PROJECT)}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
