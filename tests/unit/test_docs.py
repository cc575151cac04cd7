"""The documentation is complete: what the code offers has its place in ``docs/``, and examples work."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from api_schemas.conditions import Test
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import OPERATIONS, parse_interventions
from api_schemas.operations import (
    Ablate,
    Capture,
    Detect,
    Feature,
    FeatureChange,
    Features,
    Flag,
    LogitLens,
    Patch,
    PointOperation,
    Probe,
    Steer,
    Stop,
    Trace,
    Where,
)
from api_schemas.points import ENCODER_BLOCK, MODEL_POINTS, VISION, PointPattern, point_name
from api_schemas.results import ChoiceInterventions
from app.main import create_app, new_store
from app.settings import Settings
from nnsight_engine import __version__
from nnsight_engine.core.model_spec import PATTERN, RESIDUAL_LEAVES
from nnsight_engine.families.registry import ENGINE_FAMILIES
from nnsight_engine.plans.request_plan import AnswerMarkers, Part, PromptMedia
from scripts.drawings import points
from tests.fakes.engine import FakeEngineClient
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import compiled

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EXAMPLES = PROJECT / "examples"
LINKED_PAGES = [
    *PAGES,
    *(
        PROJECT / f"{name}.md"
        for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "examples/README")
    ),
]
GENERATED_ROUTES = {"/docs", "/redoc", "/openapi.json"}

SCHEMAS: tuple[type[BaseModel], ...] = (
    Steer,
    Ablate,
    Patch,
    Capture,
    Probe,
    LogitLens,
    Detect,
    Features,
    Feature,
    Stop,
    Flag,
    Trace,
)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(name: str) -> dict[str, list[str]]:
    """Return a page's table rows by what stands in backquotes in their first cell."""
    found: dict[str, list[str]] = {}
    for line in page(name).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            for key in re.findall(r"`([^`]+)`", cells[0]):
                found[key] = cells
    return found


def json_blocks(name: str) -> list[Any]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page(name), re.DOTALL)]


def test_every_file_on_the_map_of_folders_exists() -> None:
    (tree,) = re.findall(r"```text\n(.*?)```", page("development.md"), re.DOTALL)
    known = {
        path.name
        for name in ("api_schemas", "app", "nnsight_engine", "tests", "benchmarks")
        for path in (PROJECT / name).rglob("*.py")
    }
    named = set(re.findall(r"\b(\w+\.py)\b", tree))
    assert len(named) > 150
    assert not named - known


def test_every_setting_has_its_variable_and_its_default() -> None:
    documented = rows("settings.md")
    prefix = Settings.model_config["env_prefix"]
    for name, field in Settings.model_fields.items():
        cells = documented[str(field.validation_alias or f"{prefix}{name}".upper())]
        if field.default_factory is None:
            default = field.default
            written = f"{default:g}" if isinstance(default, float) else str(default)
            assert cells[1] == written, name
        assert cells[2], name


def test_no_setting_is_documented_that_does_not_exist() -> None:
    prefix = Settings.model_config["env_prefix"]
    named = {key for key in rows("settings.md") if key.startswith(prefix)}
    own = {name for name, field in Settings.model_fields.items() if field.validation_alias is None}
    assert named == {f"{prefix}{name}".upper() for name in own}


def test_settings_named_on_other_pages_exist() -> None:
    pattern = re.compile(r"`((?:max_\w+_(?:bytes|depth|operations)|inline_\w+|result_ttl\w+|drain_\w+))`")
    for path in PAGES:
        for name in pattern.findall(path.read_text(encoding="utf-8")):
            assert name in Settings.model_fields, f"{path.name}: {name}"


def test_every_route_is_documented(tmp_path: Path) -> None:
    settings = Settings(result_dir=tmp_path)
    store = new_store(settings)
    app = create_app(settings, FakeEngineClient(settings, store), store)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(app.openapi())))
    assert named <= set(app.openapi()["components"]["schemas"])
    documented = rows("http.md")
    document = app.openapi()
    served = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert served == {key for key in documented if key.startswith(("DELETE ", "GET ", "POST ", "PUT "))}
    for path in GENERATED_ROUTES:
        assert f"`{path}`" in page("http.md")
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert referred <= set(document["components"]["schemas"])


def test_every_error_code_is_documented_with_its_status() -> None:
    documented = {key: cells for key, cells in rows("errors.md").items() if re.fullmatch(r"[a-z_]+", key)}
    assert set(documented) == {code.value for code in ErrorCode}
    for code in ErrorCode:
        assert documented[code.value][1] == str(ApiError(code, "").status), code


def test_every_operation_has_a_section_with_all_its_fields() -> None:
    text = page("interventions.md")
    common = {"op", "at", "where", "name", "prompts"}
    for operation, schema in zip(OPERATIONS, SCHEMAS, strict=True):
        section = re.search(rf"\n## {operation}\n(.*?)\n## ", text, re.DOTALL)
        assert section is not None, operation
        assert "```json" in section[1], operation
        for field in set(schema.model_fields) - common:
            assert f"| `{field}` |" in section[1], f"{operation}.{field}"


@pytest.mark.parametrize(
    ("title", "schema"), [("Where", Where), ("Conditions", Test), ("feature", FeatureChange)]
)
def test_every_field_of_a_part_is_documented(title: str, schema: type[BaseModel]) -> None:
    section = page("interventions.md").split(f"\n## {title}\n")[1].split("\n## ")[0]
    for field in schema.model_fields:
        assert f"| `{field}` |" in section, field


def test_every_mode_and_method_is_documented() -> None:
    text = page("interventions.md")
    words: list[tuple[type[BaseModel], str]] = [
        (Steer, "mode"),
        (Ablate, "method"),
        (Capture, "reduce"),
        (Where, "phase"),
    ]
    for schema, field in words:
        for word in schema.model_json_schema()["properties"][field]["enum"]:
            assert f"`{word}`" in text, word


def test_every_point_is_documented_and_none_that_no_family_has() -> None:
    leaves = {leaf for family in ENGINE_FAMILIES for leaf in family.leaves} | {*RESIDUAL_LEAVES, PATTERN}
    offered = {point_name(leaf) for leaf in (*leaves, ENCODER_BLOCK, *MODEL_POINTS)}
    table = page("points.md").split("\n## Every point\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == offered


def test_every_family_and_architecture_is_documented() -> None:
    table = page("points.md").split("\n## Families\n")[1]
    for family in ENGINE_FAMILIES:
        for name in family.architectures or family.model_classes:
            assert f"`{name}`" in table, name


@pytest.mark.parametrize("block", json_blocks("interventions.md"), ids=lambda block: json.dumps(block)[:50])
def test_examples_of_interventions_parse(block: Any) -> None:
    if isinstance(block, dict) and "results" in block:
        ChoiceInterventions.model_validate(block)
        return
    raw = block if isinstance(block, list) else [block]
    operations = parse_interventions(raw)
    for operation in operations:
        points = operation.at if isinstance(operation, PointOperation) else []
        for text in [points] if isinstance(points, str) else points:
            PointPattern.parse(text).resolve(30)


def operation_examples() -> list[dict[str, Any]]:
    """Return the operations of all blocks of the page."""
    blocks = json_blocks("interventions.md")
    found = [one for block in blocks for one in (block if isinstance(block, list) else [block])]
    return [one for one in found if "op" in one]


@pytest.mark.parametrize("raw", operation_examples(), ids=lambda raw: json.dumps(raw)[:50])
def test_examples_of_interventions_are_for_the_bundled_model(raw: dict[str, Any]) -> None:
    stored = json.loads((PROJECT / "app/examples/data/index.json").read_text(encoding="utf-8"))
    text = json.dumps(raw, ensure_ascii=False)
    names = re.findall(r'"(?:dictionary|detector|vector)": "([^"]+)"|\{"name": "([^"]+)"', text)
    known = {one["name"] for kind in ("vectors", "detectors", "dictionaries") for one in stored[kind]}
    assert {name for pair in names for name in pair if name} <= known
    labels = {label for one in stored["dictionaries"] for label in one["labels"].values()}
    assert set(re.findall(r"`([a-z]+: [^`]*|the word [^`]*)`", page("bundled-examples.md"))) <= labels
    assert set(re.findall(r'"feature": "([^"]+)"', text)) <= labels
    if not isinstance(parse_interventions([raw])[0], PointOperation | LogitLens):
        return  # a detector or a dictionary has the numbers
    for name, numbers in (("example-joy", [1.0, 2.0]), ("example-formal", [1.0, 1.0])):
        text = re.sub(rf'\{{"name": "{name}"[^}}]*\}}|"{name}"', str(numbers * 288), text)
    if isinstance(
        parse_interventions([raw])[0], Patch | Probe
    ):  # of which the page says that four stand for all
        text = re.sub(r"\[(-?[\d.]+(?:, -?[\d.]+){3})\]", lambda four: str(json.loads(four[0]) * 144), text)
    operation = json.loads(text)
    operation.pop("when", None)
    compiled(
        operation,
        spec=tiny_spec(num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, vocab_size=49152),
        prompt=list(range(1, 33)),
        max_tokens=24,
        token_of=lambda _: 30,
        media=PromptMedia((((2, 5),), ((7, 9),))),
        markers=AnswerMarkers({1: Part.TOOL_CALLS, 2: Part.CONTENT}),
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_curl_bodies_are_requests_that_parse(path: Path) -> None:
    for body in re.findall(r"-d '(\{.*?\})'", path.read_text(encoding="utf-8"), re.DOTALL):
        parse_interventions(json.loads(body).get("interventions"))


@pytest.mark.parametrize("path", LINKED_PAGES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{path.name}: {target}"


def test_every_picture_is_small_shown_and_described() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in LINKED_PAGES)
    shown = set(re.findall(r"images/([\w.-]+)(?=[)\"])", text))
    for picture in (DOCS / "images").iterdir():
        assert picture.name in shown, picture.name
        assert picture.stat().st_size <= 150 * 1024, picture.name
    tags = re.findall(r"<img\b[^>]*>", text)
    alts = re.findall(r"!\[([^\]]*)\]\(", text) + [
        found[1] if (found := re.search(r'\balt="([^"]*)"', tag)) else "" for tag in tags
    ]
    assert all(alt.strip() for alt in alts)


def test_the_drawing_of_a_block_has_its_points_and_is_up_to_date() -> None:
    (llama,) = (family for family in ENGINE_FAMILIES if family.name == "llama")
    drawing = (DOCS / "images/points.svg").read_text(encoding="utf-8")
    drawn = re.findall(r"<text [^>]*monospace[^>]*>([^<]+)<", drawing)
    offered = {*llama.leaves, *RESIDUAL_LEAVES, PATTERN, *MODEL_POINTS} - {VISION}
    assert sorted(name.removeprefix("layers.N.") for name in drawn) == sorted(offered)
    assert drawing == points(), "python -m scripts.drawings points"


def test_every_page_is_listed_on_the_first() -> None:
    text = page("index.md")
    for path in DOCS.glob("*.md"):
        assert path.name == "index.md" or f"({path.name})" in text, path.name


def test_every_example_is_listed_and_the_number_of_them_is_right() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    programs = {path.name for path in EXAMPLES.glob("*.py")} | {"javascript/steer.mjs", "sae_on_server"}
    notebooks = {f"notebooks/{path.name}" for path in (EXAMPLES / "notebooks").glob("*.ipynb")}
    outputs = {f"OUTPUT.md#{path.stem}" for path in EXAMPLES.glob("*.py")}
    assert listed == programs | notebooks | outputs
    assert (len(programs), len(notebooks)) == (11, 3), "docs/index.md and CHANGELOG.md say so"


def test_the_readme_names_measured_speeds() -> None:
    table = (PROJECT / "README.md").read_text(encoding="utf-8").split("## Speed\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE)
    eager, compiled = (
        (PROJECT / path).read_text(encoding="utf-8")
        for path in re.findall(r"\((benchmarks/results/[^)]+)\)", table)
    )
    assert len(rows) == 7
    for case, in_eager, in_compiled in rows:
        row = f"\n| {case} | 64 requests, 16 tokens | ours / plain |"
        assert f"{row} {in_eager} |" in eager, case
        assert f"{row} {in_compiled} |" in compiled, case


def test_the_version_and_what_it_needs_are_the_same_everywhere() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme, changelog, citation = (
        (PROJECT / name).read_text(encoding="utf-8") for name in ("README.md", "CHANGELOG.md", "CITATION.cff")
    )
    assert f"\n## [{__version__}] - " in changelog
    assert f"\nversion: {__version__}\n" in citation
    assert f"/badge/licence-{project['license']}-" in readme
    assert f"/badge/python-{project['requires-python'].removeprefix('>=')}%2B-" in readme
    for requirement in project["optional-dependencies"]["gpu"]:
        name, _, version = requirement.partition("==")
        assert name != "vllm" or f"/badge/vLLM-{version}-" in readme


def anchors(path: Path) -> set[str]:
    """Return the anchors that a page's headings make, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
