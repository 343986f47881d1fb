"""The files of the page: how they are sent, and what they may contain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from yarl import URL

from coordinator.http import ui_files
from tests.leaked_keys import new_key
from tests.unit.coordinator.fake_cluster import FakeCluster, open_cluster

FOLDER = Path(ui_files.__file__).parent / "ui"
FILES = sorted(FOLDER.iterdir())


async def test_the_page_and_its_files_are_sent_with_their_types(cluster: FakeCluster) -> None:
    for address, kind in (
        ("/ui", "text/html"),
        ("/ui/", "text/html"),
        ("/ui/main.js", "text/javascript"),
        ("/ui/base.css", "text/css"),
        ("/ui/icon.svg", "image/svg+xml"),
    ):
        async with cluster.client.get(cluster.url + address) as response:
            assert (response.status, response.content_type, response.charset) == (200, kind, "utf-8")
            assert response.headers["Content-Security-Policy"] == ui_files.POLICY
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert await response.read()


@pytest.mark.parametrize("address", ["/ui", "/ui/"])
async def test_addresses_in_the_page_lead_to_its_files(cluster: FakeCluster, address: str) -> None:
    async with cluster.client.get(cluster.url + address) as response:
        page, base = await response.text(), response.url
    named = re.findall(r'(?:href|src)="([^"#]+)"', page)
    assert len(named) >= 7
    for name in named:
        assert not name.startswith("/"), f"{name} leads out of the path at which a proxy serves the page"
        async with cluster.client.get(base.join(URL(name))) as response:
            assert response.status == 200, name


async def test_a_file_that_the_browser_has_is_not_sent_again(cluster: FakeCluster) -> None:
    async with cluster.client.get(f"{cluster.url}/ui/main.js") as response:
        etag = response.headers["ETag"]
    for known in (etag, f'"other", {etag}', f"W/{etag}"):
        async with cluster.client.get(f"{cluster.url}/ui/main.js", headers={"If-None-Match": known}) as response:
            assert (response.status, await response.read(), response.headers["ETag"]) == (304, b"", etag)
    async with cluster.client.get(f"{cluster.url}/ui/main.js", headers={"If-None-Match": '"other"'}) as response:
        assert response.status == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2fopenapi.json", "%2e%2e", ".", "main.js%00"])
async def test_other_names_are_refused(cluster: FakeCluster, name: str) -> None:
    async with cluster.client.get(URL(f"{cluster.url}/ui/{name}", encoded=True)) as response:
        assert response.status == 404, await response.text()


async def test_the_page_needs_no_key_and_shows_no_data(model: Path) -> None:
    async with open_cluster(model, "colocated", api_key=new_key(), served_model_name="secret-name") as cluster:
        for address in ("/ui", "/ui/", "/ui/main.js"):
            async with cluster.client.get(cluster.url + address) as response:
                assert response.status == 200 and "secret-name" not in await response.text()
        async with cluster.client.get(f"{cluster.url}/admin/workers") as response:
            assert response.status == 401


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_fit_the_policy(path: Path) -> None:
    """Every file is sent, loads nothing from elsewhere, makes no markup of strings, and imports what there is."""
    assert path.suffix in ui_files._TYPES, "a file of a kind that is not sent"
    text = path.read_text()
    foreign = [each for each in re.findall(r"https?://[^\s\"')`]+", text) if each != "http://www.w3.org/2000/svg"]
    assert not foreign
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\bstyle=", text)
    if path.suffix == ".js":
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (FOLDER / name).is_file(), name
