"""Pictures as a person sees them: labels, texts in cells, what is brighter than what, and what is refused."""

from __future__ import annotations

import base64
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import AutoTokenizer

from api_schemas.results import LogitLensResult
from api_schemas.tensors import TensorObject
from nnsight_engine import bundled_model_path
from nnsight_engine.viz import (
    VizError,
    attention_maps,
    lens_map,
    patching_map,
    results_table,
    sweep_figure,
)

VOCABULARY = [" Paris", " the", "$x$", "\n"]


def token(text: str, probability: float) -> dict[str, Any]:
    return {"token": text, "id": 1, "logprob": math.log(probability)}


def row(text: str, probability: float) -> dict[str, Any]:
    return {"top": [token(text, probability), token(" other", 0.01)], "targets": []}


LENS = {
    "type": "logit_lens",
    "positions": [0, 1],
    "layers": {"10": [row(" the", 0.5), row(" Paris", 0.9)], "2": [row("\n", 0.1), row("$x$", 0.2)]},
}


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def cells(ax: Axes) -> dict[tuple[int, int], str]:
    """Return the texts by row, from the lowest, and column."""
    return {
        (round(text.get_position()[1]), round(text.get_position()[0])): text.get_text() for text in ax.texts
    }


def shades(ax: Axes) -> np.ndarray[Any, Any]:
    """Return the luminance of each cell as it is drawn."""
    (image,) = ax.images
    colors = image.to_rgba(np.ma.array(image.get_array()))
    found: np.ndarray[Any, Any] = np.asarray(colors)[..., :3] @ np.array([0.299, 0.587, 0.114])
    return found


def is_drawn(figure: Figure) -> bool:
    content = figure._repr_png_()  # type: ignore[attr-defined] # as a notebook asks
    return bool(content.startswith(b"\x89PNG"))


def check_lens(figure: Figure) -> None:
    ax = figure.axes[0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("token", "layer")
    assert cells(ax) == {(0, 0): "↵", (0, 1): r"\$x\$", (1, 0): "·the", (1, 1): "·Paris"}
    order = shades(ax)
    assert order[0, 0] < order[0, 1] < order[1, 0] < order[1, 1]
    low, high = ax.get_ylim()
    assert low < high, "the first layer is at the bottom"
    assert is_drawn(figure)


def test_a_server_s_lens_has_layers_up_tokens_across_and_the_likeliest_brightest() -> None:
    figure = lens_map(LENS, tokens=["The", " sky"])
    check_lens(figure)
    assert ticks(figure.axes[0].yaxis) == ["2", "10"]
    assert ticks(figure.axes[0].xaxis) == ["The", "·sky"]
    assert figure.axes[1].get_ylabel() == "probability of the most likely next token"
    check_lens(lens_map(LogitLensResult.model_validate(LENS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_trace_give_the_same_lens(dtype: torch.dtype) -> None:
    chances = torch.tensor(
        [[[0.1, 0.2, 0.3, 0.4], [0.1, 0.1, 0.7, 0.1]], [[0.1, 0.8, 0.1, 0], [0.9, 0, 0.1, 0]]]
    )
    logits = [layer.log().clamp(min=-30).to(dtype) + 3 for layer in chances]
    figure = lens_map(logits, decode=VOCABULARY.__getitem__, layers=["embed", 29])
    check_lens(figure)
    assert ticks(figure.axes[0].yaxis) == ["embed", "29"]
    drawn = np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_allclose(drawn, [[0.4, 0.7], [0.8, 0.9]], atol=0.02)


def test_a_tokenizers_tokens_are_written_as_a_server_returns_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    ids = [7042, tokenizer.convert_tokens_to_ids("âĢ")]
    logits = torch.zeros(1, len(ids), len(tokenizer))
    logits[0, range(len(ids)), ids] = 9.0
    figure = lens_map(logits, decode=tokenizer)
    written = {text.get_text() for text in figure.axes[0].texts}
    assert written == {"·Paris", "<0xE2><0x80>"}


def test_a_patching_map_is_white_where_nothing_happens_and_red_where_it_helps() -> None:
    effects = torch.tensor([[0.0, 0.5, -1.0], [0.25, 1.0, float("nan")]])
    figure = patching_map(effects, tokens=["a", "b", "c"], layers=[4, 8], label="share of the gap")
    ax = figure.axes[0]
    assert (ticks(ax.yaxis), ticks(ax.xaxis)) == (["4", "8"], ["a", "b", "c"])
    (image,) = ax.images
    colors = np.asarray(image.to_rgba(np.ma.array(image.get_array())))
    red, blue = colors[..., 0], colors[..., 2]
    assert colors[0, 0, :3] == pytest.approx(0.97, abs=0.02)
    assert red[0, 1] > blue[0, 1]
    assert red[0, 2] < blue[0, 2]
    assert shades(ax)[1, 1] < shades(ax)[0, 1] < shades(ax)[1, 0]
    assert colors[1, 2, 3] == 0, "what is no number is left empty"
    assert figure.axes[1].get_ylabel() == "share of the gap"
    assert is_drawn(figure)


@pytest.mark.parametrize("form", ["lists", "array", "object", "json"])
def test_patching_takes_all_forms_of_numbers(form: str) -> None:
    values = np.array([[0.5, -1.0]], "<f4")
    tensor = TensorObject.from_bytes("float32", [1, 2], values.tobytes())
    given = {"lists": values.tolist(), "array": values, "object": tensor, "json": tensor.model_dump()}[form]
    drawn = patching_map(given).axes[0].images[0].get_array()
    np.testing.assert_array_equal(np.asarray(drawn), values)


def sweep(*axes: tuple[str, list[Any]], control: bool = False) -> dict[str, Any]:
    """Return a sweep with these axes, whose values count up from 1."""
    shape = [len(labels) for _, labels in axes]
    values = np.arange(1, math.prod(shape) + 1, dtype="<f4").reshape(shape)
    tensors = [TensorObject.from_bytes("float32", shape, one.tobytes()) for one in (values, -values)]
    return {
        "object": "sweep", "metric": "logprob", "dims": [name for name, _ in axes], "coords": dict(axes),
        "values": tensors[0].model_dump(), "control": tensors[1].model_dump() if control else None,
        "baselines": [{"unsteered": 2.0}] * 2, "tokens": [["The", " sky"], ["A", " sea"]],
    }  # fmt: skip


LAYERS, POSITIONS = ("layer", [4, 8]), ("position", [0, 1])


def test_two_axes_of_a_sweep_are_a_map_of_the_change() -> None:
    figure = sweep_figure(sweep(LAYERS, POSITIONS, ("head", [3])))
    ax = figure.axes[0]
    assert (ticks(ax.yaxis), ticks(ax.xaxis)) == (["4", "8"], ["0 The", "1 ·sky"])
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("layer", "position")
    np.testing.assert_array_equal(np.asarray(ax.images[0].get_array()), [[-1, 0], [1, 2]])
    assert figure.axes[1].get_ylabel() == "change of logprob"
    assert is_drawn(figure)
    several = sweep(("prompt", [0, 1]), LAYERS, POSITIONS, control=True)
    second = sweep_figure(several, at={"prompt": 1}, control=True).axes[0]
    assert ticks(second.xaxis) == ["0 A", "1 ·sea"]
    np.testing.assert_array_equal(np.asarray(second.images[0].get_array()), [[-7, -8], [-9, -10]])
    prompts = sweep(("prompt", [0, 1]), POSITIONS) | {"baselines": [{"unsteered": 1.0}, {"unsteered": 3.0}]}
    each = sweep_figure(prompts).axes[0]
    assert (ticks(each.yaxis), ticks(each.xaxis)) == (["0", "1"], ["0", "1"])
    np.testing.assert_array_equal(np.asarray(each.images[0].get_array()), [[0, 1], [0, 1]])


def test_one_axis_of_a_sweep_is_a_curve_beside_its_control() -> None:
    figure = sweep_figure(sweep(("strength", [3, -1]), control=True))
    curve, random, baseline = figure.axes[0].lines
    np.testing.assert_array_equal(curve.get_xydata(), [[-1, 2], [3, 1]])
    np.testing.assert_array_equal(random.get_xydata(), [[-1, -2], [3, -1]])
    assert np.asarray(baseline.get_ydata()).tolist() == [2.0, 2.0]
    assert is_drawn(figure)
    for without in (sweep(("prompt", [0, 1])), sweep(LAYERS) | {"baselines": [{"unsteered": None}]}):
        assert len(sweep_figure(without).axes[0].lines) == 1
    named = sweep_figure(sweep(LAYERS, ("feature", ["law", 7])), at={"layer": 8}).axes[0]
    assert ticks(named.xaxis) == ["law", "7"]
    assert np.asarray(named.lines[0].get_ydata()).tolist() == [3, 4]


HEADS = np.array([[[1.0, 0.0], [0.25, 0.75]], [[1.0, 0.0], [0.5, 0.5]]], "<f4")
CAPTURED = {
    "type": "capture",
    "positions": [0, 1],
    "points": {
        "layers.3.attn.pattern": {
            "dtype": "float32",
            "shape": [2, 2, 2],
            "data": base64.b64encode(np.ascontiguousarray(HEADS.swapaxes(0, 1)).tobytes()).decode(),
            "encoding": "base64",
        }
    },
}


@pytest.mark.parametrize("pattern", [CAPTURED, torch.from_numpy(HEADS), torch.from_numpy(HEADS)[None]])
def test_attention_has_a_map_for_each_head_from_a_server_s_capture_and_from_a_trace(pattern: Any) -> None:
    figure = attention_maps(pattern, tokens=["The", " sky"])
    first, second, bar = figure.axes
    layer = "layer 3, " if pattern is CAPTURED else ""
    assert [ax.get_title() for ax in (first, second)] == [f"{layer}head 0", f"{layer}head 1"]
    assert attention_maps(pattern, layer=7).axes[0].get_title() == "layer 7, head 0"
    assert (first.get_xlabel(), first.get_ylabel()) == ("key", "query")
    assert ticks(first.yaxis) == ticks(first.xaxis) == ["The", "·sky"]
    np.testing.assert_array_equal(np.asarray(second.images[0].get_array()), HEADS[1])
    assert shades(first)[1, 1] < shades(first)[1, 0] < shades(first)[0, 1], "the more attention, the darker"
    assert bar.get_ylabel() == "attention probability"
    assert is_drawn(figure)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: lens_map(LENS),
        lambda: patching_map([[0.0]], label="part of the answer's probability restored"),
        lambda: patching_map(
            torch.rand(3, 2), tokens=["a long name of a token", "b"], label="along the direction"
        ),
        lambda: attention_maps(torch.rand(1, 2, 2), layer=29),
        lambda: attention_maps(torch.rand(5, 2, 2), tokens=["a long name of a token", "b"]),
    ],
)
def test_no_label_is_cut_off(draw: Callable[[], Figure]) -> None:
    figure = draw()
    FigureCanvasAgg(figure).draw()
    *maps, bar = figure.axes
    texts = [text for ax in maps for text in (ax.title, *ax.get_xticklabels(), *ax.get_yticklabels())]
    texts += [axis.label for ax in (*maps, bar) for axis in (ax.xaxis, ax.yaxis)]
    for text in texts:
        if text.get_text():
            box = text.get_window_extent()
            assert min(box.x0, box.y0) >= 0, text
            assert box.x1 <= figure.bbox.x1, text
            assert box.y1 <= figure.bbox.y1, text


def test_draws_on_the_given_axes_and_of_fewer_queries_than_keys_the_last() -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert lens_map(LENS, ax=left) is figure
    assert attention_maps(torch.full((2, 1, 3), 1 / 3), heads=[1], tokens=["a", "b", "c"], ax=right) is figure
    assert cells(left)[1, 1] == "·Paris"
    assert (right.get_title(), ticks(right.yaxis)) == ("head 1", ["c"])


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: lens_map({"results": {"lens": LENS}}), "take one result from it"),
        (lambda: lens_map({**LENS, "positions": [0]}), "a row for each of its positions"),
        (lambda: lens_map(CAPTURED), "no result of logit_lens"),
        (lambda: lens_map(LENS, tokens=["one"]), "tokens must be a list of 2"),
        (lambda: lens_map(torch.zeros(2, 3)), r"shape \[layers, tokens, vocabulary\].*got \[2, 3\]"),
        (lambda: lens_map(torch.zeros(2, 3, 4)), "give `decode`"),
        (lambda: patching_map(torch.zeros(3)), r"shape \[layers, positions\].*got \[3\]"),
        (lambda: patching_map([[1.0], [1.0, 2.0]]), "rows of one length"),
        (lambda: patching_map([["high"]]), "numbers are needed"),
        (lambda: patching_map(torch.zeros(2, 2), layers=[1]), "layers must be a list of 2"),
        (lambda: attention_maps(torch.zeros(2, 3)), r"shape \[heads, queries, keys\]"),
        (lambda: attention_maps(HEADS, heads=[2]), r"some of 0 to 1, got \[2\]"),
        (lambda: attention_maps(HEADS, ax=Figure().add_subplot()), "is for a single head"),
        (lambda: attention_maps(CAPTURED, point="layers.4.attn.pattern"), "of layers.3.attn.pattern"),
        (lambda: patching_map({"url": "/v1/results/1", "key": "lens/x"}), "is in a file on the server"),
        (lambda: patching_map({"dtype": "float32", "shape": [1, 2], "data": "AA=="}), "a tensor object has"),
        (lambda: results_table([1, 2]), "results by name"),
        (lambda: sweep_figure({"values": []}), "result of a sweep"),
        (lambda: sweep_figure(sweep(LAYERS, POSITIONS, ("head", [0, 1]))), "one or two axes"),
        (lambda: sweep_figure(sweep(LAYERS, POSITIONS), at={"layer": 5}), "layer is one of 4, 8"),
        (lambda: sweep_figure(sweep(LAYERS, POSITIONS), at={"magic": 5}), "one or two axes"),
        (lambda: sweep_figure(sweep(("layer", [1]))), "one or two axes"),
        (lambda: sweep_figure(sweep(LAYERS, POSITIONS), control=True), "no control"),
        (lambda: sweep_figure(sweep(LAYERS, POSITIONS) | {"baselines": [{}]}), "no change to draw"),
        (
            lambda: sweep_figure(sweep(("prompt", [0, 1]), LAYERS) | {"baselines": [{"unsteered": 1}, {}]}),
            "no change to draw",
        ),
    ],
)
def test_what_a_picture_cannot_be_made_of_is_said(draw: Any, message: str) -> None:
    with pytest.raises(VizError, match=message):
        draw()


def test_results_are_a_table_whose_texts_are_no_html() -> None:
    results = {"lens": LENS, "heads": CAPTURED, "t": {"type": "trace", "saves": {"x": "<script>alert(1)"}}}
    table = results_table({"index": 0, "interventions": {"results": results}})
    html = table._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "float32 [2, 2, 2]" in html
    assert "layers.3.attn.pattern, positions 0–1" in repr(table)
    row = [{"id": 7, "label": "cats", "activation": 3.5}, {"id": 1, "label": None, "activation": 1.0}]
    seen = {"type": "features", "positions": [4, 5, 6], "features": [row, [], row[1:]]}
    assert results_table({"seen": seen}).rows == [("seen", "features", "positions 4–6", "'cats', –, 1")]
    assert ("hidden", "Tensor", "", "bfloat16 [2, 3]") in results_table(
        {"hidden": torch.zeros(2, 3, dtype=torch.bfloat16)}
    ).rows


def test_pictures_load_no_pyplot_and_no_torch() -> None:
    program = (
        "import sys\n"
        "from nnsight_engine.viz import patching_map\n"
        "patching_map([[0.5, 1.0]])._repr_png_()\n"
        "print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


def test_without_the_extra_it_says_how_to_get_it() -> None:
    program = "import sys\nsys.modules['matplotlib'] = None\nimport nnsight_engine.viz"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.strip().endswith(
        "nnsight_engine.viz draws with matplotlib, which is not installed: pip install 'nnsight-engine[viz]'"
    )
