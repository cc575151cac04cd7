"""OpenAPI links: which ids in a response are parameters of which other routes.

A link without a route or a response raises KeyError when the document is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Links = Mapping[str, Mapping[str, str]]
"""Parameters by target route (``METHOD /path``); each is a runtime expression on the response."""

_JOB: Final = {"job_id": "$response.body#/id"}
_JOBS: Final[Links] = {
    "GET /v1/jobs/{job_id}": _JOB,
    "GET /v1/jobs/{job_id}/events": _JOB,
    "GET /v1/jobs/{job_id}/result": _JOB,
    "POST /v1/jobs/{job_id}/cancel": _JOB,
    "POST /v1/jobs/{job_id}/rerun": _JOB,
    "DELETE /v1/jobs/{job_id}": _JOB,
}
_KEY: Final = {"key_id": "$response.body#/id"}
_TENANT: Final = {"tenant": "$response.body#/tenant"}
_KEYS: Final[Links] = {
    "POST /v1/admin/keys/{key_id}/rotate": _KEY,
    "DELETE /v1/admin/keys/{key_id}": _KEY,
    "GET /v1/admin/keys": _TENANT,
    "PUT /v1/admin/tenants/{tenant}/limits": _TENANT,
}
_VECTOR: Final = {"vector_id": "$response.body#/id"}
_VECTORS: Final[Links] = {
    "GET /v1/vectors/{vector_id}": _VECTOR,
    "GET /v1/vectors/{vector_id}/content": _VECTOR,
    "DELETE /v1/vectors/{vector_id}": _VECTOR,
    "GET /v1/vectors": {"name": "$response.body#/name", "after": "$response.body#/id"},
}
_DETECTOR: Final = {"detector_id": "$response.body#/id"}
_DETECTORS: Final[Links] = {
    "GET /v1/detectors/{detector_id}": _DETECTOR,
    "GET /v1/detectors/{detector_id}/content": _DETECTOR,
    "DELETE /v1/detectors/{detector_id}": _DETECTOR,
    "GET /v1/detectors": {"name": "$response.body#/name", "after": "$response.body#/id"},
}
_DICTIONARY: Final = {"dictionary_id": "$response.body#/id"}
_DICTIONARIES: Final[Links] = {
    "GET /v1/dictionaries/{dictionary_id}": _DICTIONARY,
    "GET /v1/dictionaries/{dictionary_id}/content": _DICTIONARY,
    "GET /v1/dictionaries/{dictionary_id}/config": _DICTIONARY,
    "GET /v1/dictionaries/{dictionary_id}/features": _DICTIONARY,
    "PUT /v1/dictionaries/{dictionary_id}/labels": _DICTIONARY,
    "DELETE /v1/dictionaries/{dictionary_id}": _DICTIONARY,
    "GET /v1/dictionaries": {"name": "$response.body#/name", "after": "$response.body#/id"},
}
_PRESET: Final = {"preset": "$response.body#/name"}
_PRESETS: Final[Links] = {
    "GET /v1/presets/{preset}": _PRESET,
    "DELETE /v1/presets/{preset}": _PRESET,
    "GET /v1/presets": {"name": "$response.body#/name", "after": "$response.body#/id"},
}
LINKS: Final[Mapping[tuple[str, int], Links]] = {
    ("POST /v1/jobs", 200): _JOBS,
    ("POST /v1/jobs", 202): _JOBS,
    ("POST /v1/jobs/{job_id}/cancel", 200): _JOBS,
    ("POST /v1/jobs/{job_id}/rerun", 202): _JOBS,
    ("GET /v1/jobs", 200): {"GET /v1/jobs": {"after": "$response.body#/last_id"}},
    ("POST /v1/vectors", 201): _VECTORS,
    ("POST /v1/vectors/train", 201): _VECTORS,
    ("GET /v1/vectors", 200): {"GET /v1/vectors": {"after": "$response.body#/last_id"}},
    ("POST /v1/detectors", 201): _DETECTORS,
    ("POST /v1/detectors/train", 201): _DETECTORS,
    ("GET /v1/detectors", 200): {"GET /v1/detectors": {"after": "$response.body#/last_id"}},
    ("POST /v1/dictionaries", 201): _DICTIONARIES,
    ("GET /v1/dictionaries", 200): {"GET /v1/dictionaries": {"after": "$response.body#/last_id"}},
    ("POST /v1/presets", 201): _PRESETS,
    ("PUT /v1/presets", 200): _PRESETS,
    ("PUT /v1/presets", 201): _PRESETS,
    ("GET /v1/presets", 200): {"GET /v1/presets": {"after": "$response.body#/last_id"}},
    ("POST /v1/admin/keys", 201): _KEYS,
    ("POST /v1/admin/keys/{key_id}/rotate", 201): _KEYS,
}
"""The links of each response, by source route and status."""


def add_links(paths: dict[str, dict[str, dict[str, Any]]]) -> None:
    for (source, status), links in LINKS.items():
        responses = _operation(paths, source)["responses"]
        for target, parameters in links.items():
            name = _operation(paths, target)["operationId"]
            found = responses[str(status)].setdefault("links", {})
            found[name] = {"operationId": name, "parameters": dict(parameters)}


def _operation(paths: dict[str, dict[str, dict[str, Any]]], route: str) -> dict[str, Any]:
    method, path = route.split(" ", 1)
    return paths[path][method.lower()]


__all__ = ["LINKS", "Links", "add_links"]
