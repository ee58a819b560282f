"""Answers as the page shows them, and how long that takes for the worst of them."""

from __future__ import annotations

import json

import pytest

LENGTH = 20_000
_RENDER = """async ([path, text]) => {
  const { render } = await import(path);
  const box = document.createElement("div");
  const started = performance.now();
  box.append(render(text));
  return [box.innerHTML, performance.now() - started];
}"""


@pytest.fixture
def rendered(live, tab):
    """Renders a text: its HTML, and the milliseconds that it took."""
    page = tab(live).open("/")

    def render(text: str) -> tuple[str, float]:
        return page.evaluate(_RENDER, [f"{live.url}/page/markdown.js", text])

    return render


SHOWN = {
    "a `b` **c** *d*": "<p>a <code>b</code> <strong>c</strong> <em>d</em></p>",
    "``a ` b``": "<p><code>a ` b</code></p>",
    "`a``b": "<p>`a``b</p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "**a ** b**": "<p><strong>a ** b</strong></p>",
    "** a**": "<p>** a**</p>",
    "***a***": "<p><strong>*a</strong>*</p>",
    "*a `*` b*": "<p><em>a `</em>` b*</p>",
    "2*3*4 and * a *": "<p>2*3*4 and * a *</p>",
    "**a": "<p>**a</p>",
    "# a b  ##  ": "<h3>a b</h3>",
    "#": "<p>#</p>",
    "- - -": "<hr>",
    "1. a\n2. b": '<ol start="1"><li>a</li><li>b</li></ol>',
    "> a\n> > b": "<blockquote><p>a\n&gt; b</p></blockquote>",
    "a | b\n--|:-:\n1 | 2": (
        '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>"
    ),
    "a | b\n--|c": "<p>a | b\n--|c</p>",
}


def test_what_is_shown(rendered) -> None:
    assert {text: rendered(text)[0] for text in SHOWN} == SHOWN


LONG = {
    "heading": "# a" + " " * LENGTH + "x",
    "heading of marks": "# " + "# " * (LENGTH // 2) + "x",
    "item": "- a" + " " * LENGTH + "\u2028x",
    "rule": "- " * (LENGTH // 2) + "x",
    "rule of blanks": "-" + " " * LENGTH + "x",
    "divider of blanks": "a|b\n" + " " * LENGTH + "x",
    "divider of dashes": "a|b\n" + "-" * LENGTH + "x",
    "divider of columns": "a|b\n" + "-|" * (LENGTH // 2) + "x",
    "backticks": "a" + "`" * LENGTH,
    "backticks of all lengths": "".join("`" * n + "a" for n in range(1, 200)),
    "backticks with text": "`a``" * (LENGTH // 4),
    "bold": "**a " * (LENGTH // 4),
    "stars": "*" * LENGTH,
    "italics": "*a " * (LENGTH // 3),
    "italics of one": "*a" * (LENGTH // 2),
    "quotes": ">" * LENGTH,
    "quotes apart": ">  " * (LENGTH // 3),
    "lines of quotes": "> a\n" * (LENGTH // 4),
    "fences": "```\n" * (LENGTH // 4),
    "blank lines": "\n \t" * (LENGTH // 3),
    "pipes": "|" * LENGTH,
}


def test_nothing_takes_long(rendered) -> None:
    """The worst took minutes; now each takes a few milliseconds, and the bound is for a busy machine."""
    times = {name: rendered(text)[1] for name, text in LONG.items()}
    assert {name: round(time) for name, time in times.items() if time > 1000} == {}, json.dumps(times)
