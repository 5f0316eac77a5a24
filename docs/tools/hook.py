"""What mkdocs does beyond its own for the site: files from outside of docs/, and drawings in the page's colors.

Pages link to files of the repository as GitHub needs it (`../README.md`). Markdown and images that they link to, and
those that these link to in turn, become part of the site under `repository/`; every link is led to where its file then
is. A figure's SVG goes into the page itself, so that its colors follow the reader's choice of light and dark.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from html import escape, unescape
from pathlib import Path
from textwrap import indent

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import bmburst
from docs.tools import foreign
from docs.tools.settings import MARK, tables

ROOT = Path(__file__).parents[2]
DOCS, ELSEWHERE = "docs/", "repository/"

_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_LINK = re.compile(r"(?P<before>\]\(\s*)(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?P<after>\s*\))")
_FIGURE = re.compile(r"!\[(?P<says>[^\]]*)\]\((?P<path>figures/[\w-]+\.svg)\)")
_FIGURES = re.compile(r"^(?:!\[[^\]]*\]\(figures/[\w-]+\.svg\)\n)+", re.M)
_RECORD = re.compile(r"^<!-- tables of (?P<path>\S+) -->$", re.M)
_HEADING = re.compile(r"^#+ (.+)$", re.M)
_CELL = re.compile(r"<(?P<kind>t[dh])>(?P<inside>.*?)</(?P=kind)>", re.S)
_CODE, _TAG = re.compile(r"(?<!<pre>)<code>(.*?)</code>", re.S), re.compile(r"(<[^>]+>)")
_HYPHENED = re.compile(r"[\w.@+:/]*(?:-+[\w.@+:/*]+)+")
_LONG = 40  # letters
_STYLE = re.compile(r"<style>.*?</style>\n?", re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the version of the repository beside its name, which every page has in its header."""
    config.site_name = f"{config.site_name} {bmburst.__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside of docs/."""
    waiting = [DOCS + file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        for target in _linked(waiting.pop()):
            if target in seen or target.startswith(DOCS) or not (ROOT / target).is_file():
                continue
            seen.add(target)
            source = str(ROOT / target)
            file = File.generated(config, ELSEWHERE + target, abs_src_path=source, inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(file)
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where files are in the site, and put figures, settings and records into the page."""
    del config
    here = _in_repository(page.file.src_uri)

    def led(found: re.Match[str]) -> str:
        target = _target(here, found["path"])
        uri = target.removeprefix(DOCS) if target.startswith(DOCS) else ELSEWHERE + target
        if files.get_file_from_path(uri) is None:
            return found[0]
        path = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{found['before']}{path}{found['anchor'] or ''}{found['after']}"

    if MARK in markdown:
        markdown = markdown.replace(MARK, tables())
    if foreign.FOREIGN in markdown:
        markdown = markdown.replace(foreign.FOREIGN, foreign.tables())
    markdown = _RECORD.sub(lambda found: _record(_target(here, found["path"]), here), markdown)
    drawn = _outside_of_code(markdown, lambda text: _FIGURES.sub(_figures, text))
    return _outside_of_code(drawn, lambda text: _LINK.sub(led, text))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark what may have several lines, long code and long cells of tables, and keep words of cells in one piece."""
    del page, config, files
    html = _CODE.sub(lambda found: f'<code class="long">{found[1]}</code>' if _is_long(found[1]) else found[0], html)
    return _CELL.sub(_cell, html)


def _cell(found: re.Match[str]) -> str:
    """Return a cell whose words are not broken at their hyphens, as browsers would."""
    kind, inside = found["kind"], found["inside"]
    marked = ' class="long"' if _is_long(inside) and re.search(r"\S\s+\S", _TAG.sub("", inside)) else ""
    pieces = _TAG.split(inside)
    whole = "".join(
        piece if i % 2 else _HYPHENED.sub(r'<span class="whole">\g<0></span>', piece) for i, piece in enumerate(pieces)
    )
    return f"<{kind}{marked}>{whole}</{kind}>"


def _is_long(html: str) -> bool:
    return len(unescape(_TAG.sub("", html))) > _LONG


def _in_repository(uri: str) -> str:
    return uri.removeprefix(ELSEWHERE) if uri.startswith(ELSEWHERE) else DOCS + uri


def _target(here: str, path: str) -> str:
    """Return the path in the repository of what a file links to; it may be outside of it."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), path))


def _linked(here: str) -> Iterator[str]:
    """Yield the paths that a Markdown file of the repository links to."""
    text = _FENCE.sub("", (ROOT / here).read_text())
    yield from (_target(here, found["path"]) for found in _LINK.finditer(text))


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """Change what is not in fenced blocks."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _record(path: str, here: str) -> str:
    """Return a record of measurements as a part of the page `here` that opens where it is asked for."""

    def from_here(found: re.Match[str]) -> str:
        target = posixpath.relpath(_target(path, found["path"]), posixpath.dirname(here))
        return f"{found['before']}{target}{found['anchor'] or ''}{found['after']}"

    text = _HEADING.sub(r"**\1**", _LINK.sub(from_here, (ROOT / path).read_text())).strip()
    return f'??? info "All tables of this record"\n\n{indent(text, "    ")}\n'


def _figures(found: re.Match[str]) -> str:
    """Return figures that follow each other in a box, which has them beside each other where there is room."""
    drawn = "\n".join(_figure(each) for each in _FIGURE.finditer(found[0]))
    return f'<div class="panels">\n{drawn}\n</div>\n'


def _figure(found: re.Match[str]) -> str:
    """Return a figure's drawing without its own colors, which docs/assets/site.css gives it."""
    drawing = _STYLE.sub("", (ROOT / DOCS / found["path"]).read_text()).strip()
    says = " ".join(found["says"].split())
    return f'<figure class="drawn">\n{drawing}\n<figcaption>{escape(says)}</figcaption>\n</figure>'
