"""The documentation site builds strictly and without the network, and its figures are what the schedules give."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from bmburst.config import leaves
from bmburst.schedule.documents import Documents
from bmburst.schedule.layout import make_layout
from bmburst.schedule.mask import Causal
from bmburst.train.config import TrainConfig
from docs.tools import journeys, scores
from docs.tools.figures import FIGURES, FOLDER
from docs.tools.hook import on_page_markdown
from tests.docs.blocks import PATHS, read_blocks
from tests.mask_oracle import visible

ROOT = Path(__file__).parents[2]
# mkdocs as `make docs` calls it, where nothing can be connected to.
BUILD = """
import runpy, socket, sys
def refuse(*_): raise OSError("the site must build without the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
sys.argv = ["mkdocs", "build", "--strict", "--site-dir", sys.argv[1]]
runpy.run_module("mkdocs", run_name="__main__")
"""
_FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page of the site fetches, and how many figures are drawn in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.drawings = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        where = given.get(_FETCHED.get(tag, ""))
        if where and given.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(where)
        self.drawings += tag == "svg" and given.get("class") == "drawing"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-c", BUILD, str(folder)]
    ours = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=ours, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.long
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        for where in Page(path).fetched:
            assert not re.match(r"\w+:|//", where), f"{path.name} fetches {where}"
            if path.name != "404.html":  # its links are from the root of a server
                assert (path.parent / where.partition("#")[0].partition("?")[0]).is_file(), f"{path.name}: {where}"
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(\W*(?:https?:|//)", path.read_text()), path


@pytest.mark.long
def test_every_figure_is_in_a_page(site: Path) -> None:
    drawn = [Page(site / f"{name}.html").drawings for name in ("how_it_works", "memory", "shared_prefixes")]
    assert drawn == [len(FIGURES) - 4, 2, 2]


@pytest.mark.long
def test_records_and_the_readme_are_pages(site: Path) -> None:
    performance = (site / "performance.html").read_text()
    for record in ("attention_2xh200_202611", "attention_4xh200_202611", "train_4xh200_202611"):
        assert f'href="repository/benchmarks/results/{record}.html"' in performance
        assert (site / f"repository/benchmarks/results/{record}.html").is_file()
        rows = re.findall(r"^\| (ours[\w-]*) \|", (ROOT / f"benchmarks/results/{record}.md").read_text(), re.M)
        assert rows and all(re.search(rf"<td>(<span[^>]+>)?{row}<", performance) for row in rows)
    assert 'href="../how_it_works.html' in (site / "repository/index.html").read_text()


@pytest.mark.long
def test_every_setting_is_in_the_table(site: Path) -> None:
    page = (site / "settings.html").read_text().replace(' class="long"', "")
    names = [leaf.name for leaf in leaves(TrainConfig)]
    assert len(names) > 40
    assert [name for name in names if f"<td><code>{name}</code></td>" not in page] == []
    assert "runs/&lt;date-time&gt;" in re.sub("</?span[^>]*>", "", page)


@pytest.mark.long
def test_public_names_are_in_the_reference(site: Path) -> None:
    import bmburst

    reference = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    assert [name for name in bmburst.__all__ if f'id="bmburst.{name}"' not in reference] == []


def _navigation() -> list[dict[str, object]]:
    text = re.sub(
        r"^(theme|plugins|markdown_extensions):\n(?:[ #].*\n|\n)*", "", (ROOT / "mkdocs.yml").read_text(), flags=re.M
    )
    found: list[dict[str, object]] = yaml.safe_load(text)["nav"]
    return found


def test_navigation_has_every_page() -> None:
    named = set(re.findall(r"[\w/]+\.md", str(_navigation())))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert there - named == set(), "add them to nav in mkdocs.yml"


@pytest.mark.long
def test_what_is_looked_for_most_is_one_click_from_home(site: Path) -> None:
    alone = [page for entry in _navigation() for page in entry.values() if isinstance(page, str)]
    assert {"install.md", "recipes.md"} <= set(alone)
    home = (site / "index.html").read_text()
    article = home[home.index("<article") : home.index("</article>")]
    for page in ("install", "recipes", "plan", "hugging_face", "training"):
        assert f'href="{page}.html"' in article, page


@pytest.mark.long
def test_the_version_is_in_every_header(site: Path) -> None:
    import bmburst

    for name in ("index.html", "plan.html", "api/attention.html", "404.html"):
        page = (site / name).read_text()
        header = page[page.index("<header") : page.index("</header>")]
        assert f"bmburst {bmburst.__version__}" in header, name


@pytest.mark.long
def test_a_missing_page_has_its_own_style_and_leads_on(site: Path) -> None:
    """A server shows it at any depth, so it may fetch nothing, and its links are from the root."""
    page = (site / "404.html").read_text()
    assert Page(site / "404.html").fetched == []
    assert "<style>" in page and "prefers-color-scheme: dark" in page
    links = re.findall(r'<a href="([^"]+)"', page)
    assert len(links) > 5
    assert [link for link in links if not (link.startswith("/") and (site / link[1:]).is_file())] == []


@pytest.mark.parametrize("name", PATHS)
def test_code_fits_the_column(name: str) -> None:
    """In a window of 1290 pixels a block has room for 128 letters; longer lines of text are wrapped, code is cut."""
    cut = [
        line
        for block in read_blocks(name)
        if block.language not in ("text", "output")
        for line in block.text.splitlines()
        if len(line) > 129
    ]
    assert cut == [], "put what is behind the code above it, or continue with a backslash"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_the_schedules_give(name: str) -> None:
    drawn = FIGURES[name]().svg()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "python -m docs.tools.figures draws them again"
    assert drawn.isascii()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("mask", [Causal(), scores.PACKED, Documents((1, 63)), scores.ANSWERS], ids=str)
def test_tiles_are_drawn_where_the_mask_is_visible_and_once(layout: str, mask) -> None:
    made = make_layout(layout, scores.RANKS, scores.TOKENS // scores.RANKS, mask, scores.TOKENS)
    steps = [scores.computed(made, mask, step) for step in range(_stops(made, mask))]
    times = sum((step != scores.NOBODY).astype(int) for step in steps)
    assert np.array_equal(times, np.asarray(visible(mask, scores.TOKENS)).astype(int))
    rows = scores.owners(made)
    for step in steps:
        held = np.broadcast_to(rows[:, None], step.shape)
        assert np.array_equal(step[step != scores.NOBODY], held[step != scores.NOBODY])


def _stops(layout, mask) -> int:
    from bmburst.schedule.ring_schedule import make_schedule

    return len(make_schedule(layout, scores.TOKENS, mask, 0, "kv").steps)


def test_the_timeline_keeps_order() -> None:
    plan = journeys.heads_plan()
    times = journeys.heads_times(plan)
    assert len(times) == len(plan.units) > 1
    for at in times:
        assert at.arrives[1] <= at.attends[0] and at.attends[1] <= at.returns[0]
    for lane in range(3):
        assert all(before[lane][1] <= after[lane][0] for before, after in pairwise(times))


def test_links_lead_to_where_files_are_in_the_site() -> None:
    curve = "benchmarks/results/train_2xh200_202611-curve.png"

    class Files:
        def get_file_from_path(self, uri: str) -> str | None:
            return uri if uri in ("mesh.md", "repository/README.md", f"repository/{curve}") else None

    class Here:
        def __init__(self, uri: str) -> None:
            self.file = type("File", (), {"src_uri": uri})

    def led(text: str, uri: str) -> str:
        return on_page_markdown(text, Here(uri), None, Files())

    assert led("[a](../README.md#masks)", "plan.md") == "[a](repository/README.md#masks)"
    assert led("[a](../../README.md)", "api/masks.md") == "[a](../repository/README.md)"
    assert led("[a](docs/mesh.md)", "repository/README.md") == "[a](../mesh.md)"
    assert led("[a](gone.md) [b](https://c.d/e.md)", "plan.md") == "[a](gone.md) [b](https://c.d/e.md)"
    assert led("```text\n[a](../README.md)\n```\n", "plan.md") == "```text\n[a](../README.md)\n```\n"
    record = led("<!-- tables of ../benchmarks/results/train_2xh200_202611.md -->", "performance.md")
    assert f"](repository/{curve})" in record  # the record's own link is to its neighbour


@pytest.mark.long
def test_search_needs_no_server(site: Path) -> None:
    """Opened from a folder, a page may neither read the index as data nor start a worker: both are scripts then."""
    assert (site / "search/search_index.js").read_text().startswith("var __index = {")
    for name, up in (("index.html", ""), ("api/attention.html", "../")):
        assert f"{up}assets/iframe-worker.js" in Page(site / name).fetched
