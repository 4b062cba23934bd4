"""CONTRIBUTING.md's list for a format: every format is in each of its places, and a toy one is added by it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kvx
from kvx.quant.numbers import CODES
from kvx.quant.scales import SCALES
from kvx.spec import ALL_FORMATS, DTYPES, ROW_FORMATS

ROOT = Path(__file__).resolve().parents[2]
# Where the rows go: behind one that is there.
BEHIND = {
    '        Format("fp8_e4m3_per_128", e4m3, Granularity.GROUP, f32, group_size=128),\n': (
        '        Format("toy", DTYPES["int8"], Granularity.GROUP, DTYPES["f16"], group_size=16),\n'
    ),
    '        Format("index_nvfp4", e2m1, group, e4m3, 16, rows=least_step),\n': (
        '        Format("toy_rows", e4m3, group, f32, 16, rows=RowRule(keeps_rope=True)),\n'
    ),
}
# What follows from a row alone, on the torch backend and on libkvx.
USED = """
import kvx, torch
from kvx.ops import native
from kvx.spec import ALL_FORMATS

assert "toy" in kvx.FORMATS and "toy_rows" in ALL_FORMATS
spec = kvx.CacheSpec(4, 8, 2, 32, format="toy")
assert spec.token_bytes == 2 * 2 * (32 + 2 * 2)
assert kvx.from_json(kvx.to_json(spec)) == spec
x = torch.randn(32, 2, 32, generator=torch.Generator().manual_seed(0))
slots, table = torch.arange(32), kvx.PackedTable(torch.arange(4, dtype=torch.int32)[None], torch.tensor([32], dtype=torch.int32))
stored = []
for backend in ("torch", *(["cpu"] if native.HAS_CPU else [])):
    at = kvx.allocate(spec)
    scales = {"k_scale": at.k_scale, "v_scale": at.v_scale, "backend": backend}
    kvx.write(at.cache, x, -x, slot_mapping=slots, spec=spec, **scales)
    k, v = kvx.gather(at.cache, table, spec=spec, max_seq_len=32, dtype=torch.float32, **scales)
    assert (k.reshape(32, 2, 32) - x).abs().max() < 0.03 and torch.equal(k, -v)
    stored.append(k)
assert all(torch.equal(stored[0], other) for other in stored)
row = kvx.RowCodec("toy_rows", 64, 16)
assert (row.data_bytes, row.scale_bytes) == (48 + 32, 3 * 4)
y = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
assert (row.decode(*row.encode(y)) - y).abs().max() < 0.2
print("used", kvx.__file__)
"""


def listed_places() -> list[str]:
    """The paths that the numbered list begins with."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a format")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)


def test_every_format_and_type_is_in_each_place():
    def missing(path: str, names: list[str], form: str = "{}") -> list[str]:
        text = (ROOT / path).read_text()
        return [name for name in names if not re.search(form.format(name), text)]

    rows_only = [name for name in ROW_FORMATS if name not in kvx.FORMATS]
    elements = {f.element.name for f in ALL_FORMATS.values() if f.element.is_quantised}
    scales = {f.scale.name for f in ALL_FORMATS.values() if f.scale is not None}
    header = (ROOT / "include/kvx_abi.h").read_text()
    abi = {int(code): name for name, code in re.findall(r"(KVX_DTYPE_\w+) = (\d+)", header)}
    native = [abi[t.code] for t in DTYPES.values() if t.code in abi]
    absent = {
        "kvx/spec/formats.py": [name for name in ALL_FORMATS if ALL_FORMATS[name].name != name],
        "tests/spec/test_formats.py": missing("tests/spec/test_formats.py", list(kvx.FORMATS), '"{}": Row'),
        "tests/ops/test_attention_kernels.py": [],  # which compares its list by itself
        "kvx/spec/dtypes.py": missing("kvx/spec/dtypes.py", list(DTYPES), 'DType\\("{}"'),
        "kvx/quant/numbers.py": sorted(elements - set(CODES)) + sorted(scales - set(SCALES)),
        "include/kvx_abi.h": [name for name, t in DTYPES.items() if t.code not in abi],
        "native/format.h": missing("native/format.h", native, r"case {}\b"),
        "tests/quant/test_numbers.py": missing("tests/quant/test_numbers.py", sorted(elements), '"{}"'),
    }
    assert listed_places() == list(absent)
    assert all((ROOT / path).is_file() for path in absent)
    assert not {place: names for place, names in absent.items() if names}
    assert not missing("tests/hybrid/test_rows.py", [n for n in rows_only if not n.startswith("fp8_v4")], '"{}"')


def test_toy_formats_are_added_by_the_list(tmp_path):
    """One line each in one file of the package: sizes, manifests, write, gather and rows in pages follow."""
    copy = tmp_path / "kvx"
    shutil.copytree(ROOT / "kvx", copy, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    if (ROOT / "kvx" / "lib").exists():
        (copy / "lib").symlink_to(ROOT / "kvx" / "lib")
    table = copy / "spec" / "formats.py"
    text = table.read_text()
    for row, toy in BEHIND.items():
        assert text.count(row) == 1, row
        text = text.replace(row, row + toy)
    table.write_text(text)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USED], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["used", str(copy / "__init__.py")]
    assert "toy" not in ALL_FORMATS
