"""The chat page in a real browser: sends, streams, stops, shows errors, and runs nothing that a
model says."""

import json
import os
from pathlib import Path

import pytest
from tiny_server import ScriptedEngine, serving, wait_for

from flyweight.server.page import page

EVIL = """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2">
[click](javascript:window.hacked=3)
[data](data:text/html,<script>window.hacked=4</script>) <svg onload="window.hacked=5"></svg>

# <b onclick="window.hacked=6">head</b>

- `<script>window.hacked = 7</script>`

```html
<script>window.hacked = 8</script>
```

| <iframe src="javascript:parent.hacked=9"> | b |
|---|---|
| [x](java
script:window.hacked=10) | <a href="javascript:window.hacked=11">y</a> |

<style>body { display: none }</style> [good](https://example.org/a?b=c&d) **done**"""
GOOD = """## Plan

First *this*, then **that** and `code`.

1. one
2. two
   - deeper

> quoted

```python
print('<b>')
```

| a | b |
|---|---|
| 1 | 2 |

The end."""


class Answers(ScriptedEngine):
    answers = {  # noqa: RUF012
        "evil": EVIL,
        "markdown": GOOD,
        "think": "<think>\nhm, let me see\n</think>\n\nAn answer.",
    }


@pytest.fixture(scope="module")
def server(tiny_folder):
    with serving(tiny_folder, engine_class=Answers) as running:
        yield running


@pytest.fixture
def chat(browser, server):
    browser.size(1200, 800)
    browser.open(server.url + "/")
    browser.js("localStorage.clear()")  # what the test before has kept
    load(browser, server)
    return browser


def load(browser, server):
    browser.open(server.url + "/")
    # Counted in the page: an answer, or a refusal, may begin and end between two looks at it.
    browser.js(
        "window.turns = {true: 0, false: 0}; new MutationObserver(() => "
        "turns[document.body.dataset.busy]++)"
        ".observe(document.body, {attributeFilter: ['data-busy']})"
    )


def ask(chat, text, *, wait=True):
    chat.js("document.getElementById('prompt').focus()")
    begun = chat.js("turns.true")
    chat.write(text)
    chat.key("Enter", "Enter", text="\r")
    answered(chat, begun, wait=wait)


def answered(chat, begun, *, wait=True):
    chat.wait(f"turns.true > {begun}")
    if wait:
        chat.wait("turns.false === turns.true")


def test_the_page_is_one_file_that_asks_for_nothing_else():
    html, policy = page()
    assert (
        "http://" not in html.replace("https?://", "")
        and "https://" not in html
        and "{{" not in html
    )
    assert (
        "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    )


def test_it_sends_streams_and_shows_how_fast(chat, server):
    ask(chat, "some markdown please")
    assert (
        chat.js("document.querySelector('article.user .text').textContent")
        == "some markdown please"
    )
    shown = chat.js(
        "[...document.querySelectorAll('article.assistant .text *')].map((node) => "
        "node.tagName).join(' ')"
    )
    for tag in (
        "H3",
        "EM",
        "STRONG",
        "CODE",
        "OL",
        "LI",
        "UL",
        "BLOCKQUOTE",
        "PRE",
        "TABLE",
        "TH",
        "TD",
    ):
        assert tag in shown.split(), tag
    assert chat.js("document.querySelector('article.assistant pre').textContent") == "print('<b>')"
    assert "tok/s" in chat.js("document.getElementById('rate').textContent") != "– tok/s"
    assert chat.js("document.getElementById('ttft').textContent").endswith(" ms")
    chat.wait("/KV [0-9.]+ %/.test(document.getElementById('kv').textContent)")
    chat.wait("document.getElementById('model').textContent === 'tiny'")
    assert not chat.errors and all(url.startswith((server.url, "data:")) for url in chat.requests)


def test_a_models_answer_cannot_run_script(chat, server):
    ask(chat, "be evil")
    assert (
        chat.js("document.querySelector('article.assistant .text').textContent").count("hacked")
        >= 8
    ), "it is shown as text"
    assert (
        chat.js(
            "document.querySelectorAll('article.assistant :is(script, img, svg, iframe, style, "
            "b)').length"
        )
        == 0
    )
    links = chat.js(
        "[...document.querySelectorAll('article.assistant a')].map((link) => "
        "link.getAttribute('href'))"
    )
    assert links == ["https://example.org/a?b=c&d"]
    assert not chat.js(
        "[...document.querySelectorAll('article.assistant *')].some((node) => "
        "[...node.attributes].some((one) => one.name.startsWith('on') || one.name === 'style'))"
    )
    chat.js(
        "document.querySelectorAll('article.assistant span, article.assistant h2').forEach((node) "
        "=> node.click())"
    )
    assert chat.js(
        "window.hacked === undefined && getComputedStyle(document.body).display !== 'none'"
    )
    assert not chat.errors and all(url.startswith((server.url, "data:")) for url in chat.requests)


@pytest.mark.parametrize(
    "text",
    [">" * 5000 + " deep", "\n".join("  " * level + "- deep" for level in range(2000))],
    ids=["quotes", "lists"],
)
def test_nesting_without_end_is_shown_and_not_followed(chat, text):
    shown = chat.js(
        "(() => { const node = document.createElement('div'); "
        f"node.append(markdown({json.dumps(text)})); "
        "return [node.textContent.includes('deep'), "
        "node.querySelectorAll('blockquote, li').length]; })()"
    )
    assert shown[0] and 16 <= shown[1] <= 40


def test_even_past_the_sanitizer_the_policy_stops_a_script(chat):
    chat.js(
        "document.querySelector('main').innerHTML = '<img src=x onerror=\"window.hacked=1\">';"
        "document.body.append(Object.assign(document.createElement('script'), {textContent: "
        "'window.hacked=2'}))"
    )
    assert chat.js("new Promise((done) => setTimeout(() => done(window.hacked === undefined), 50))")


def test_escape_stops_and_the_blocks_come_back(chat, server):
    ask(chat, "something that never ends", wait=False)
    chat.wait("document.querySelectorAll('article.assistant .text p').length > 0")
    assert chat.js(
        "!document.getElementById('stop').hidden && document.getElementById('send').hidden"
    )
    chat.key("Escape", "Escape")
    chat.wait("turns.false === turns.true")
    assert "stopped" in chat.js("document.querySelector('article.assistant .facts').textContent")
    wait_for(lambda: server.engine.in_flight == 0, "the cancellation")


def test_thinking_folds_away_and_regenerate_replaces(chat):
    ask(chat, "think first")
    assert chat.js("document.querySelector('details.thinking').textContent").startswith(
        "Thinkinghm, let me see"
    )
    assert not chat.js("document.querySelector('details.thinking').open")
    begun = chat.js("turns.true")
    chat.key("r", "KeyR", alt=True)
    answered(chat, begun)
    assert chat.js("document.querySelectorAll('article').length") == 2
    assert (
        chat.js("document.querySelector('article.assistant .text > p').textContent") == "An answer."
    )


def test_sampling_controls_are_sent_and_errors_are_shown(chat):
    chat.key("o", "KeyO", alt=True)
    chat.wait("!document.getElementById('controls').hidden")
    chat.js("document.getElementById('max_tokens').value = 5000")
    ask(chat, "too much")
    assert chat.js("!document.getElementById('error').hidden")
    assert "the answer asks for 5000 more, but this model's context holds 4096" in chat.js(
        "document.getElementById('error').textContent"
    )
    chat.js(
        "document.getElementById('max_tokens').value = 2; document.getElementById('system').value "
        "= 'Be brief.'"
    )
    ask(chat, "a little")
    assert chat.js("document.querySelector('article.assistant .text').textContent") == "plain answ"


def test_export_has_the_conversation_and_its_timings(chat):
    ask(chat, "hello")
    saved = chat.js(
        "new Promise((done) => { URL.createObjectURL = (blob) => (blob.text().then(done), "
        "'data:,'); "
        "document.getElementById('export').click(); })"
    )
    conversation = json.loads(saved)["messages"]
    assert [message["role"] for message in conversation] == ["user", "assistant"]
    assert (
        conversation[1]["timings"]["predicted_n"] == 3
        and conversation[1]["usage"]["completion_tokens"] == 3
    )


def test_a_reload_keeps_the_conversation_and_a_button_clears_it(chat, server):
    chat.js(
        "for (const [id, value] of Object.entries({system: 'Be brief.', temperature: 0.5, "
        "key: 'secret'})) "
        "document.getElementById(id).value = value"
    )
    ask(chat, "hello")
    shown = (
        "[...document.querySelectorAll('article')]"
        ".map((one) => [one.className, one.querySelector('.text').textContent])"
    )
    before = chat.js(shown)
    assert [kind for kind, _ in before] == ["user", "assistant"]
    load(chat, server)
    assert chat.js(shown) == before
    assert chat.js(
        "['system', 'temperature', 'key'].map((id) => document.getElementById(id).value)"
    ) == ["Be brief.", "0.5", ""]
    assert "secret" not in chat.js("JSON.stringify(localStorage)"), "a key is typed again"
    ask(chat, "and more")
    assert len(chat.js(shown)) == 4
    chat.js("document.getElementById('system').value = ''; document.getElementById('new').click()")
    load(chat, server)
    assert chat.js(shown) == [] and not chat.js("document.getElementById('empty').hidden")
    assert chat.js("localStorage.length") == 0


@pytest.mark.parametrize(
    "kept",
    ["{", "[]", "null", '{"messages": [{"role": "system"}, 3, {"role": "user", "content": {}}]}'],
)
def test_what_another_version_has_kept_does_not_break_the_page(chat, server, kept):
    chat.js(f"localStorage.setItem('flyweight conversation', {json.dumps(kept)})")
    load(chat, server)
    assert chat.js("document.querySelectorAll('article').length") == 0 and not chat.errors
    ask(chat, "hello")
    assert chat.js("document.querySelectorAll('article').length") == 2


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_nothing_is_wider_than_the_screen(chat, width, dark):
    chat.size(width, 800, dark=dark)
    ask(chat, "some markdown please")
    assert chat.js("document.documentElement.scrollWidth <= innerWidth")
    assert chat.js(
        "document.getElementById('prompt').getBoundingClientRect().bottom <= innerHeight"
    )
    dark_now = chat.js("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert dark_now is dark
    chat.js("document.getElementById('theme').click()")
    assert (
        chat.js("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    ) is not dark
    if folder := os.environ.get("FLYWEIGHT_PICTURES"):  # for people to look at
        chat.picture(Path(folder) / f"chat-{width}.png")
        chat.key("o", "KeyO", alt=True)
        chat.picture(Path(folder) / f"chat-{width}-settings.png")
