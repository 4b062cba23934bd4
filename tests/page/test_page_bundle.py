"""The page as one file: joined from modules, small, closed by its own policy, and alive when opened from a disk."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter

import pytest

from kvx.errors import BadArgument
from kvx.page import bundle, page_text, write_page
from kvx.page.squeeze import squeeze_script


def test_the_page_is_under_300_kB():
    size = len(page_text().encode())
    assert size < 300_000, f"The page has {size:,} bytes."


def test_names_at_the_top_level_are_unique():
    """Modules become one script, where a name is one thing."""
    where = Counter(name for module in bundle.modules() for name in bundle.names(module))
    twice = {name: [m for m in bundle.modules() if name in bundle.names(m)] for name, n in where.items() if n > 1}
    assert not twice, f"Rename one of each: {twice}"
    assert {"make", "fill", "TabLink", "readAddress", "Page"} <= set(where)


def test_every_file_is_used_and_comes_after_what_it_imports():
    order = bundle.modules()
    assert {path.name for path in bundle.STATIC.glob("*.js")} == set(order), "a module that page.js does not reach"
    assert order[-1] == "page.js"
    assert order.index("dom.js") < order.index("page.js")
    assert not re.search(r"^(import|export)\b", bundle.script(), re.M)


def test_the_policy_names_exactly_what_stands_in_the_page():
    text = page_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    for kind, element in (("script", r'<script type="module">(.*?)</script>'), ("style", r"<style>(.*?)</style>")):
        found = re.findall(element, text, re.S)
        assert len(found) == 1
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.search(r"\sstyle=|\son\w+=", re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)), (
        "inline style or handler"
    )


def test_nothing_is_made_from_html():
    for module in bundle.modules():
        text = (bundle.STATIC / module).read_text()
        found = re.findall(r"\.innerHTML|\.outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", text)
        assert not found, f"{module}: {found}"


def test_data_cannot_end_its_element():
    hostile = "</script><script>alert(1)</script><!--"
    text = page_text({"models": [hostile]})
    assert hostile not in text
    assert json.loads(re.search(r'id="kvx-data">(.*?)</script>', text, re.S)[1])["models"] == [hostile]


def test_modules_that_import_in_a_circle_are_refused(tmp_path, monkeypatch):
    (tmp_path / "page.js").write_text('import { a } from "./other.js"\n')
    (tmp_path / "other.js").write_text('import { b } from "./page.js"\n')
    monkeypatch.setattr(bundle, "STATIC", tmp_path)
    with pytest.raises(ValueError, match=r"page.js -> other.js -> page.js"):
        bundle.modules()


def test_a_form_that_is_not_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "page.js").write_text("export default 3\n")
    monkeypatch.setattr(bundle, "STATIC", tmp_path)
    with pytest.raises(ValueError, match="export default 3"):
        bundle.script()


def test_the_script_is_one_that_node_reads(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on the PATH")
    path = tmp_path / "page.mjs"
    path.write_text(bundle.script())
    done = subprocess.run([node, "--check", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_older_page_is_replaced_and_another_file_is_not(tmp_path):
    path = write_page(tmp_path)
    assert path == tmp_path / "kvx.html"
    path.write_text(path.read_text() + "old")
    assert "old" not in write_page(path).read_text()[-10:]
    other = tmp_path / "recording.jsonl"
    other.write_text("{}\n")
    with pytest.raises(BadArgument, match=r"recording.jsonl exists and is no page of KVX"):
        write_page(other)
    assert other.read_text() == "{}\n"


def test_the_page_lives_from_a_file(visit):
    page = visit()
    assert page.locator("h1").inner_text().startswith("KVX")
    assert page.locator(".version").inner_text().startswith("kvx ")
    assert page.evaluate("document.compatMode") == "CSS1Compat"  # no quirks: the doctype is the first thing


def test_what_goes_wrong_in_the_browser_is_found(visit):
    page = visit()
    page.evaluate("console.error('said'); setTimeout(() => { throw new Error('thrown') })")
    page.evaluate("fetch('https://example.org/').catch(() => 0)")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.stolen = 1\">')")
    page.wait_for_timeout(200)
    assert page.evaluate("window.stolen") is None
    text = "\n".join(visit.wrong)
    visit.wrong.clear()
    assert all(word in text for word in ("console: said", "thrown", "example.org", "Content Security Policy"))


SQUEEZED = {
    "const a = 1; // said\n\n  const b = a / 2 / 3;": "const a=1;\nconst b=a/2/3;",
    "x = y ? `a  ${ z + `${ w }  /* kept */` } // kept` : '  // kept';": "x=y?`a  ${z+`${w}  /* kept */`} // kept`:'  // kept';",
    "return /[/ ]\\/ {2}/g.test(s) + +t - -u;": "return/[/ ]\\/ {2}/g.test(s)+ +t- -u;",
    "if (a) { /* no\nmore */ return b in c; }": "if(a){return b in c;}",
    'f("</b>", { a: 1, "b c": [ 2 ] })': 'f("</b>",{a:1,"b c":[2]})',
}


@pytest.mark.parametrize("text", SQUEEZED)
def test_squeezing_drops_what_says_nothing(text):
    assert squeeze_script(text) == SQUEEZED[text] + "\n"


@pytest.mark.parametrize("text", ['"no end', "`no end ${a}", "a }` b"])
def test_squeezing_says_what_has_no_end(text):
    with pytest.raises(ValueError, match="no end"):
        squeeze_script(text)


def test_squeezing_keeps_every_token(tmp_path):
    """Twice is as once, and Node reads the whole."""
    script = bundle.script()
    parts = [squeeze_script(part) for part in script.split("// ---- ")[1:]]
    assert sum(len(part) for part in parts) > 0.98 * len(script) - 40 * len(parts)
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on the PATH")
    (tmp_path / "page.mjs").write_text(script)
    done = subprocess.run([node, "--check", str(tmp_path / "page.mjs")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_tables_are_packed_and_small_lists_are_not():
    rows = [{"a": n, "b": [n]} for n in range(5)]
    assert bundle.packed({"rows": rows}) == {"rows": {"$columns": ["a", "b"], "$rows": [[n, [n]] for n in range(5)]}}
    assert bundle.packed(rows[:3]) == rows[:3]
    assert bundle.packed([*rows, {"a": 1}]) == [*rows, {"a": 1}]
