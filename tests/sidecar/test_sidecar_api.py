"""The interface as such: its document, versions, pages."""

from pathlib import Path

import httpx
from fastapi.testclient import TestClient

from tests.support.bench_fakes import serving
from tests.support.rings import SyntheticRun
from ultraep_serve.sidecar.access import server_settings
from ultraep_serve.sidecar.app import create_app


def test_every_figure_is_explained(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "max/mean of assignments over ranks" in document["info"]["description"]
    obvious = {"layer", "ranks", "schema_version"}
    for name in ("ImbalanceSnapshot", "Savings", "LayerPlan", "Heatmap", "History", "Replica"):
        for field, described in schemas[name]["properties"].items():
            assert field in obvious or "description" in described, (name, field)
    for name, schema in schemas.items():
        assert schema.get("description") or "Error" in name, name


def test_answers_that_stand_alone_have_a_schema_version(
    planned_run: SyntheticRun, client: TestClient
) -> None:
    planned_run.batch()
    for path in (
        *("/readyz", "/v1/config", "/v1/balance", "/v1/balance/heatmap", "/v1/balance/history"),
        *("/v1/balance/batches", "/v1/balance/layers/0"),
    ):
        assert client.get(path).json()["schema_version"] == 3


def test_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    settings = server_settings(create_app(tmp_path, None))
    with serving(**settings) as url, httpx.Client(base_url=url) as client:
        for path in ("/", "/v1/config", "/static/page.js", "/nowhere", "/readyz"):
            headers = client.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "http" not in client.get("/").text.replace("http-equiv", "")
        assert client.get("/static/../app.py").status_code == 404
        assert client.get("/static/%2e%2e/app.py").status_code == 404
