"""What mkdocs does beside rendering ``docs/``: a hook of ``mkdocs.yml``.

Two things. Pages that nobody writes are made of code: every route and field from the app's own OpenAPI
document, the operations from their schemas, the list of decisions. And links out of ``docs/`` lead somewhere:
the files that they name, and those that these name, become pages or downloads below ``project/``, folders a
list of what is in them.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PROJECT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = PROJECT / "docs"
BESIDE: Final = "project"
"""Where files beside ``docs/`` lie on the site."""
METHODS: Final = ("get", "post", "put", "delete")

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
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
    "nnsight_engine.core.config.CONFIG",
)
BEHIND: Final = (
    "nnsight_engine.modeling.transformers.TransformersModel",
    "nnsight_engine.envoys.tracers.interleaving.InterleavingTracer",
    "nnsight_engine.viz",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the files beside ``docs/`` that pages link to."""
    made = {
        "reference/http.md": http_page(openapi()),
        "reference/operations.md": operations_page(),
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
    """Make links lead to where their targets lie on the site."""
    name = page.file.src_uri
    source = PROJECT / name.removeprefix(f"{BESIDE}/") if name.startswith(f"{BESIDE}/") else DOCS / name
    if source.name == "index.md" and not source.exists():
        source = source.parent / "index.md"

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link["path"]).resolve()
        if not target.exists() or not target.is_relative_to(PROJECT):
            return link[0]
        return posixpath.relpath(site_path(target), posixpath.dirname(name)) + (link["anchor"] or "")

    return _LINK.sub(moved, markdown)


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
    return "\n".join([f"# {folder.relative_to(PROJECT)}", "", *(f"- [{name}]({name})" for name in names), ""])


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


def operations_page() -> str:
    """Return the fields of each operation, from the schemas that read them."""
    sys.path.insert(0, str(PROJECT))
    from pydantic import TypeAdapter  # noqa: PLC0415 - as in openapi

    from api_schemas.interventions import OPERATIONS, Intervention  # noqa: PLC0415 - as above

    lines = [
        "# Operations, every field",
        "",
        "Made from the schemas that read requests. [Interventions](../interventions.md) says what they mean.",
        "",
    ]
    document = TypeAdapter(Intervention).json_schema()
    schemas = document["$defs"]
    classes = {name: name_of(place) for name, place in document["discriminator"]["mapping"].items()}
    sections = {name: classes[name] for name in OPERATIONS}
    sections |= {name: name for name in sorted(set(schemas) - set(classes.values()))}
    for title, name in sections.items():
        lines += [f"## {title}", "", *field_table(schemas[name]), ""]
    return "\n".join(lines)


def http_page(document: Mapping[str, Any]) -> str:
    """Return every route and schema of an OpenAPI document."""
    lines = [
        "# HTTP, every field",
        "",
        "Made from the server's own `/openapi.json`. [HTTP](../http.md) is the overview.",
        "",
    ]
    for path, methods in sorted(document["paths"].items()):
        for method in METHODS:
            if method in methods:
                lines += route_section(f"{method.upper()} {path}", methods[method])
    lines += ["## Schemas", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += [f"### {name}", "", one_line(schema.get("description", "")), "", *field_table(schema), ""]
    return "\n".join(lines)


def route_section(title: str, route: Mapping[str, Any]) -> list[str]:
    """Return what is said of one route."""
    lines = [f"## `{title}`", "", one_line(route.get("description") or route.get("summary", "")), ""]
    if route.get("parameters"):
        lines += ["| parameter | in | type | meaning |", "|---|---|---|---|"]
        for one in route["parameters"]:
            meaning = one_line(one.get("description", ""))
            lines.append(f"| `{one['name']}` | {one['in']} | {kind_of(one['schema'])} | {meaning} |")
        lines.append("")
    for kind, body in route.get("requestBody", {}).get("content", {}).items():
        lines += [f"Body, `{kind}`: {kind_of(body['schema'])}", ""]
    lines += ["| status | answer | type |", "|---|---|---|"]
    for status, answer in sorted(route["responses"].items()):
        kinds = [
            f"`{kind}`: {kind_of(body.get('schema', {}))}" for kind, body in answer.get("content", {}).items()
        ]
        lines.append(f"| {status} | {one_line(answer.get('description', ''))} | {'; '.join(kinds)} |")
    return [*lines, ""]


def field_table(schema: Mapping[str, Any]) -> list[str]:
    """Return the table of a schema's fields; nothing where it has none."""
    fields = schema.get("properties", {})
    if not fields:
        return [kind_of(schema)] if "enum" in schema or "type" in schema else []
    required = set(schema.get("required", ()))
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if name in required else f"`{field['default']}`" if "default" in field else ""
        lines.append(
            f"| `{name}` | {kind_of(field)} | {default} | {one_line(field.get('description', ''))} |"
        )
    return lines


def kind_of(schema: Mapping[str, Any]) -> str:
    """Return a schema's type in words, as fits a table's cell."""
    if "$ref" in schema:
        name = name_of(schema["$ref"])
        return f"[`{name}`](#{name.lower()})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(map(kind_of, schema[several])))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {kind_of(schema.get('items', {}))}"
    return str(schema.get("format") or schema.get("type") or "anything")


def name_of(reference: str) -> str:
    """Return the name of the schema that is referred to."""
    return reference.rpartition("/")[2]


def one_line(text: str) -> str:
    """Return text that a table's cell takes."""
    return " ".join(text.split()).replace("|", "\\|")
