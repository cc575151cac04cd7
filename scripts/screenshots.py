"""Takes the pictures of the playground that README and docs show, of the real page of a real server.

    python -m scripts.screenshots                                        # all, of a server of its own
    python -m scripts.screenshots --base-url http://127.0.0.1:8000 lens  # one, of the bundled model's server
    python -m scripts.screenshots --views /tmp/views                     # whole views: wide, dark, on a phone

Needs Debian's Chromium, as tests/playground do. ``docs/images/NAME.png`` is light, ``NAME-dark.png`` dark.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from PIL import Image
from playwright.sync_api import Browser, FloatRect, Page, sync_playwright

from benchmarks.servers import served
from tests.playground.conftest import ARGUMENTS, link, press

IMAGES: Final = Path(__file__).resolve().parents[1] / "docs/images"
CHROMIUM: Final = "/usr/bin/chromium"
SCALE: Final = 1.5
COLOURS: Final = 128
MOST_BYTES: Final = 150_000
PAD: Final = 10
"""Pixels of the page around what is cut out of it."""
PHONE: Final = (390, 844)

JOY: Final = {"vector": "example-joy", "layers": "12", "mode": "add", "scale": 1}
FACT: Final = "The Eiffel Tower is in the city of"
COURT: Final = "The judge in the court asked the lawyer about the law"
STATES: Final[dict[str, dict[str, Any]]] = {
    "generate": {"steering": [{**JOY, "on": False}], "sampling": {"maxTokens": 24}},
    "sweep": {"steering": [JOY]},
    "lens": {"prompt": FACT, "sampling": {"maxTokens": 4}},
    "activations": {"prompt": COURT, "activations": {"layer": 12, "vector": "example-joy"}},
    "features": {"prompt": COURT},
    "attention": {"prompt": FACT, "attention": {"layer": 3, "head": 2}},
    "patching": {},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A part of the page.

    Attributes:
        view: The view that is run.
        width: How wide the page is, in its own pixels.
        parts: Selectors of what is in the picture: the smallest rectangle around all of them.
        state: What differs from the view's state in ``STATES``.
    """

    view: str
    width: int
    parts: tuple[str, ...]
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


PICTURES: Final = {
    "compare": Picture("generate", 980, ("header", ".view", "fieldset .slider")),
    "beside": Picture("generate", 760, (".compare", ".compare + .hint")),
    "strengths": Picture("sweep", 760, (".chart", ".multiples")),
    "lens": Picture(
        "lens",
        640,
        (".legend", ".figure"),
        {"sampling": {"maxTokens": 1}, "lens": {"every": 1, "topK": 5, "steered": False}},
    ),
    "features": Picture("features", 700, (".beside",), {"features": {"topK": 4}}),
    "patching": Picture("patching", 680, (".aligned", ".figure")),
}


def opened(browser: Browser, url: str, state: dict[str, Any], size: tuple[int, int], **options: Any) -> Page:
    """Open a view, and run it."""
    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, reduced_motion="reduce", **options)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(link(url, **state))
    page.get_by_role("navigation", name="Views").wait_for()
    press(page)
    if state["view"] == "generate":
        # One text after the other: they are those that README prints, while in one batch rounding differs.
        page.get_by_label("On", exact=True).check()
        page.get_by_text("The texts diverge at word").wait_for()
    page.wait_for_timeout(500)  # what is fetched beside the answer
    return page


def box(page: Page, parts: tuple[str, ...]) -> FloatRect:
    """Return the smallest rectangle around parts of a page, and a little of what is around them."""
    boxes = [found for part in parts if (found := page.locator(part).first.bounding_box())]
    left = max(0, min(each["x"] for each in boxes) - PAD)
    top = max(0, min(each["y"] for each in boxes) - PAD)
    right = max(each["x"] + each["width"] for each in boxes) + PAD
    bottom = max(each["y"] + each["height"] for each in boxes) + PAD
    return {"x": left, "y": top, "width": right - left, "height": bottom - top}


def store(png: bytes, path: Path) -> None:
    """Write a picture with a palette: half are its most frequent colours, half keeps those that are rare."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    counted = sorted(image.getcolors(image.width * image.height), reverse=True)[:COLOURS]
    spread = image.quantize(COLOURS, method=Image.Quantize.FASTOCTREE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([*(value for _, colour in counted for value in colour), *spread[: 3 * COLOURS]])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(path.name, f"{image.width}x{image.height}, {size / 1000:.0f} kB")
    if size > MOST_BYTES:
        raise SystemExit(f"{path} has {size} bytes, more than {MOST_BYTES}: cut more off")


def take(browser: Browser, url: str, name: str) -> None:
    """Take one picture, light and dark."""
    picture = PICTURES[name]
    state = {"view": picture.view, **STATES[picture.view], **picture.state}
    page = opened(browser, url, state, (picture.width, 2400), device_scale_factor=SCALE)
    schemes: list[tuple[Literal["light", "dark"], str]] = [("light", ""), ("dark", "-dark")]
    for scheme, ending in schemes:
        page.emulate_media(color_scheme=scheme)
        store(page.screenshot(clip=box(page, picture.parts)), IMAGES / f"{name}{ending}.png")
    page.context.close()


def take_views(browser: Browser, url: str, folder: Path) -> None:
    """Take each view as a whole: wide, the same in the dark, and on a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    for view, state in STATES.items():
        page = opened(browser, url, {"view": view, **state}, (1440, 900))
        page.screenshot(path=folder / f"{view}-wide.png", full_page=True)
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=folder / f"{view}-dark.png", full_page=True)
        page.context.close()
        page = opened(browser, url, {"view": view, **state}, PHONE)
        page.screenshot(path=folder / f"{view}-390-top.png")
        height = page.evaluate("() => document.documentElement.scrollHeight")
        # As high as the page, so that the bar at the bottom hides nothing.
        page.set_viewport_size({"width": PHONE[0], "height": height})
        page.screenshot(path=folder / f"{view}-390.png")
        page.context.close()


@contextlib.contextmanager
def server_at(url: str | None) -> Iterator[str]:
    """Yield the address of a server that runs, or of one for the length of the block."""
    if url is not None:
        yield url
        return
    with served([], {"VLLM_CPU_KVCACHE_SPACE": "1"}) as own:
        yield own


def main() -> None:
    """Take what the command line names."""
    parser = argparse.ArgumentParser(description="Take the pictures of the playground.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PICTURES)}; default: all")
    parser.add_argument("--base-url", help="a running server of the bundled model")
    parser.add_argument("--views", type=Path, metavar="FOLDER", help="take each view whole, into a folder")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PICTURES):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    with server_at(arguments.base_url) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        if arguments.views:
            take_views(browser, url, arguments.views)
        for name in arguments.names or ([] if arguments.views else PICTURES):
            take(browser, url, name)
        browser.close()


if __name__ == "__main__":
    main()
