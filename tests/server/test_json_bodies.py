"""Bodies as curl and browsers send them, what is said of broken ones, and every field in /docs."""

import html
import json
import re

import httpx
import pytest
from tiny_server import ScriptedEngine, serving

from flyweight.server import json_body
from flyweight.server.refusals import BadRequest

BODY = '{"prompt": "hello", "max_tokens": 3}'


@pytest.fixture(scope="module")
def server(tiny_folder):
    with serving(tiny_folder, engine_class=ScriptedEngine) as running:
        yield running


def post(server, body, **headers):
    return httpx.post(server.url + "/v1/completions", content=body, headers=headers)


@pytest.mark.parametrize(
    "kind",
    [None, "application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8"],
)
def test_a_body_is_read_as_json_whatever_curl_says(server, kind):
    answer = post(server, BODY, **({"content-type": kind} if kind else {}))
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    "header", [{"origin": "https://elsewhere.example"}, {"sec-fetch-site": "cross-site"}]
)
def test_a_page_of_another_site_cannot_send_json_as_plain_text(server, header):
    answer = post(server, BODY, **{"content-type": "text/plain"}, **header)
    assert answer.status_code == 415
    assert (
        answer.json()["error"]["message"]
        == "the body must be JSON: send the header content-type: application/json"
    )


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('{"prompt": "hello",}', "line 1, column 20"),
        ('{\n "prompt": "hello"\n "max_tokens": 3}', "line 3, column 2"),
        ("prompt=hello", "line 1, column 1, near 'prompt=hello'"),
        ('{"prompt": "hel', "line 1, column 12"),
        ('{"prompt": "é"}'.encode("latin-1"), "no UTF-8"),
        ("[" * 99_000, "nested too deeply"),
    ],
)
def test_broken_json_is_named_by_line_and_column(server, body, place):
    answer = post(server, body, **{"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("the body is not JSON: ") and place in error["message"]
    assert error["param"] is None


def test_every_field_in_the_reference_has_a_line_of_description(server):
    page = httpx.get(server.url + "/docs").text
    rows = re.findall(r"<tr><td><code>(\w+)</code>.*?</td><td>.*?</td><td>(.*?)</td></tr>", page)
    assert len(rows) > 40
    missing = [name for name, text in rows if not html.unescape(text).strip()]
    assert not missing, " ".join(sorted(set(missing)))


LISTS = json_body.MOST_CONTAINERS + 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[]," * LISTS + b"[]]}",
        b'{"prompt": "x", "more": [' + b"{}," * LISTS + b"{}]}",
        b'{"prompt": [' + b"1," * (json_body.MOST_ELEMENTS + 1) + b"1]}",
        b'{"prompt": "\\\\", "more": [' + b"[]," * LISTS + b"[]]}",
    ],
    ids=["lists", "objects", "numbers", "after a string that ends in a backslash"],
)
def test_very_many_values_are_refused_before_they_are_parsed(server, body, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the body was parsed"))
    with pytest.raises(BadRequest, match="lists and objects"):
        json_body.check_elements(body)
    monkeypatch.undo()
    answer = post(server, body, **{"content-type": "application/json"})
    assert answer.status_code == 400 and "send less" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", ["[" * 2 * LISTS, 'a "[[" \\ {' * LISTS, "1," * (json_body.MOST_ELEMENTS + 1)]
)
def test_letters_of_a_long_text_are_no_values(text):
    json_body.check_elements(json.dumps({"prompt": text}).encode())
