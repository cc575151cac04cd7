"""What mkdocs does beside rendering ``docs/``: a hook of ``mkdocs.yml``.

Three things. Pages that nobody writes are made of code: every route and field from the app's own OpenAPI
document, the operations from their schemas, the list of decisions. And links out of ``docs/`` lead somewhere:
the files that they name, and those that these name, become pages or downloads below ``project/``, folders a
list of what is in them. And flowcharts become drawings, and drawings parts of their pages, in their colours.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from flowcharts import svg
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

PROJECT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = PROJECT / "docs"
BESIDE: Final = "project"
"""Where files beside ``docs/`` lie on the site."""
UNSEARCHED: Final = f"{BESIDE}/benchmarks/results/"
"""Pages of numbers, which searches would find before those that explain them."""
METHODS: Final = ("get", "post", "put", "delete")
GROUPS: Final = {
    "openai": "Completions, chats, models",
    "vllm": "vLLM's other routes",
    "interventions": "Capabilities, tokens, results",
    "presets": "Presets",
    "vectors": "Vectors",
    "detectors": "Detectors",
    "dictionaries": "Dictionaries",
    "traces": "Traces",
    "jobs": "Jobs",
    "keys": "Keys, tenants, audit",
    "health": "Health, status, metrics",
}
"""The pages of routes, by the tag of their routes."""
SHARED: Final = "schemas"

_ERROR: Final = 400
_READABLE: Final = 0.65
"""How small a drawing may get on a narrow screen, before it scrolls."""
_SLUG = slugify(case="lower")  # as in mkdocs.yml

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_DRAWING = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r'<img alt="(?P<alt>[^"]+)" src="[^"]*\bimages/(?P<name>[\w-]+\.svg)" ?/?>')
_SCREENSHOT = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)" alt="(?P<alt>[^"]+)">\s*</picture>'
)
_ATTRIBUTE = re.compile(r"^    (?P<name>\w+): (?P<text>.*(?:\n     +.*)*)", re.MULTILINE)
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)

PUBLIC: Final = (
    "nnsight_engine.modeling.base.NNsight",
    "nnsight_engine.modeling.language.LanguageModel",
    "nnsight_engine.modeling.vision_language.VisionLanguageModel",
    "nnsight_engine.modeling.diffusion.DiffusionModel",
    "nnsight_engine.vllm_backend.vllm.VLLM",
    "nnsight_engine.envoys.envoy.Envoy",
    "nnsight_engine.envoys.eproperty.eproperty",
    "nnsight_engine.core.saves.save",
    "nnsight_engine.remote_backend.client.backend.RemoteBackend",
    "nnsight_engine.remote_backend.errors.RemoteError",
    "nnsight_engine.remote_backend.errors.RemoteConnectionError",
    "nnsight_engine.remote_backend.client.status.status",
    "nnsight_engine.remote_backend.client.status.is_model_running",
    "nnsight_engine.remote_backend.client.status.ndif_status",
    "nnsight_engine.serialization.source.import_resolution.register_by_value",
    "nnsight_engine.serialization.source.import_resolution.unregister_by_value",
    "nnsight_engine.modeling.bundled.bundled_model_path",
    "nnsight_engine.harvesting.call.harvest",
    "nnsight_engine.core.config.CONFIG",
)
BEHIND: Final = (
    "nnsight_engine.modeling.transformers.TransformersModel",
    "nnsight_engine.envoys.tracers.interleaving.InterleavingTracer",
    "nnsight_engine.viz",
    "nnsight_engine.datasets",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the files beside ``docs/`` that pages link to."""
    operations = operation_schemas()
    made = {
        **http_pages(openapi(), operations),
        "reference/operations.md": operations_page(operations),
        "reference/python.md": python_page(),
        "decisions/index.md": decisions_page(),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    beside = linked(DOCS.rglob("*.md"))
    for file in beside:
        content: str | bytes = folder_page(file, beside) if file.is_dir() else file.read_bytes()
        files.append(File.generated(config, site_path(file), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Make links lead to their targets, draw flowcharts, and keep results of benchmarks out of searches."""
    name = page.file.src_uri
    if name.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    source = PROJECT / name.removeprefix(f"{BESIDE}/") if name.startswith(f"{BESIDE}/") else DOCS / name
    if source.name == "index.md" and not source.exists():
        source = source.parent / "index.md"

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link["path"]).resolve()
        if not target.exists() or not target.is_relative_to(PROJECT):
            return link[0]
        return posixpath.relpath(site_path(target), posixpath.dirname(name)) + (link["anchor"] or "")

    # By the theme's scheme, which readers can switch, and not only by the system's.
    shots = _SCREENSHOT.sub(r"![\g<alt>](\g<light>#only-light)![\g<alt>](\g<dark>#only-dark)", markdown)
    return _DRAWING.sub(lambda drawing: svg(drawing[1]), _LINK.sub(moved, shots))


def on_page_content(content: str, **_: object) -> str:
    """Put drawings into the page: in a file of their own they would not have the colours of the theme."""

    def inside(picture: re.Match[str]) -> str:
        text = (DOCS / "images" / picture["name"]).read_text(encoding="utf-8")
        width = _READABLE * int(text.partition(' width="')[2].partition('"')[0])
        drawing = text.replace("<svg ", f'<svg role="img" aria-label="{picture["alt"]}" ', 1).replace(
            'style="', f'style="min-width:{width:.0f}px;', 1
        )
        return f'<span style="display:block;overflow-x:auto" data-search-exclude>{drawing}</span>'

    return _PICTURE.sub(inside, content)


def site_path(path: Path) -> str:
    """Return where a file or a folder of the project lies on the site."""
    if path == DOCS / "decisions" or path == DOCS:
        return f"{path.relative_to(DOCS).as_posix()}/index.md".removeprefix("./")
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    inside = f"{BESIDE}/{path.relative_to(PROJECT).as_posix()}"
    return f"{inside}/index.md" if path.is_dir() else inside


def linked(pages: Iterable[Path]) -> set[Path]:
    """Return the files and folders beside ``docs/`` that pages link to, and that the pages among them do.

    Of a folder only its pages are taken: what else lies in it may be somebody's own, secrets for one.
    """
    found: set[Path] = set()
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        for link in _LINK.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))):
            target = (page.parent / link["path"]).resolve()
            beside = target.is_relative_to(PROJECT) and not target.is_relative_to(DOCS)
            if beside and target.exists() and target not in found:
                found.add(target)
                inside = target.glob("*.md") if target.is_dir() else [target]
                reached = [path for path in inside if path.suffix == ".md"]
                found.update(reached)
                waiting += reached
    return found


def folder_page(folder: Path, files: Iterable[Path]) -> str:
    """Return a list of the files that are in a folder, the last names first: results begin with dates."""
    inside = sorted((file for file in files if file.is_file() and file.is_relative_to(folder)), reverse=True)
    names = [file.relative_to(folder).as_posix() for file in inside]
    listed = [f"- [{name}]({name})" for name in names] or ["A folder of the repository, with no pages."]
    return "\n".join([f"# {folder.relative_to(PROJECT)}", "", *listed, ""])


def decisions_page() -> str:
    """Return a list of the decisions by their titles."""
    lines = [
        "# Decisions",
        "",
        "Why some things are as they are, in the order in which they were decided.",
        "",
    ]
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join([*lines, ""])


def python_page() -> str:
    """Return the page from which mkdocstrings makes the reference of the library."""
    said = "The library's public names, each imported from `nnsight_engine`; then what these are made of."
    return "\n".join(["# Python", "", said, "", *(f"::: {name}\n" for name in (*PUBLIC, *BEHIND))])


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of the app, which is made without an engine."""
    sys.path.insert(0, str(PROJECT))
    from app.main import create_app, new_store  # noqa: PLC0415 - as above
    from app.settings import Settings  # noqa: PLC0415 - as above
    from tests.fakes.engine import FakeEngineClient  # noqa: PLC0415 - mkdocs loads hooks before it knows this path

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(result_dir=Path(folder), data_dir=Path(folder))
        store = new_store(settings)
        return create_app(settings, FakeEngineClient(settings, store), store).openapi()


def operation_schemas() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return the title and the schema of each operation and of their parts, by the schemas' names."""
    sys.path.insert(0, str(PROJECT))
    from pydantic import TypeAdapter  # noqa: PLC0415 - as in openapi

    from api_schemas.interventions import OPERATIONS, Intervention  # noqa: PLC0415 - as above

    document = TypeAdapter(Intervention).json_schema()
    schemas = document["$defs"]
    classes = {name: name_of(place) for name, place in document["discriminator"]["mapping"].items()}
    titles = {classes[name]: name for name in OPERATIONS}
    titles |= {name: name for name in sorted(set(schemas) - set(classes.values()))}
    return {name: (title, schemas[name]) for name, title in titles.items()}


def operations_page(operations: Mapping[str, tuple[str, Mapping[str, Any]]]) -> str:
    """Return the fields of each operation, from the schemas that read them."""
    lines = [
        "# Operations, every field",
        "",
        "Made from the schemas that read requests. [Interventions](../interventions.md) says what they mean.",
        "",
    ]
    places = {name: f"#{title.lower()}" for name, (title, _) in operations.items()}
    for title, schema in operations.values():
        lines += [f"## {title}", "", *field_table(schema, places), ""]
    return "\n".join(lines)


def http_pages(
    document: Mapping[str, Any], operations: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> dict[str, str]:
    """Return every route of an OpenAPI document, a page for each of its groups, by their paths.

    The schema of an operation is on the page of operations, one that a single group uses on the page of this
    group, and each other one on a page of schemas.
    """
    schemas = document["components"]["schemas"]
    routes = [
        (f"{method.upper()} {path}", methods[method])
        for path, methods in sorted(document["paths"].items())
        for method in METHODS
        if method in methods
    ]
    groups = {tag: [one for one in routes if one[1]["tags"][0] == tag] for tag in sorted(GROUPS)}
    if sum(map(len, groups.values())) != len(routes):
        raise ValueError(f"each route's first tag must be one of {', '.join(GROUPS)}")
    users = {
        name: [tag for tag, own in groups.items() if name in _used([route for _, route in own], schemas)]
        for name in sorted(schemas)
    }
    pages = {
        name: f"operations/{operations[name][0].lower()}"
        if name in operations
        else tags[0]
        if len(tags) == 1
        else SHARED
        for name, tags in users.items()
    }
    head = "Made from the server's own `/openapi.json`. [HTTP]({up}http.md) is the overview."
    index = ["# HTTP, every field", "", head.format(up="../"), "", "| route | effect |", "|---|---|"]
    made = {}
    for tag, title in {**GROUPS, SHARED: "Schemas of several groups"}.items():
        places = {
            name: f"../operations.md#{page.partition('/')[2]}"
            if "/" in page
            else f"{'' if page == tag else page + '.md'}#{name.lower()}"
            for name, page in pages.items()
        }
        lines = [f"# {title}", "", head.format(up="../../"), ""]
        for name, route in groups.get(tag, ()):
            lines += route_section(name, route, places)
            index.append(
                f"| [`{name}`](http/{tag}.md#{_SLUG(name, '-')}) | {one_line(route.get('summary', ''))} |"
            )
        own = [name for name, page in pages.items() if page == tag]
        if own and tag != SHARED:
            lines += ["## Schemas", ""]
        for name in own:
            schema = schemas[name]
            lines += [
                f"{'##' if tag == SHARED else '###'} {name}", "", about(schema)[0], "",
                *field_table(schema, places), "",
            ]  # fmt: skip
        made[f"reference/http/{tag}.md"] = "\n".join(lines)
    return {"reference/http.md": "\n".join([*index, ""]), **made}


def _used(part: Any, schemas: Mapping[str, Any]) -> set[str]:
    """Return the names of all schemas that a part of a document refers to, directly or by others."""
    found: set[str] = set()
    waiting = [part]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
            if "$ref" in one and (name := name_of(one["$ref"])) not in found:
                found.add(name)
                waiting.append(schemas[name])
        elif isinstance(one, list):
            waiting += one
    return found


def route_section(title: str, route: Mapping[str, Any], places: Mapping[str, str]) -> list[str]:
    """Return what is said of one route."""
    lines = [f"## `{title}`", "", one_line(route.get("description") or route.get("summary", "")), ""]
    if route.get("parameters"):
        lines += ["| parameter | in | type | meaning |", "|---|---|---|---|"]
        for one in route["parameters"]:
            meaning = one_line(one.get("description", ""))
            lines.append(f"| `{one['name']}` | {one['in']} | {kind_of(one['schema'], places)} | {meaning} |")
        lines.append("")
    for kind, body in route.get("requestBody", {}).get("content", {}).items():
        lines += [f"Body, `{kind}`: {kind_of(body['schema'], places)}", ""]
    lines += ["| status | answer | type |", "|---|---|---|"]
    errors: dict[str, str] = {}
    for status, answer in sorted(route["responses"].items()):
        kinds = [
            f"`{kind}`: {kind_of(body.get('schema', {}), places)}"
            for kind, body in answer.get("content", {}).items()
        ]
        if int(status) < _ERROR:
            lines.append(f"| {status} | {one_line(answer.get('description', ''))} | {'; '.join(kinds)} |")
        else:
            errors[status] = "; ".join(kinds)
    if errors:
        kinds = [kind for kind in dict.fromkeys(errors.values()) if kind]
        lines.append(f"| {', '.join(errors)} | [errors](../../errors.md) | {'; '.join(kinds)} |")
    return [*lines, ""]


def field_table(schema: Mapping[str, Any], places: Mapping[str, str]) -> list[str]:
    """Return the table of a schema's fields; nothing where it has none."""
    fields, meanings = schema.get("properties", {}), about(schema)[1]
    if not fields:
        return [kind_of(schema, places)] if "enum" in schema or "type" in schema else []
    required = set(schema.get("required", ()))
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if name in required else f"`{field['default']}`" if "default" in field else ""
        meaning = one_line(field.get("description", "")) or meanings.get(name, "")
        lines.append(f"| `{name}` | {kind_of(field, places)} | {default} | {meaning} |")
    return lines


def about(schema: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return what a schema's description says of the whole, and of each of its fields."""
    whole, _, fields = schema.get("description", "").partition("\nAttributes:\n")
    return one_line(whole), {found["name"]: one_line(found["text"]) for found in _ATTRIBUTE.finditer(fields)}


def kind_of(schema: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """Return a schema's type in words, as fits a table's cell; ``places`` has where each schema is."""
    if "$ref" in schema:
        name = name_of(schema["$ref"])
        return f"[`{name}`]({places[name]})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(kind_of(one, places) for one in schema[several]))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {kind_of(schema.get('items', {}), places)}"
    return str(schema.get("format") or schema.get("type") or "anything")


def name_of(reference: str) -> str:
    """Return the name of the schema that is referred to."""
    return reference.rpartition("/")[2]


def one_line(text: str) -> str:
    """Return text that a table's cell takes."""
    return " ".join(text.split()).replace("|", "\\|")
