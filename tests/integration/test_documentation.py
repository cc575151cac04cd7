"""The server's description of its API."""

from __future__ import annotations

import json

from tests.integration.conftest import Serve


async def test_models_and_capabilities(serve: Serve):
    async with serve() as server:
        models = (await server.client.get("/v1/models")).json()
        assert models["data"][0]["id"] == "fake-model"
        capabilities = (await server.client.get("/v1/capabilities")).json()
        assert capabilities["model"] == "fake-model"
        assert {"steer", "logit_lens"} <= set(capabilities["operations"])
        assert capabilities["points"][0]["width"] == 8


async def test_the_schema_documents_the_interventions_of_both_routes(serve: Serve):
    async with serve() as server:
        assert (await server.client.get("/docs")).status_code == 200
        schema = (await server.client.get("/openapi.json")).json()
        schemas = schema["components"]["schemas"]
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            model = schemas[body["$ref"].rsplit("/", 1)[1]]
            assert "interventions" in model["properties"]
        assert "Steer" in schemas


async def test_every_reference_of_the_schema_leads_somewhere(serve: Serve):
    async with serve() as server:
        text = (await server.client.get("/openapi.json")).text
        schemas = json.loads(text)["components"]["schemas"]
        references = [part.split('"')[0] for part in text.split('"$ref":"')[1:]]
        assert references
        for reference in references:
            assert reference.removeprefix("#/components/schemas/") in schemas
