"""Documentation is part of the product: complete, fresh, and without dead ends."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from support.server import ServerProcess
from tailrace.common.server_metrics import SERVER_METRICS as METRICS
from tailrace.protocol.http_headers import REQUEST_HEADERS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")
# Headers every HTTP client knows; the page explains the ones of this protocol.
_COMMON_HEADERS = {
    "Authorization",
    "If-Match",
    "If-None-Match",
    "Idempotency-Key",
    "Cache-Control",
    "Last-Event-ID",
}


def test_generated_pages_are_fresh() -> None:
    pages = [sys.executable, str(ROOT / "scripts" / "pages.py"), "--check"]
    done = subprocess.run(pages, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in (ROOT / "README.md", *DOCS.rglob("*.md"))
        for target in _LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_every_page_can_be_found() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [
        page.name for page in DOCS.glob("*.md") if page.name != "README.md" and page.name not in index
    ] == []


def test_every_request_header_is_explained() -> None:
    page = (DOCS / "http.md").read_text(encoding="utf-8")
    expected = set(REQUEST_HEADERS) - _COMMON_HEADERS
    assert [header for header in sorted(expected) if header not in page] == []


def test_metrics_page_and_metrics_route_agree(server: ServerProcess) -> None:
    with urllib.request.urlopen(f"{server.base_url}/metrics") as answer:
        text = answer.read().decode()
    exposed = {
        name for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE) if name.startswith("tailrace_")
    }
    page = (DOCS / "metrics.md").read_text(encoding="utf-8").partition("## Edge")[0]
    documented = set(re.findall(r"^\| `(tailrace_\w+)`", page, re.MULTILINE))
    assert documented == exposed == {metric.exposed for metric in METRICS.values()}


@pytest.mark.parametrize("page", sorted((DOCS / "decisions").glob("*.md")), ids=lambda page: page.stem)
def test_decisions_have_one_form(page: Path) -> None:
    number, _, _ = page.stem.partition("-")
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {int(number)}. ")
    parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [part for part in parts if part != "Numbers"] == ["Context", "Choice", "Consequences"]
    assert re.search(r"\d", text.replace(f"# {int(number)}. ", "")), (
        "a decision states the numbers it rests on"
    )
