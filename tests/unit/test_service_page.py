"""The page of the service in a real browser, driven as a person would."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from services import DOCUMENTS, QUERY, behind_socket, call, screening_reranker

from core_rerank import Reranker

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


@pytest.fixture(scope="module")
def url(reranker: Reranker) -> Iterator[str]:
    with behind_socket(reranker) as running:
        yield running.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A fresh page that may show no error and may ask no other host."""
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(15_000)
    faults: list[str] = []
    asked: set[str] = set()
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda message: message.type == "error" and faults.append(message.text))
    opened.on("request", lambda request: asked.add(request.url))
    opened.goto(f"{url}/ui")
    yield opened
    context.close()
    assert not faults
    own = (f"{url}/", f"blob:{url}/", "data:,")
    assert [address for address in asked if not address.startswith(own)] == []


def finished(page: Any, count: int) -> None:
    page.wait_for_function(
        "n => document.getElementById('status').textContent === `${n} of ${n} documents.`",
        arg=count,
    )


def shown(page: Any) -> list[str]:
    return page.eval_on_selector_all("#list .name", "all => all.map(one => one.textContent)")


def fill(page: Any, query: str, documents: str) -> None:
    page.fill("#query", query)
    page.fill("#documents", documents)


def test_files_hold_nothing_from_elsewhere(reranker: Reranker) -> None:
    page = call(reranker, "GET", "/ui", api_keys=("key",))  # it loads without a key
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
        assert call(reranker, "GET", path, api_keys=("key",)).status_code == 200
    for name in ("/ui", "/ui/app.js", "/ui/parts.js", "/ui/style.css"):
        assert "//" not in re.sub(r"// .*", "", call(reranker, "GET", name).text)
    assert call(reranker, "GET", "/ui/../app.py").status_code == 404
    assert "N/A" not in page.text  # not every head set is calibrated
    assert "counts against the document" in page.text


@needs_browser
def test_with_the_keyboard_alone(page: Any, reranker: Reranker) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "query"
    page.keyboard.type(QUERY)
    page.keyboard.press("Tab")
    page.keyboard.insert_text("\n".join(DOCUMENTS))
    page.keyboard.press("Control+Enter")
    finished(page, 4)
    expected = reranker.rerank(QUERY, DOCUMENTS, explain=True)
    assert shown(page) == [DOCUMENTS[item.index] for item in expected]
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("#list details[open] .text i")
    assert page.text_content("#list details[open] .text") == DOCUMENTS[expected[0].index]
    tokens = page.eval_on_selector_all(
        "#list .text i",
        "all => all.map(i => [i.textContent, i.style.getPropertyValue('--a')])",
    )
    strongest = max(expected[0].token_scores or (), key=lambda token: token.score)
    shades = {text: float(shade) for text, shade in tokens}
    assert shades[strongest.text.strip()] == 0.9
    assert len(tokens) == len(expected[0].token_scores or ())
    assert strongest.text.strip() in page.text_content("#list .strongest")


@needs_browser
def test_one_head_at_a_time(page: Any, reranker: Reranker) -> None:
    fill(page, QUERY, "\n".join(DOCUMENTS))
    page.click("#rank")
    finished(page, 4)
    best = reranker.rerank(QUERY, DOCUMENTS, explain="heads")[0]
    assert best.head_scores is not None
    heads = [str(head) for head in reranker.heads or ()]
    options = page.eval_on_selector_all("#head option", "all => all.map(one => one.textContent)")
    assert options == ["all heads", *(f"head {head}" for head in heads)]
    page.click("#list summary")
    page.wait_for_selector("#list details[open] .text i")
    page.focus("#head")
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json))
    for number, head in enumerate(heads, start=1):
        page.keyboard.press("ArrowDown")
        page.wait_for_function(
            "head => document.querySelector('#list .heads b')?.textContent === head", arg=head
        )
        shown = page.eval_on_selector_all("#list .text i", "all => all.map(one => one.title)")
        scores = best.head_scores[head]
        assert [float(s.replace("\u2212", "-")) for s in shown] == pytest.approx(scores, rel=1e-3)
        shades = page.eval_on_selector_all(
            "#list .text i", "all => all.map(one => Number(one.style.getPropertyValue('--a')))"
        )
        assert max(shades) == shades[scores.index(max(scores))] == 0.9
        assert page.input_value("#head") == head
        assert len(asked) == 1, number  # the row is read again once, for all heads
    assert asked[0]["documents"] == [DOCUMENTS[best.index]]
    line = page.text_content("#list .heads")
    for head, scores in best.head_scores.items():
        said = re.search(rf"{head} (\S+?)(,|$)", line)
        assert said
        assert float(said[1].replace("\u2212", "-")) == pytest.approx(sum(scores), rel=1e-3)
    page.keyboard.press("Home")
    page.wait_for_function("() => !document.querySelector('#list .heads b')")


@needs_browser
def test_documents_are_shown_as_text_and_never_run(page: Any) -> None:
    rows = [
        {"_id": "evil", "title": "<b>T</b>", "text": "<img src=x onerror=alert(1)> tides"},
        {"text": "👩‍🚀 e\u0301 tides 🇫🇷"},
    ]
    dialogs: list[Any] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog) or dialog.dismiss())
    fill(page, "tides <script>", "\n".join(json.dumps(row) for row in rows))
    page.click("#rank")
    finished(page, 2)
    for summary in page.query_selector_all("#list summary"):
        summary.click()
    page.wait_for_function("() => document.querySelectorAll('#list .text').length === 2")
    texts = page.eval_on_selector_all("#list .text", "all => all.map(one => one.textContent)")
    assert set(texts) == {f"<b>T</b>\n{rows[0]['text']}", rows[1]["text"]}
    assert not dialogs
    assert page.query_selector("#list img") is None
    assert "<b>T</b>" in shown(page)[0] + shown(page)[1]


@needs_browser
def test_a_thousand_documents_from_a_file_do_not_freeze_it(
    page: Any, reranker: Reranker, tmp_path: Path
) -> None:
    words = ["tides", "moon", "bread", "cat", "ocean", "yeast"]
    texts = [
        " ".join([*(words[(i * 7 + j) % (i % 6 + 1)] for j in range(12)), str(i)])
        for i in range(1000)
    ]
    rows = [{"_id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    page.set_input_files("#file", str(file))
    page.wait_for_function(
        "() => document.getElementById('count').textContent === '1000 documents.'"
    )
    page.fill("#query", QUERY)
    page.evaluate(
        "() => { window.gaps = []; let last = performance.now(); const tick = now => {"
        " window.gaps.push(now - last); last = now; requestAnimationFrame(tick); };"
        " requestAnimationFrame(tick); }"
    )
    page.click("#rank")
    page.set_default_timeout(120_000)
    finished(page, 1000)
    gaps = page.evaluate("window.gaps")  # milliseconds from one frame to the next
    assert len(gaps) > 20
    assert max(gaps) < max(1000, sum(gaps) / 4)  # the second where the machine itself is slow
    expected = reranker.rerank(QUERY, texts)
    ids = page.eval_on_selector_all("#list .name b", "all => all.map(one => one.textContent)")
    scores = {f"d{item.index}": item.score for item in expected}
    assert len(set(ids)) == 1000
    assert [scores[one] for one in ids] == sorted(scores.values(), reverse=True)


@needs_browser
def test_mistakes_are_told(page: Any) -> None:
    fill(page, QUERY, 'fine\n{"text": 3}')
    assert page.text_content("#count") == 'Line 2 has no "text".'
    page.click("#rank")
    page.wait_for_selector("#problem:not([hidden])")
    assert page.text_content("#problem") == 'Line 2 has no "text".'
    fill(page, QUERY, '{"text": ')
    page.click("#rank")
    page.wait_for_function(
        "() => document.getElementById('problem').textContent.includes('Line 1')"
    )
    fill(page, QUERY, "fine")
    page.click("#rank")
    finished(page, 1)
    assert page.is_hidden("#problem")


@needs_browser
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_what_it_copies_runs_and_what_it_downloads_is_the_ranking(
    page: Any, reranker: Reranker, tmp_path: Path
) -> None:
    documents = [*DOCUMENTS, 'it\'s "quoted" $HOME `x` \\ tides']
    fill(page, QUERY, "\n".join(documents))
    page.click("#rank")
    finished(page, 5)
    expected = [item.index for item in reranker.rerank(QUERY, documents)]
    page.click("#as-curl")
    command = page.input_value("#snippet")
    said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert [r["index"] for r in json.loads(said.stdout)["results"]] == expected
    page.keyboard.press("Escape")
    page.click("#as-python")
    program = tmp_path / "asked.py"
    program.write_text(page.input_value("#snippet"))
    said = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=30)
    assert [line.split(" ", 1)[1] for line in said.stdout.splitlines()] == [
        documents[index] for index in expected
    ]
    page.click("#close")
    with page.expect_download() as download:
        page.click("#download")
    ranking = json.loads(Path(download.value.path()).read_text())
    assert [d["index"] for d in ranking["documents"]] == expected
    assert [d["rank"] for d in ranking["documents"]] == [1, 2, 3, 4, 5]
    assert set(reranker.rerank(QUERY, documents).to_dict()) == set(ranking)


@needs_browser
def test_a_key_is_asked_for_and_sent(browser: Any, reranker: Reranker) -> None:
    with behind_socket(reranker, api_keys=("secret",)) as running:
        page = browser.new_page()
        page.set_default_timeout(15_000)
        page.goto(f"{running.url}/ui")
        fill(page, QUERY, "tides")
        page.click("#rank")
        page.wait_for_selector("#problem:not([hidden])")
        assert "API key" in page.text_content("#problem")
        page.fill("#key", "secret")
        page.click("#rank")
        finished(page, 1)
        page.click("#as-curl")
        assert "secret" not in page.input_value("#snippet")
        assert "Bearer $KEY" in page.input_value("#snippet")
        page.close()


def luminance(colour: str) -> float:
    """Relative luminance of an ``rgb(...)``, as WCAG 2 defines it."""
    parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_both_schemes(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    fill(page, QUERY, "tides")
    page.click("#rank")
    finished(page, 1)
    page.click("#list summary")
    page.select_option("#head", index=1)
    page.wait_for_selector("#list .heads b")
    body = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(body) < 0.1) == (scheme == "dark")
    texts = ("h1", "#model", "#rank", "#download", "#documents-help", ".name", "#status")
    for selector in (*texts, "#head", "#head-help", ".heads", ".heads b"):
        ink, back = page.evaluate(
            """selector => {
              let one = document.querySelector(selector); const ink = getComputedStyle(one).color;
              const clear = 'rgba(0, 0, 0, 0)';
              while (getComputedStyle(one).backgroundColor === clear) one = one.parentElement;
              return [ink, getComputedStyle(one).backgroundColor]; }""",
            selector,
        )
        light, dark = sorted((luminance(ink), luminance(back)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (selector, ink, back)


@needs_browser
def test_suspicious_documents_are_marked(browser: Any, smollm2_tokenizer: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    with behind_socket(screening_reranker(smollm2_tokenizer)[0]) as running:
        page.goto(f"{running.url}/ui")
        fill(page, QUERY, "\n".join(DOCUMENTS))
        page.click("#rank")
        finished(page, 4)
        marked = page.eval_on_selector_all(
            "#list .name:has(.suspicious)", "all => all.map(one => one.textContent)"
        )
        assert marked == [f"suspicious 0.75{DOCUMENTS[0]}"]
        context.close()
