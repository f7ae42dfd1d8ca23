"""The site is built without a warning, and works as files: its pages, questions and figures in a browser."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Page

import stretto
from published_files import FOLDER
from stretto.cli import main
from stretto.view.page import FRONT

pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
AXE = FOLDER / "axe" / "axe.min.js"
PYODIDE = FOLDER / "pyodide"
LESSONS = sorted(path.stem for path in (DOCS / "learn").glob("*.md"))


def build(sources: Path, out: Path, builder: str = "html", **settings: Any) -> str:
    """Build a site in this process, which has imported what its pages are made of; return the warnings."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    warnings, doctrees = io.StringIO(), out.with_name(f"{out.name}-doctrees")
    with patch_docutils(str(DOCS)), docutils_namespace():
        options: Any = {"confoverrides": settings, "status": None, "warning": warnings}
        site = Sphinx(sources, DOCS, out, doctrees, builder, **options)
        site.build()
    assert site.statuscode == 0
    return warnings.getvalue()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def served(folder: Path) -> Iterator[str]:
    """Serve a folder below a path of its own, as a static host may."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder.parent)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/{folder.name}/"
    server.shutdown()
    thread.join()


# ---------------------------------------------------------------- all pages


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages in a theme that takes half the time; others have their own, and slow tests the whole site."""
    folder = tmp_path_factory.mktemp("english") / "site"
    assert not build(DOCS, folder, live_page=True, html_theme="basic", html_theme_options={})
    return folder


@pytest.mark.timeout(600)
def test_the_english_site_has_what_is_made_of_code(english: Path) -> None:
    interface = (english / "reference" / "api.html").read_text(encoding="utf-8")
    names = {f"stretto.{name}" for name in stretto.__all__} - {"stretto.__version__", "stretto.prove"}
    names |= {f"stretto.prove.{name}" for name in stretto.prove.__all__}
    assert not [name for name in names if f'id="{name}"' not in interface]
    assert "--microbatches" in (english / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert "(_sources/do/training.md.txt)" in (english / "llms.txt").read_text(encoding="utf-8")


def test_links_of_the_site_lead_somewhere_and_nothing_is_loaded_from_another_host(english: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in english.rglob("*.html")}
    ids = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    wrong, checked = list[str](), 0
    for path, text in pages.items():
        for kind, address in re.findall(r'\b(href|src)="([^"]*)"', text):
            parts = urlsplit(unescape(address))
            where = f"{path.relative_to(english)}: {address}"
            if parts.scheme or parts.netloc:
                is_link = kind == "href" and parts.scheme in ("http", "https", "mailto") and parts.hostname
                wrong += [] if is_link or parts.scheme == "data" else [where]
                continue
            if parts.path.startswith("/"):
                wrong.append(where)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if {english / "zh", english / "page"} & {*target.parents}:
                continue  # the other language has the same pages; the interactive page is another test's
            checked += 1
            if not target.is_file() or (parts.fragment and parts.fragment not in ids.get(target, {""})):
                wrong += [] if parts.fragment.startswith("svg-") else [where]
    assert checked > 2000
    assert not wrong, "\n".join(wrong[:20])


def word_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def test_pages_are_short() -> None:
    """Below 1,500 words each and 45,000 together, but for reference and evidence."""
    pages = [*DOCS.glob("*.md"), *(DOCS / "learn").glob("*.md"), *(DOCS / "do").glob("*.md")]
    pages += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    assert not {str(path.relative_to(ROOT)): word_count(path) for path in pages if word_count(path) >= 1500}
    assert sum(map(word_count, pages)) < 45_000


JOB = re.search(r"jobDefaults = \{(.*?)\};", (FRONT / "job.js").read_text(encoding="utf-8"), re.DOTALL)
STATES = {
    view: (FRONT / f"{view}.js").read_text(encoding="utf-8")
    for view in ("schedules", "layout", "memory", "plan", "tables")
}


def test_the_state_of_every_live_figure_is_of_its_view() -> None:
    """A name that the view does not know would be passed over without a word."""
    figures = 0
    for path in DOCS.rglob("*.md"):
        for view, query in re.findall(
            r"^```\{live\} (\w+)\??(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            figures += 1
            defaults = re.search(r"^  defaults: \{(.*?)\},\n", STATES[view], re.DOTALL | re.MULTILINE)
            assert defaults is not None, view
            assert JOB is not None
            names = set(re.findall(r"(\w+):", defaults[1] + JOB[1] * ("...jobDefaults" in defaults[1])))
            given = {part.partition("=")[0] for part in query.split("&") if part}
            assert given <= names, f"{path.relative_to(ROOT)}: {view} has no {given - names}"
    assert figures > 0


# ---------------------------------------------------------------- Chinese

TRANSLATED = ("README", "index", "design", "learn", "do")  # pages and folders


def test_no_message_lacks_its_chinese(tmp_path: Path) -> None:
    from babel.messages.pofile import read_po

    build(DOCS, tmp_path / "messages", "gettext", exclude_patterns=["_*", "reference", "evidence"])
    missing, pages = list[str](), 0
    for template in (tmp_path / "messages").rglob("*.pot"):
        name = template.relative_to(tmp_path / "messages").with_suffix("")
        if name.parts[0] not in TRANSLATED:
            continue
        translation = DOCS / "locale" / "zh_CN" / "LC_MESSAGES" / name.with_suffix(".po")
        with translation.open(encoding="utf-8") as file:
            chinese = {str(message.id) for message in read_po(file) if message.string and not message.fuzzy}
        with template.open(encoding="utf-8") as file:
            messages = [str(message.id) for message in read_po(file) if message.id]
        missing += [f"{name}: {message}" for message in messages if message not in chinese]
        pages += 1
    assert pages > 30
    assert not missing, "run make messages, and translate these"


# ---------------------------------------------------------------- a site of one lesson, in a browser

LESSON = r"""# A lesson

The bubble of 1F1B is $\frac{p-1}{m+p-1}$.

```{predict}
:answer: 27.3
:tolerance: 0.2
:unit: %
How large is it?
+++
It is **3 of 11**.
```

```{predict}
:choices: gpipe | `1f1b` | zb-v
:answer: `1f1b`
Which holds fewest?
+++
The second.
```

```{predict}
:answer: 1024
:unit: bytes
How many bytes?
+++
A kibibyte.
```

```{predict}
:answer: 0.25
What share?
+++
A quarter.
```

```{live} schedules?programs=[{"name":"1f1b"}]&ranks=4&microbatches=8
:still: stretto schedule 1f1b --ranks 4 --microbatches 8 --svg
:alt: four ranks
:height: 480
```

```{live} layout?tp=2
:still: stretto layout --world 4 --tp 2
:alt: four ranks in groups of two
```
"""
MESSAGES = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "How large is it?"
msgstr "气泡率有多大？"

msgid "It is **3 of 11**."
msgstr "是 **3/11**。"

msgid "four ranks"
msgstr "四个 rank"
"""


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a site in both languages, and the page if Pyodide is there."""
    top = tmp_path_factory.mktemp("lesson")
    sources, folder = top / "sources", top / "site"
    (sources / "learn").mkdir(parents=True)
    (sources / "learn" / "lesson.md").write_text(LESSON, encoding="utf-8")
    index = "# Home\n\n```{toctree}\nlearn/lesson\n```\n"
    (sources / "index.md").write_text(index, encoding="utf-8")
    (sources / "locale" / "zh_CN" / "LC_MESSAGES" / "learn").mkdir(parents=True)
    (sources / "locale/zh_CN/LC_MESSAGES/learn/lesson.po").write_text(MESSAGES, encoding="utf-8")
    assert not build(sources, folder, live_page=True)
    assert not build(sources, folder / "zh", live_page=True, language="zh_CN")
    return folder


@pytest.fixture(scope="module")
def address(lesson: Path) -> Iterator[str]:
    yield from served(lesson)


def answer(page: Page, number: int, given: str) -> str:
    """Answer a question by keyboard; return what is said."""
    question = page.locator("div.predict").nth(number)
    field = question.locator("input[type=text]")
    if field.count():
        field.fill(given)
        field.press("Enter")
    else:
        question.get_by_label(given).focus()
        page.keyboard.press("Space")
        question.get_by_role("button").first.click()
    return question.get_by_role("status").text_content() or ""


def test_a_question_is_closed_until_it_is_answered(opened: Callable[..., Page], address: str) -> None:
    page = opened(f"{address}learn/lesson.html")
    explanation = page.get_by_text("It is 3 of 11.")
    assert not explanation.is_visible()
    assert answer(page, 0, "many") == "No number in this answer."
    assert not explanation.is_visible()
    assert answer(page, 0, "3/10").startswith("Not quite. The answer: 27.3 %")
    assert explanation.is_visible()
    page.locator("div.predict").first.get_by_role("button", name="Answer again").click()
    assert not explanation.is_visible()
    assert answer(page, 0, "27.4 %") == "Right: 27.3 %"
    assert answer(page, 1, "zb-v") == "Not quite. The answer: 1f1b"
    page.reload()  # answers are remembered, for both languages
    assert explanation.is_visible()
    page.locator("nav.language a").click()
    page.wait_for_url("**/zh/learn/lesson.html")
    assert page.get_by_text("是 3/11。").is_visible()
    assert page.locator("div.predict").nth(1).get_by_role("status").text_content() == "不对。答案是：1f1b"
    page.locator("nav.language a").click()
    page.wait_for_url(f"{address}learn/lesson.html")


# answers of 27.3 %, of 1,024 bytes and of 0.25, by number of the question
NUMBERS = {
    (0, "right"): ("27,3", "+27,30 %", "3/11", "27,3/1 %"),
    (0, "wrong"): ("273", "0.273"),
    (2, "right"): ("1,024", "1,024.0", "1 024", "1024,0", "2048/2"),
    (2, "wrong"): ("1,02", "10,24"),
    (3, "right"): ("1/4", ".5 / 2", "0,25", "0,250"),
    (3, "wrong"): ("1/5", "250"),
    (3, None): ("1 1/4", "1/", "/4"),
}


def test_numbers_may_have_a_decimal_comma_or_be_fractions(opened: Callable[..., Page], address: str) -> None:
    page = opened(f"{address}learn/lesson.html")
    for (number, verdict), texts in NUMBERS.items():
        for text in texts:
            answer(page, number, text)
            question = page.locator("div.predict").nth(number)
            assert question.get_attribute("data-verdict") == verdict, text
            if verdict:
                question.get_by_role("button", name="Answer again").click()


@pytest.mark.timeout(600)
def test_a_figure_runs_in_the_language_and_colours_of_the_site(
    opened: Callable[..., Page], address: str, lesson: Path
) -> None:
    if not (PYODIDE / "pyodide.asm.wasm").is_file():
        pytest.skip("make published fetches Pyodide")
    if not (lesson / "page").exists():
        assert main.run(["page", str(lesson / "page"), "--pyodide", str(PYODIDE)]) == 0
    page = opened(f"{address}zh/learn/lesson.html", color_scheme="dark")
    page.set_default_timeout(200_000)
    still = page.get_by_role("img", name="四个 rank")
    assert still.evaluate("(image) => image.naturalWidth") > 100
    page.get_by_role("button", name="动手试试").first.click()
    page.wait_for_selector("figure.live iframe:not(.starting)")
    frame = page.frame_locator("figure.live iframe")
    assert frame.locator("#ranks").input_value() == "4"
    assert frame.get_by_text("27.3%").first.is_visible()
    assert frame.locator("header").count() == 0
    assert frame.locator("html").get_attribute("data-theme") == "dark"
    assert not still.is_visible()
    page.get_by_role("button", name="动手试试").click()  # of the other figure: one runs at a time
    assert page.locator("iframe").count() == 1
    assert still.is_visible()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (400, "light"),
        (1280, "dark"),
        pytest.param(400, "dark", marks=pytest.mark.slow),
        pytest.param(1280, "light", marks=pytest.mark.slow),
    ],
)
def test_a_lesson_is_accessible_and_fits(
    opened: Callable[..., Page], address: str, width: int, scheme: str
) -> None:
    for language in ("", "zh/"):
        page = opened(f"{address}{language}learn/lesson.html", width=width, color_scheme=scheme)
        check_page(page)


def check_page(page: Page) -> None:
    """Nothing is wider than the window, and axe finds nothing."""
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    if not AXE.is_file():
        pytest.skip("make published fetches axe")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    violations = page.evaluate("axe.run().then((result) => result.violations)")
    assert not [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in violations], page.url


def test_without_scripts_the_answer_is_a_disclosure_and_figures_are_still(
    opened: Callable[..., Page], lesson: Path
) -> None:
    page = opened(lesson / "learn" / "lesson.html", java_script_enabled=False)
    explanation = page.get_by_text("It is 3 of 11.")
    assert not explanation.is_visible()
    page.locator("summary").first.click()
    assert explanation.is_visible()
    assert page.get_by_role("img", name="four ranks").first.is_visible()
    assert page.get_by_text("tp2 dp2: 4 ranks").is_visible()
    assert page.get_by_role("button", name="Try it").count() == 0


def test_search_finds_words_of_both_languages_from_a_file(opened: Callable[..., Page], lesson: Path) -> None:
    for folder, query in (("", "bubble"), ("zh", "气泡率"), ("zh", "bubble")):
        page = opened(f"{(lesson / folder / 'search.html').as_uri()}?q={query}")
        page.wait_for_selector("#search-results ul.search li")
    page = opened(f"{(lesson / 'zh' / 'search.html').as_uri()}?q=张量")
    page.wait_for_function(
        "document.querySelector('#search-results p.search-summary')?.textContent.length > 5"
    )
    assert page.locator("#search-results ul.search li").count() == 0


# ---------------------------------------------------------------- every lesson


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the whole site, with the page in it."""
    folder = tmp_path_factory.mktemp("both") / "site"
    assert not build(DOCS, folder, live_page=True)
    assert not build(DOCS, folder / "zh", live_page=True, language="zh_CN")
    if (PYODIDE / "pyodide.asm.wasm").is_file():
        assert main.run(["page", str(folder / "page"), "--pyodide", str(PYODIDE)]) == 0
    yield from served(folder)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("language", ["", "zh/"])
@pytest.mark.parametrize("name", LESSONS)
def test_every_lesson_in_a_browser(opened: Callable[..., Page], both: str, name: str, language: str) -> None:
    for width in (1280, 400):
        page = opened(f"{both}{language}learn/{name}.html", width=width)
        check_page(page)
    for number, section in enumerate(page.locator("div.predict").all()):
        right = section.get_attribute("data-answer") or ""
        if int(section.get_attribute("data-choices") or 0):
            section.locator("input[type=radio]").nth(int(right)).check()
            section.get_by_role("button").first.click()
        else:
            answer(page, number, right)
        assert section.get_attribute("data-verdict") == "right"
        assert section.locator("details").evaluate("(details) => details.open")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LESSONS)
def test_every_live_figure_answers(opened: Callable[..., Page], both: str, name: str) -> None:
    if not (PYODIDE / "pyodide.asm.wasm").is_file():
        pytest.skip("make published fetches Pyodide")
    page = opened(f"{both}zh/learn/{name}.html")
    page.set_default_timeout(300_000)
    for figure in page.locator("figure.live").all():
        figure.get_by_role("button").click()
        page.wait_for_selector("figure.live iframe:not(.starting)")
        frame = page.frame_locator("figure.live iframe")
        assert frame.locator(".problem").count() == 0, figure.get_attribute("data-address")
        assert frame.locator("main").inner_text().count("\n") > 5
