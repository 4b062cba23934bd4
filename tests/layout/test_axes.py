"""The layout language: engines' layouts read to their dimensions; an error points at the characters it is about."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvx
from kvx.layout.axes import AXES, Axis, Layout, PlaneLayout

HINT = "  Axes are layer block kv token head dim; `dim/8 token dim%8` splits, `( )` fuses, `|` ends an allocation."


def show(plane: PlaneLayout) -> str:
    """Dimensions as text, fused ones in parentheses."""
    names = [" ".join(map(str, dim)) for dim in plane.dims]
    return " ".join(f"({name})" if len(dim) > 1 else name for name, dim in zip(names, plane.dims, strict=True))


# Each engine's layout of the design, and: has a layer axis, tensors per layer, K's dimensions (V's are the same).
ENGINES = {
    "layer | block kv token head dim": (True, 1, "block kv token head dim"),
    "layer | block token head (kv dim)": (True, 1, "block token head (kv dim)"),
    "layer | block head token (kv dim)": (True, 1, "block head token (kv dim)"),
    "layer | kv block token head dim": (True, 1, "kv block token head dim"),
    "block layer head token (kv dim)": (True, 1, "block head token (kv dim)"),
    "kv layer | (block token) head dim": (True, 2, "(block token) head dim"),
    "block layer kv head token dim": (True, 1, "block kv head token dim"),
    "layer kv | block token head dim": (True, 2, "block token head dim"),
    "layer kv | block head token dim": (True, 2, "block head token dim"),
    kvx.NHD: (False, 2, "block token head dim"),
    kvx.HND: (False, 2, "block head token dim"),
    kvx.hnd_packed(): (False, 2, "block head dim/x token dim%x"),
    kvx.hnd_packed(8): (False, 2, "block head dim/8 token dim%8"),
    "kv | layer block token head dim": (True, 2, "block token head dim"),
    "block kv head dim/4 token dim%4": (False, 1, "block kv head dim/4 token dim%4"),
    "(kv head) block token dim": (False, 1, "(kv head) block token dim"),
    "kv|block(token head)dim": (False, 2, "block (token head) dim"),
    "  kv |\tblock   token head (dim) ": (False, 2, "block token head dim"),
}


@pytest.mark.parametrize("text", ENGINES)
def test_layouts_of_engines(text):
    has_layer, num_buffers, dims = ENGINES[text]
    layout = kvx.Layout.parse(text)
    assert (layout.text, layout.has_layer, layout.num_buffers) == (text, has_layer, num_buffers)
    assert (show(layout.k), show(layout.v)) == (dims, dims)
    assert (layout.k.buffer, layout.v.buffer) == (0, num_buffers - 1)


@pytest.mark.parametrize("layer", ["", "layer ", "layer | "])
def test_k_and_v_in_orders_of_their_own(layer):
    layout = Layout.parse(f"{layer}kv[K: | block head dim/x token dim%x; V: | block head dim token]")
    assert (layout.has_layer, layout.num_buffers) == (bool(layer), 2)
    assert (layout.k.buffer, show(layout.k)) == (0, "block head dim/x token dim%x")
    assert (layout.v.buffer, show(layout.v)) == (1, "block head dim token")


def test_the_bar_inside_kv_split_is_optional():
    bare = Layout.parse("kv[K: block head dim/x token dim%x; V: block head dim token]")
    barred = Layout.parse("kv[K: | block head dim/x token dim%x; V: | block head dim token]")
    assert (bare.k, bare.v) == (barred.k, barred.v)


def test_axes_of_a_split():
    layout = Layout.parse("kv | block head dim/16 token dim%16")
    assert layout.k.dims == (
        (Axis("block"),),
        (Axis("head"),),
        (Axis("dim", "/", "16"),),
        (Axis("token"),),
        (Axis("dim", "%", "16"),),
    )


def test_axes_of_a_fusion():
    assert Layout.parse("block token head (kv dim)").v.dims[-1] == (Axis("kv"), Axis("dim"))


def test_layouts_are_equal_hashable_and_read_once():
    assert hash(Layout.parse(kvx.NHD)) == hash(Layout.parse(kvx.NHD))
    assert Layout.parse(kvx.NHD) is Layout.parse(kvx.NHD)
    assert Layout.parse(kvx.NHD) != Layout.parse(kvx.HND)


@pytest.mark.parametrize(
    ("pack", "text"),
    [("x", "kv | block head dim/x token dim%x"), (8, "kv | block head dim/8 token dim%8")],
)
def test_hnd_packed_text(pack, text):
    assert kvx.hnd_packed(pack) == text


# The layout, the marks under it, and the sentence. Marks are written out, so that a column off by one is seen here.
ERRORS = [
    (
        "kv | block tokens head dim",
        "           ^^^^^^",
        'unknown axis "tokens"',
    ),
    (
        "kv | block token head Dim",
        "                      ^^^",
        'unknown axis "Dim"',
    ),
    (
        "kv | block head dim/y token dim%y",
        "                ^^^^^",
        'unknown axis "dim/y"',
    ),
    (
        "kv | block head dim/8/2 token dim%8",
        "                ^^^^^^^",
        'unknown axis "dim/8/2"',
    ),
    (
        "kv | block head dim/-8 token dim%-8",
        "                ^^^^^^",
        'unknown axis "dim/-8"',
    ),
    (
        "kv | block head dim/0 token dim%0",
        "                ^^^^^",
        "a split by 0",
    ),
    (
        "kv | block token/16 head token%16 dim",
        "           ^^^^^^^^",
        "only dim can be split; token cannot",
    ),
    (
        "kv[K: block token/16 dim/2 token%16 dim%2 head; V: block head token dim]",
        "            ^^^^^^^^",
        "only dim can be split; token cannot",
    ),
    (
        "kv | block | token head dim",
        "           ^",
        "one `|` at most, outside parentheses",
    ),
    (
        "layer | kv | block token head dim",
        "           ^",
        "one `|` at most, outside parentheses",
    ),
    (
        "(kv | block) token head dim",
        "    ^",
        "one `|` at most, outside parentheses",
    ),
    (
        "kv block token | head dim",
        "^^^^^^^^^^^^^^^",
        "only whole layer, kv and block axes can stand left of `|`",
    ),
    (
        "(kv block) | token head dim",
        "^^^^^^^^^^^",
        "only whole layer, kv and block axes can stand left of `|`",
    ),
    (
        "block layer kv | token head dim",
        "^^^^^^^^^^^^^^^",
        "a buffer per block is a list of addresses, not a paged tensor; no op takes it",
    ),
    (
        "block | layer kv token head dim",
        "^^^^^^",
        "a buffer per block is a list of addresses, not a paged tensor; no op takes it",
    ),
    (
        "block | head layer kv token dim",
        "^^^^^^",
        "a buffer per block is a list of addresses, not a paged tensor; no op takes it",
    ),
    (
        "kv | block (token (head dim))",
        "                  ^",
        "parentheses do not nest",
    ),
    (
        "kv | block () token head dim",
        "            ^",
        "nothing is fused here",
    ),
    (
        "kv | block token) head dim",
        "                ^",
        "nothing is fused here",
    ),
    (
        "kv | block (token head dim",
        "           ^",
        "this parenthesis is not closed",
    ),
    (
        "block (layer token) head (kv dim)",
        "       ^^^^^",
        "`layer` cannot be fused: ops work on one layer's view",
    ),
    (
        "kv | token head dim",
        "^^^^^^^^^^^^^^^^^^^",
        "`block` must stand here exactly once",
    ),
    (
        "kv | block token token head dim",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`token` must stand here exactly once",
    ),
    (
        "kv | block token dim",
        "^^^^^^^^^^^^^^^^^^^^",
        "`head` must stand here exactly once",
    ),
    (
        "block token head dim",
        "^^^^^^^^^^^^^^^^^^^^",
        "`kv` must stand here exactly once",
    ),
    (
        "kv | block kv token head dim",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`kv` must stand here exactly once",
    ),
    (
        "kv | block token head",
        "^^^^^^^^^^^^^^^^^^^^^",
        "`dim` must stand here once, or as `dim/8 ... dim%8`",
    ),
    (
        "kv | block head dim/8 token dim%4",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`dim` must stand here once, or as `dim/8 ... dim%8`",
    ),
    (
        "kv | block head dim%8 token dim/8",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`dim` must stand here once, or as `dim/8 ... dim%8`",
    ),
    (
        "kv | block head dim/8 token dim",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`dim` must stand here once, or as `dim/8 ... dim%8`",
    ),
    (
        "kv | block head (dim token)",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`dim` is the last axis of the parentheses it stands in",
    ),
    (
        "block head (kv dim/8) token dim%8",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`kv` cannot be fused with a split dim",
    ),
    (
        "block kv[K: | token head dim; V: | head token dim]",
        "^^^^^^",
        "only `layer` may stand before kv[...]",
    ),
    (
        "layer kv[K: | block token head dim]",
        "      ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "kv[...] is written kv[K: axes; V: axes]",
    ),
    (
        "kv[K: | block head token; V: | block head dim token]",
        "     ^^^^^^^^^^^^^^^^^^^",
        "`dim` must stand here once, or as `dim/8 ... dim%8`",
    ),
    (
        "kv[K: | block head dim token; V: | block head dim]",
        "                                ^^^^^^^^^^^^^^^^^",
        "`token` must stand here exactly once",
    ),
    (
        "kv[K: | block head dim token; V: kv | block head dim token]",
        "                                ^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`kv` cannot stand again inside kv[...]",
    ),
    (
        "kv[K: | block head dim token; V: | block head dim tokn]",
        "                                                  ^^^^",
        'unknown axis "tokn"',
    ),
    (
        "",
        "^",
        "`block` must stand here exactly once",
    ),
]


@pytest.mark.parametrize(("text", "marks", "sentence"), ERRORS, ids=[f"{e[0]}" or "empty" for e in ERRORS])
def test_an_error_points_at_its_characters(text, marks, sentence):
    with pytest.raises(kvx.LayoutError) as refused:
        Layout.parse(text)
    assert str(refused.value) == f"layout: {sentence}\n  {text}\n  {marks}\n{HINT}"


@pytest.mark.parametrize(
    "text",
    [
        "kv kv | block token head dim",
        "layer layer kv | block token head dim",
        "kv | layer layer block token head dim",
        "layer kv | layer block token head dim",
        "kv | block head dim/00 token dim%00",
        "layer kv[K: layer | block head dim token; V: | block head dim token]",
    ],
)
def test_an_axis_said_twice_or_split_by_zero_is_refused(text):
    with pytest.raises(kvx.LayoutError):
        Layout.parse(text)


def test_kv_again_inside_kv_split_is_said_so():
    with pytest.raises(kvx.LayoutError, match="cannot stand again"):
        Layout.parse("kv[K: | block kv token head dim; V: | block token head dim]")


def test_a_bar_needs_no_spaces_before_kv_split():
    assert Layout.parse("layer| kv[K: block token head dim; V: block token head dim]").has_layer


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, bool, str]:
    """(text, K and V apart, dimensions): axes in any order, neighbours fused at random, dim last where it is fused."""
    apart = draw(st.booleans())
    axes = draw(st.permutations(["block", "token", "head", "dim"] + ([] if apart else ["kv"])))
    dims: list[list[str]] = []
    for axis in axes:
        if dims and dims[-1][-1] != "dim" and draw(st.booleans()):
            dims[-1].append(axis)
        else:
            dims.append([axis])
    text = " ".join(f"({' '.join(dim)})" if len(dim) > 1 else dim[0] for dim in dims)
    return ("kv | " if apart else "") + text, apart, text


@given(layouts())
def test_any_order_of_axes_is_read_as_written(case):
    text, apart, dims = case
    layout = Layout.parse(text)
    assert layout.num_buffers == 1 + apart
    assert show(layout.k) == show(layout.v) == dims


@given(layouts(), st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda w: w not in AXES), st.data())
def test_an_unknown_word_is_marked_where_it_stands(case, word, data):
    text = case[0]
    at = data.draw(st.sampled_from([m.start() for m in re.finditer(r"[a-z]+", text)]))
    text = f"{text[:at]}{word} {text[at:]}"
    with pytest.raises(kvx.LayoutError) as refused:
        Layout.parse(text)
    first, shown, marks, _ = str(refused.value).split("\n")
    assert first == f'layout: unknown axis "{word}"'
    assert shown == "  " + text
    assert marks == "  " + " " * at + "^" * len(word)
