"""``nnsight-engine vectors | detectors | dictionaries | presets``: lists, adds and exports stored things.

An exported file can be added to any server: it says where it comes from. That of a preset has the vectors and
detectors that its operations name. Failed requests raise RemoteError.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from api_schemas.fields import NAME_RULE, Reference
from app.terminal.server import JsonObject, Server
from app.terminal.text_display import plain

_PAGE: Final = 100
_WEIGHTS: Final = "sae_weights.safetensors"
_CFG: Final = "cfg.json"
_LABELS: Final = "labels.json"
_PARTS: Final = "parts"
"""The field of a preset's file with what its operations name, by id."""
_HUB: Final = "://"
_COLUMN: Final = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of things with names; ``ending`` is that of an exported file, empty for a folder."""

    plural: str
    prefix: str
    ending: str
    columns: Mapping[str, Callable[[JsonObject], object]]
    trains: bool = False

    @property
    def singular(self) -> str:
        return "dictionary" if self.plural == "dictionaries" else self.plural.removesuffix("s")

    @property
    def route(self) -> str:
        return f"/v1/{self.plural}"


VECTORS: Final = Kind(
    "vectors",
    "vec_",
    ".safetensors",
    {
        "at": lambda thing: thing["at"].replace("*", _layers_text(thing["layers"])),
        "best layer": lambda thing: (thing["training"] or {}).get("best_layer", ""),
        "from": lambda thing: (thing["training"] or {}).get("method", thing["format"]),
    },
    trains=True,
)
DETECTORS: Final = Kind(
    "detectors",
    "det_",
    ".safetensors",
    {
        "at": lambda thing: ", ".join(part["at"] for part in thing["parts"]),
        "threshold": lambda thing: "" if thing["threshold"] is None else f"{thing['threshold']:.3g}",
        "AUROC": lambda thing: "" if thing["training"] is None else f"{thing['training']['auroc']:.2f}",
    },
    trains=True,
)
DICTIONARIES: Final = Kind(
    "dictionaries",
    "dict_",
    "",
    {
        "at": lambda thing: thing["at"],
        "architecture": lambda thing: thing["architecture"],
        "features": lambda thing: thing["num_features"],
        "labels": lambda thing: thing["num_labels"],
    },
)
PRESETS: Final = Kind(
    "presets",
    "pre_",
    ".json",
    {
        "operations": lambda thing: ", ".join(thing["operations"]),
        "description": lambda thing: thing["description"][:_COLUMN],
    },
)
KINDS: Final = (VECTORS, DETECTORS, DICTIONARIES, PRESETS)


async def show(server: Server, kind: Kind, name: str | None, console: Console) -> None:
    """Print a table of the things of a kind, or of the versions of one name."""
    things = await _list_all(server, kind.route, **({} if name is None else {"name": name}))
    columns = [Column(title, overflow="fold") for title in (*kind.columns, "shared")]
    table = Table(
        Column("name", no_wrap=True), *columns, Column("created", no_wrap=True), box=None, pad_edge=False
    )
    for thing in things:
        cells = [plain(str(cell(thing))) for cell in kind.columns.values()]
        created = datetime.fromtimestamp(thing["created_at"], UTC).strftime("%Y-%m-%d")
        table.add_row(
            f"{thing['name']}@{thing['version']}", *cells, "yes" if thing["shared"] else "", created
        )
    console.print(table if things else f"{server.url} has no {kind.plural}.")


async def add(server: Server, kind: Kind, name: str, source: str, fields: JsonObject) -> JsonObject:
    """Store a file or, of a dictionary, a folder or a place on the Hub; return its description."""
    if kind is PRESETS:
        return await _add_preset(server, {"name": name, **fields}, _read_json(Path(source)))
    if kind is DICTIONARIES and _HUB in source:
        # The server downloads it before it answers.
        body = {"name": name, "source": source, **fields}
        return await server.send("POST", kind.route, json=body, timeout=None)
    form = {key: "true" if value is True else value for key, value in fields.items()}
    with _translated_file_errors(Path(source)), contextlib.ExitStack() as stack:
        parts = _saelens_files(Path(source)) if kind is DICTIONARIES else {"file": Path(source)}
        files = {field: (path.name, stack.enter_context(path.open("rb"))) for field, path in parts.items()}
        return await server.send("POST", kind.route, data={"name": name, **form}, files=files)


async def train(server: Server, kind: Kind, name: str, source: Path, console: Console) -> JsonObject:
    """Train one from the prompts of a JSON file, with the fields of the route; return its description."""
    body = _read_json(source)
    if not isinstance(body, dict):
        example = '{"positive": ["…"], "negative": ["…"]}'
        raise ValueError(f"{source} has no object with prompts, {example}")  # noqa: TRY004 - of a file
    stored: JsonObject = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("")
        async with contextlib.aclosing(
            server.events(f"{kind.route}/train", {**body, "name": name})
        ) as events:
            async for event in events:
                if event["type"] == "progress":
                    progress.update(
                        task, description=event["stage"], completed=event["done"], total=event["total"]
                    )
                else:
                    stored = event[kind.singular]
    return stored


async def export(server: Server, kind: Kind, name: str, target: Path | None) -> Path:
    """Write ``joy`` or ``joy@2`` to a new file, a dictionary to a folder; ValueError if there is none."""
    reference = _reference(name)
    target = target or Path(f"{reference.name}{kind.ending}")
    if kind is PRESETS:
        text = json.dumps(await _preset_file(server, name), indent=1, ensure_ascii=False)
        with _new_file(target) as file:
            file.write(f"{text}\n".encode())
        return target
    thing = await _find(server, kind, reference)
    path = f"{kind.route}/{thing['id']}"
    if kind is not DICTIONARIES:
        with _new_file(target) as file:
            await server.download(f"{path}/content", file)
        return target
    features = await _list_all(server, f"{path}/features")
    labels = {str(feature["id"]): feature["label"] for feature in features}
    with _translated_file_errors(target):
        target.mkdir(parents=True)
    for file_name, route_part in ((_WEIGHTS, "content"), (_CFG, "config")):
        with _new_file(target / file_name) as file:
            await server.download(f"{path}/{route_part}", file)
    if labels:
        with _new_file(target / _LABELS) as file:
            file.write(json.dumps(labels, ensure_ascii=False).encode())
    return target


async def best_layer(server: Server, vector: str) -> str:
    """Return the layer at which a vector steers by default: its best one, or the middle of its rows."""
    stored = await _find(server, VECTORS, _reference(vector))
    layers: list[int] = stored["layers"]
    return str((stored["training"] or {}).get("best_layer", layers[len(layers) // 2]))


async def _list_all(server: Server, path: str, **query: str | int) -> list[JsonObject]:
    """Return all pages of a list."""
    items: list[JsonObject] = []
    while True:
        page = await server.get(path, limit=_PAGE, **query)
        items += page["data"]
        if not page["has_more"]:
            return items
        query["after"] = page["last_id"]


async def _find(server: Server, kind: Kind, reference: Reference) -> JsonObject:
    """Return a version, or the newest, of a name; the caller's own come before shared ones; ValueError."""
    versions = await _list_all(server, kind.route, name=reference.name)
    own_versions = [version for version in versions if version["own"]] or versions
    for version in own_versions:
        if reference.version in {None, version["version"]}:
            return version
    raise ValueError(
        f"{server.url} has no {kind.singular} {reference}; `nnsight-engine {kind.plural} list` lists them"
    )


async def _preset_file(server: Server, name: str) -> JsonObject:
    """Return a preset with what its operations name; dictionaries are named only, since they are large."""
    preset = await server.get(f"{PRESETS.route}/{name}")
    parts: JsonObject = {}
    for kind, name_object in _named_things(preset["interventions"]):
        if name_object["id"] in parts:
            continue
        path = f"{kind.route}/{name_object['id']}"
        description = await server.get(path)
        content = None
        if kind is not DICTIONARIES:
            file = io.BytesIO()
            await server.download(f"{path}/content", file)
            content = base64.b64encode(file.getvalue()).decode()
        parts[name_object["id"]] = {"kind": kind.plural, "sha256": description["sha256"], "content": content}
    return {**preset, **({_PARTS: parts} if parts else {})}


async def _add_preset(server: Server, fields: JsonObject, file: Any) -> JsonObject:
    """Store a preset; what its operations name becomes what this server has of it, or is stored first."""
    preset = {"interventions": file} if isinstance(file, list) else file
    if not isinstance(preset, dict) or "interventions" not in preset:
        raise ValueError("a preset's file has a list of operations, or an object with it as `interventions`")
    parts = preset.get(_PARTS) or {}
    for kind, name_object in _named_things(preset["interventions"]):
        part = parts.get(name_object["id"])
        if part is not None:
            stored = await _find_or_add_part(server, kind, Reference.parse(name_object["name"]), part)
            name_object |= {"name": f"{stored['name']}@{stored['version']}", "id": stored["id"]}
    content = {key: preset[key] for key in ("description", "interventions") if key in preset}
    return await server.send("POST", PRESETS.route, json={**content, **fields})


async def _find_or_add_part(
    server: Server, kind: Kind, reference: Reference | None, part: JsonObject
) -> JsonObject:
    """Return what a preset names, by its numbers; store it if the server does not have it."""
    if reference is None:
        raise ValueError("the file names something that is no name")
    for stored in await _list_all(server, kind.route, name=reference.name):
        if stored["sha256"] == part["sha256"]:
            return stored
    if part.get("content") is None:
        raise ValueError(
            f"the preset needs the {kind.singular} {reference} with the SHA-256 {part['sha256']}, which is "
            f"not in the file: add it first, `nnsight-engine {kind.plural} add {reference.name} …`"
        )
    file = (f"content{kind.ending}", base64.b64decode(part["content"]))
    return await server.send("POST", kind.route, data={"name": reference.name}, files={"file": file})


def _named_things(value: Any) -> Iterator[tuple[Kind, JsonObject]]:
    """Yield the objects in a preset's operations that name a stored thing by its id, with its kind."""
    if isinstance(value, dict):
        if isinstance(value.get("name"), str):
            for kind in KINDS:
                if str(value.get("id", "")).startswith(kind.prefix):
                    yield kind, value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _named_things(item)


def _reference(name: str) -> Reference:
    reference = Reference.parse(name)
    if reference is None:
        raise ValueError(f"{plain(name)!r} is no name, `joy` or `joy@2`: {NAME_RULE}")
    return reference


def _read_json(path: Path) -> Any:
    with _translated_file_errors(path):
        content = path.read_bytes()
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def _saelens_files(folder: Path) -> dict[str, Path]:
    """Return the files of a dictionary's folder by the field of the form; labels only if they exist."""
    files = {"weights": folder / _WEIGHTS, "cfg": folder / _CFG}
    return {**files, "labels": folder / _LABELS} if (folder / _LABELS).exists() else files


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file; removed again if it is not completed. Raises ValueError if it exists."""
    with _translated_file_errors(path):
        file = path.open("xb")
    try:
        with _translated_file_errors(path), file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _translated_file_errors(path: Path) -> Iterator[None]:
    """Raise ValueError in place of the block's OSError, unless it concerns the connection."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ConnectionError):  # also the server's
            raise
        reason = f"cannot be read or written: {error.strerror or error}"
        if isinstance(error, FileExistsError):
            reason = "exists; choose another path with -o"
        raise ValueError(f"{path} {reason}") from error


def _layers_text(layers: list[int]) -> str:
    """Return layers as a range, such as ``4:8``, if they follow each other, or else as a list."""
    if len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}:{layers[-1] + 1}"
    return ", ".join(map(str, layers))
