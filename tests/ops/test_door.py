"""The door's other ways in: a torch without the DLPack exchange function, and a package without its library."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_EXCHANGE = """
import torch
from kvx.ops import native
native.LIB.kvx_door_init(*[None] * 6)  # what _open() does where torch has no exchange function
native.IS_EXCHANGED = False
from tests import cases, compare
for case in (*cases.PLAIN, *cases.QUANTISED, *cases.SHAPES):
    made = case.make("cpu", torch.Generator().manual_seed(0))
    want = made.clone()
    want.write("torch")
    made.write("cpu")
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor, want.tensors()[name], str(case))
    if case.lens:
        for got, expected in zip(made.gather("cpu"), want.gather("torch"), strict=True):
            compare.bitwise(got, expected, str(case))
import kvx
from tests.ops import layouts
spec = kvx.CacheSpec(8, 4, 2, 8, num_layers=3, layout="layer | block token head (kv dim)")
src, got, want = (layouts.random_buffers(spec, seed) for seed in (0, 1, 1))
plan = kvx.plan(spec, spec)
for ids in ([1, 5], torch.tensor([[2, 7], [3, 6]]), [4]):
    lens = torch.tensor([3] * len(ids)) if torch.is_tensor(ids) else None
    for out, backend in ((got, "cpu"), (want, "torch")):
        kvx.convert(src, out, plan=plan, src_blocks=ids, dst_blocks=ids, seq_lens=lens, backend=backend)
    for x, y in zip(got, want, strict=True):
        compare.bitwise(x, y)
print("same")
"""

WITHOUT_LIBRARY = """
import pathlib, warnings
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: not path.name.startswith("libkvx") and exists(path)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import kvx
    kvx.write  # the first op that is named
assert any("libkvx is not built" in str(w.message) for w in said), said
import torch
spec = kvx.CacheSpec(2, 4, 1, 8, format="f32")
cache = kvx.allocate(spec).cache
k = torch.randn(1, 1, 8)
kvx.write(cache, k, -k, slot_mapping=torch.tensor([5]), spec=spec)
assert torch.equal(cache[0][1, 1], k[0])
out, _ = kvx.gather(cache, kvx.PackedTable(torch.tensor([[1]]), torch.tensor([2])), spec=spec)
assert torch.equal(out[0, 1], k[0])
try:
    kvx.write(cache, k, k, slot_mapping=torch.tensor([5]), spec=spec, backend="cpu")
except kvx.Unsupported as error:
    print(error)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensors_described_in_python_give_the_same_results():
    assert "same" in run(WITHOUT_EXCHANGE)


def test_without_the_library_torch_does_everything_and_says_so():
    assert "make build" in run(WITHOUT_LIBRARY)
