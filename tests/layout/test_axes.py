"""The layout language: engines' layouts read to their dimensions; an error points at the characters it is about."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvx
from kvx.layout.axes import AXES, Axis, Layout, PlaneLayout

HINT = "  Axes are layer block kv token head dim; `dim/8 token dim%8` splits, `( )` fuses, `|` ends an allocation."


def show(dims: tuple[tuple[Axis, ...], ...]) -> str:
    """Dimensions as text, fused ones in parentheses."""
    names = [" ".join(map(str, dim)) for dim in dims]
    return " ".join(f"({name})" if len(dim) > 1 else name for name, dim in zip(names, dims, strict=True))


def left(plane: PlaneLayout) -> str:
    return " ".join(map(str, plane.left))


# Each engine's layout of the design, and: has a layer axis, tensors per layer, the dimensions of one layer's K (V's are the same).
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
    "block | layer kv token head dim": (True, 1, "kv token head dim"),
    "block | head layer kv token dim": (True, 1, "head kv token dim"),
    "block layer kv | token head dim": (True, 2, "token head dim"),
    "| layer block kv token head dim": (True, 1, "block kv token head dim"),
    "kv block head token layer dim": (True, 1, "kv block head token dim"),
    "block head/4 layer kv token head%4 dim": (True, 1, "block head/4 kv token head%4 dim"),
    "kv | block head token/x dim token%x": (False, 2, "block head token/x dim token%x"),
    "kv | block head dim%8 token dim/8": (False, 2, "block head dim%8 token dim/8"),
    "layer | block token head dim": (True, 1, "block token head dim"),
    "(block token) (head dim)": (False, 1, "(block token) (head dim)"),
}


@pytest.mark.parametrize("text", ENGINES)
def test_layouts_of_engines(text):
    has_layer, num_buffers, dims = ENGINES[text]
    layout = kvx.Layout.parse(text)
    assert (layout.text, layout.has_layer, layout.num_buffers) == (text, has_layer, num_buffers)
    assert {show(plane.layer_dims) for plane in layout.planes.values()} == {dims}
    assert not layout.first.is_area


@pytest.mark.parametrize(
    ("text", "outside", "inside"),
    [
        ("block token head dim", "", "block token head dim"),
        ("| block token head dim", "", "block token head dim"),
        ("kv | layer block token head dim", "kv", "layer block token head dim"),
        ("layer kv block | token head dim", "layer kv block", "token head dim"),
        ("block layer kv | (token head dim)", "block layer kv", "(token head dim)"),
        ("block | head/2 layer head%2 (kv dim) token", "block", "head/2 layer head%2 (kv dim) token"),
    ],
)
def test_what_stands_left_of_the_bar_is_outside(text, outside, inside):
    plane = Layout.parse(text).first
    assert (left(plane), show(plane.dims)) == (outside, inside)


@pytest.mark.parametrize(
    ("text", "has_kv"), [("layer | block token head dim", False), (kvx.NHD, True), ("block token head kv dim", True)]
)
def test_kv_is_optional(text, has_kv):
    layout = Layout.parse(text)
    assert layout.has_kv == has_kv
    assert len(set(layout.planes.values())) == 1


@pytest.mark.parametrize("layer", ["", "layer ", "layer | "])
def test_k_and_v_in_orders_of_their_own(layer):
    layout = Layout.parse(f"{layer}kv[K: | block head dim/x token dim%x; V: | block head dim token]")
    assert (layout.has_layer, layout.has_kv, layout.num_buffers) == (bool(layer), True, 2)
    assert left(layout.planes["k"]) == left(layout.planes["v"]) == ("layer kv" if layer else "kv")
    assert show(layout.planes["k"].dims) == "block head dim/x token dim%x"
    assert show(layout.planes["v"].dims) == "block head dim token"


@pytest.mark.parametrize(
    ("text", "outside", "k", "v"),
    [
        ("layer | block head kv[K: dim token; V: token dim]", "layer", "block head kv dim token", "block head kv token dim"),
        (
            "layer | kv[K: block token head dim; V: block head token dim]",
            "layer",
            "kv block token head dim",
            "kv block head token dim",
        ),
        ("block kv[K: token head dim; V: head token dim]", "", "block kv token head dim", "block kv head token dim"),
        (
            "| layer kv[K: block token head dim; V: block head token dim]",
            "",
            "layer kv block token head dim",
            "layer kv block head token dim",
        ),
        (
            "layer | block head kv[K: token/16 dim/2 token%16 dim%2; V: dim/16 token/2 dim%16 token%2]",
            "layer",
            "block head kv token/16 dim/2 token%16 dim%2",
            "block head kv dim/16 token/2 dim%16 token%2",
        ),
    ],
)
def test_k_and_v_as_areas_of_one_allocation(text, outside, k, v):
    layout = Layout.parse(text)
    assert (layout.num_buffers, layout.planes["k"].is_area, layout.planes["v"].is_area) == (1, True, True)
    assert left(layout.planes["k"]) == left(layout.planes["v"]) == outside
    assert (show(layout.planes["k"].dims), show(layout.planes["v"].dims)) == (k, v)


@pytest.mark.parametrize(
    ("text", "outside"),
    [
        ("layer | block kv[K: | token head dim; V: | head token dim]", "layer block kv"),
        ("block layer kv[K: | token head dim; V: | head token dim]", "block layer kv"),
        ("layer kv[K: block token head dim; V: block head token dim]", "layer kv"),
    ],
)
def test_a_bar_inside_kv_split_sets_k_and_v_apart(text, outside):
    layout = Layout.parse(text)
    assert (layout.num_buffers, layout.first.is_area) == (2, False)
    assert {left(plane) for plane in layout.planes.values()} == {outside}


def test_the_bar_inside_kv_split_is_optional():
    bare = Layout.parse("kv[K: block head dim/x token dim%x; V: block head dim token]")
    barred = Layout.parse("kv[K: | block head dim/x token dim%x; V: | block head dim token]")
    assert bare.planes == barred.planes


def test_axes_of_a_split():
    layout = Layout.parse("kv | block head dim/16 token dim%16")
    assert layout.planes["k"].dims == (
        (Axis("block"),),
        (Axis("head"),),
        (Axis("dim", "/", "16"),),
        (Axis("token"),),
        (Axis("dim", "%", "16"),),
    )


@pytest.mark.parametrize(
    ("text", "token", "head", "dim"),
    [
        (kvx.NHD, "", "", ""),
        (kvx.hnd_packed(), "", "", "x"),
        ("block head/4 layer kv token head%4 dim", "", "4", ""),
        ("kv | block head token/16 dim/2 token%16 dim%2", "16", "", "2"),
    ],
)
def test_split_of(text, token, head, dim):
    plane = Layout.parse(text).first
    assert (plane.split_of("token"), plane.split_of("head"), plane.split_of("dim")) == (token, head, dim)
    assert plane.split_of("block") == ""


def test_order_is_flat_and_outermost_first():
    plane = Layout.parse("layer | (block token) head (kv dim)").first
    assert [str(axis) for axis in plane.order] == ["block", "token", "head", "kv", "dim"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (kvx.NHD, ""),
        (kvx.hnd_packed(), ""),
        ("block layer head token (kv dim)", ""),
        ("kv[K: | block head dim/x token dim%x; V: | block head dim token]", ""),
        ("layer | block token head dim", "has no kv axis"),
        ("layer | block head kv[K: dim token; V: token dim]", "keeps K and V in areas of one allocation, kv[...] without `|`"),
        ("block | layer kv token head dim", "has an allocation for each block"),
        ("block layer kv | token head dim", "has an allocation for each block"),
        ("kv | block head token/x dim token%x", "splits token"),
        ("kv[K: | block head token dim; V: | block head token/8 dim token%8]", "splits token"),
        ("block head/2 kv token head%2 dim", "splits head"),
        ("kv | block head dim%8 token dim/8", "has dim%x outside dim/x"),
    ],
)
def test_what_ops_cannot_address_is_said(text, why):
    assert Layout.parse(text).unsupported_by_ops == why


def test_axes_of_a_fusion():
    assert Layout.parse("block token head (kv dim)").planes["v"].dims[-1] == (Axis("kv"), Axis("dim"))


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
        "`token` must stand here once, or as `token/8 ... token%8`",
    ),
    (
        "kv | block token dim",
        "^^^^^^^^^^^^^^^^^^^^",
        "`head` must stand here once, or as `head/8 ... head%8`",
    ),
    (
        "kv | block kv token head dim",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`kv` stands here twice",
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
        "layer kv[K: | block token head dim]",
        "      ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "kv[...] is written kv[K: axes; V: axes], and is the last thing",
    ),
    (
        "kv[K: | block head token; V: | block head dim token]",
        "     ^^^^^^^^^^^^^^^^^^^",
        "`dim` must stand here once, or as `dim/8 ... dim%8`",
    ),
    (
        "kv[K: | block head dim token; V: | block head dim]",
        "                                ^^^^^^^^^^^^^^^^^",
        "`token` must stand here once, or as `token/8 ... token%8`",
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
        "kv | block/2 token block%2 head dim",
        "     ^^^^^^^",
        "only token, head and dim can be split; block cannot",
    ),
    (
        "layer/2 kv | block token head dim",
        "^^^^^^^",
        "only token, head and dim can be split; layer cannot",
    ),
    (
        "block token head (kv/2 dim)",
        "                  ^^^^",
        "only token, head and dim can be split; kv cannot",
    ),
    (
        "kv | block head token/0 dim token%0",
        "                ^^^^^^^",
        "a split by 0",
    ),
    (
        "kv | block head/y token head%y dim",
        "           ^^^^^^",
        'unknown axis "head/y"',
    ),
    (
        "token | block kv head dim",
        "^^^^^^",
        "only whole layer, kv and block axes can stand left of `|`",
    ),
    (
        "head/2 | block kv token head%2 dim",
        "^^^^^^^",
        "only whole layer, kv and block axes can stand left of `|`",
    ),
    (
        "layer | block | token head kv dim",
        "              ^",
        "one `|` at most, outside parentheses",
    ),
    (
        "layer kv | layer block token head dim",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`layer` stands here twice",
    ),
    (
        "kv | block head token/8 dim token%4",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`token` must stand here once, or as `token/8 ... token%8`",
    ),
    (
        "kv | block head token/8 dim token",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`token` must stand here once, or as `token/8 ... token%8`",
    ),
    (
        "kv | block head/2 token dim",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`head` must stand here once, or as `head/8 ... head%8`",
    ),
    (
        "kv | block head head%2 token dim",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`head` must stand here once, or as `head/8 ... head%8`",
    ),
    (
        "block kv | block token head dim",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`block` must stand here exactly once",
    ),
    (
        "kv | block token head (dim/8 dim%8)",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "`dim` is the last axis of the parentheses it stands in",
    ),
    (
        "kv block kv[K: token head dim; V: head token dim]",
        "^^^^^^^^^",
        "`kv` stands before kv[...] already",
    ),
    (
        "kv | kv[K: block token head dim; V: block head token dim]",
        "^^^^^",
        "`kv` stands before kv[...] already",
    ),
    (
        "block (head kv[K: dim token; V: token dim])",
        "      ^",
        "this parenthesis is not closed",
    ),
    (
        "kv[K: | block head token dim; V: | block token head dim] layer",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "kv[...] is written kv[K: axes; V: axes], and is the last thing",
    ),
    (
        "kv[V: | block head token dim; K: | block token head dim]",
        "^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "kv[...] is written kv[K: axes; V: axes], and is the last thing",
    ),
    (
        "kv[K: layer | block head dim token; V: | block head dim token]",
        "     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "what chooses an allocation stands before kv[...]",
    ),
    (
        "block head kv[K: | dim token; V: | token dim]",
        "^^^^^^^^^^^",
        "only layer and block can choose an allocation",
    ),
    (
        "block kv[K: | token head dim; V: head token dim]",
        "      ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "K and V all begin with `|`, or none does",
    ),
    (
        "layer | block head kv[K: dim token; V: token dim head]",
        "                                      ^^^^^^^^^^^^^^^",
        "`head` must stand here once, or as `head/8 ... head%8`",
    ),
    (
        "layer | block kv[K: head dim token; V: head token/2 dim]",
        "                                      ^^^^^^^^^^^^^^^^^",
        "`token` must stand here once, or as `token/8 ... token%8`",
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
    tight, loose = (Layout.parse(f"layer{bar}kv[K: block token head dim; V: block head token dim]") for bar in ("|", " | "))
    assert tight.has_layer
    assert tight.planes == loose.planes


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, str, str]:
    """(text, axes left of the bar, dimensions): axes in any order, each split or whole, neighbours fused at random."""
    outside = draw(st.lists(st.sampled_from(["layer", "kv", "block"]), unique=True))
    inside = [name for name in ("layer", "kv") if name not in outside and draw(st.booleans())]
    inside += [] if "block" in outside else ["block"]
    may_split = "kv" not in inside  # kv is not fused with a split dim
    for name in ("token", "head", "dim"):
        factor = draw(st.sampled_from(["2", "16", "x"]))
        inside += [f"{name}/{factor}", f"{name}%{factor}"] if may_split and draw(st.booleans()) else [name]
    dims: list[list[str]] = []
    for axis in draw(st.permutations(inside)):
        may_fuse = dims and not dims[-1][-1].startswith("dim") and "layer" not in (axis, dims[-1][-1])
        if may_fuse and draw(st.booleans()):
            dims[-1].append(axis)
        else:
            dims.append([axis])
    text = " ".join(f"({' '.join(dim)})" if len(dim) > 1 else dim[0] for dim in dims)
    return " ".join([*outside, "|", text]) if outside else text, " ".join(outside), text


@given(layouts())
def test_any_order_of_axes_is_read_as_written(case):
    text, outside, dims = case
    layout = Layout.parse(text)
    assert layout.num_buffers == 1 + ("kv" in outside.split())
    assert {(left(plane), show(plane.dims)) for plane in layout.planes.values()} == {(outside, dims)}


@given(layouts(), st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda w: w not in AXES), st.data())
def test_an_unknown_word_is_marked_where_it_stands(case, word, data):
    text = case[0]
    at = data.draw(st.sampled_from([m.start() for m in re.finditer(r"[a-z]{2,}", text)]))
    text = f"{text[:at]}{word} {text[at:]}"
    with pytest.raises(kvx.LayoutError) as refused:
        Layout.parse(text)
    first, shown, marks, _ = str(refused.value).split("\n")
    assert first == f'layout: unknown axis "{word}"'
    assert shown == "  " + text
    assert marks == "  " + " " * at + "^" * len(word)
