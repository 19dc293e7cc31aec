"""The documentation as a site, where `make docs` has built it: it asks no other host for anything."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from tests.browser import NAMES, browser, find_chromium
from tests.pages import PAGES, ROOT

SITE = ROOT / "site"
CHROMIUM = find_chromium()
BUILT = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site has not been built: make docs")
LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?([^\"' >]+)|<link[^>]*\shref=[\"']?([^\"' >]+)")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
DRAWINGS = "[...document.querySelectorAll('article img')].every((one) => one.complete && one.naturalWidth > 0)"


def test_a_warning_of_the_build_fails_it():
    (build,) = re.findall(r"^\t.*mkdocs build(.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert build.split() == ["--strict"], "with --quiet mkdocs counts no warning"


@BUILT
def test_every_page_is_in_the_site():
    for page in PAGES:
        if (ROOT / "docs") in page.parents:
            assert (SITE / page.relative_to(ROOT / "docs")).with_suffix(".html").exists(), page


@BUILT
def test_no_page_and_no_style_loads_anything_from_another_host():
    for page in SITE.rglob("*.html"):
        loaded = [first or second for first, second in LOADED.findall(page.read_text(encoding="utf-8"))]
        assert loaded
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == [], page
    for style in SITE.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\([\"']?(https?:)?//", text), style


def upright_texts(element: ElementTree.Element, origin: float = 0.0) -> Iterator[tuple[ElementTree.Element, float]]:
    """The texts that are not turned, and where their x counts from."""
    transform = element.get("transform", "")
    if "rotate" in transform:
        return
    if moved := re.match(r"translate\(([-\d.]+)", transform):
        origin += float(moved[1])
    if element.tag.endswith("}text"):
        yield element, origin
    for child in element:
        yield from upright_texts(child, origin)


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_has_a_white_ground_a_title_and_text_that_can_be_read_and_stays_inside(drawing):
    root = ElementTree.parse(drawing).getroot()
    space = "{http://www.w3.org/2000/svg}"
    width = float(root.attrib["viewBox"].split()[2])
    assert root.find(f"{space}title") is not None
    ground = root.find(f"{space}rect")
    assert ground is not None
    assert ground.attrib["fill"] == "white"
    for text, origin in upright_texts(root):
        # Half of the font's size is about the mean width of a letter.
        length = 0.52 * float(text.attrib["font-size"]) * len(text.text or "")
        before = {"middle": length / 2, "end": length}.get(text.get("text-anchor", ""), 0.0)
        left = origin + float(text.attrib["x"]) - before
        assert width > 480 or float(text.attrib["font-size"]) >= 13, text.text  # a wider one is scrolled on a phone
        assert left >= 0, text.text
        assert left + length <= width + 2, text.text


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(QuietHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Says nothing of each request."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@BUILT
@pytest.mark.engine
@pytest.mark.skipif(CHROMIUM is None, reason=f"no browser is installed: none of {', '.join(NAMES)} is on PATH")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_show_on_a_desktop_and_on_a_phone_and_ask_no_other_host(tab, address, width, dark):
    for page in ("index", "concepts", "staleness", "your-own-task", "coming-from", "reference/configuration"):
        tab.problems.clear()
        tab.requests.clear()
        tab.open(f"{address}/{page}.html", width=width, dark=dark, mobile=width == 390)
        assert tab.evaluate(OVERFLOW) == 0, page
        assert tab.evaluate(DRAWINGS), page
        assert tab.problems == [], page
        assert not [one for one in tab.requests if one.startswith("http") and not one.startswith(address)], page
