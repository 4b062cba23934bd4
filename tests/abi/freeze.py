"""Structs of include/kvx_abi.h that tests/abi/layout.c does not freeze yet, frozen: python -m tests.abi.freeze adds their lines.

It only adds at the end. A number that layout.c has stays: it changes together with the major version, and by hand.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

HEADER = Path(__file__).resolve().parents[2] / "include" / "kvx_abi.h"
LAYOUT = Path(__file__).resolve().parent / "layout.c"


def fields(header: str) -> dict[str, list[str]]:
    """The fields of every struct, in order."""
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    found = re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", header, re.S)
    return {struct: re.findall(r"(\w+)(?:\[\w+\])?;", body) for struct, body in found}


def lines(structs: dict[str, list[str]], header: Path = HEADER) -> str:
    """What layout.c says of these structs, as the C compiler lays them out."""
    source = [f'#include "{header}"', "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    for struct, names in structs.items():
        source += [rf'  printf("\nSTRUCT({struct}, %zu);\n", sizeof({struct}));']
        source += [
            rf'  printf("FIELD({struct}, {name}, %zu, %zu);\n", offsetof({struct}, {name}), sizeof((({struct}*)0)->{name}));'
            for name in names
        ]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "layout")
        Path(folder, "layout.c").write_text("\n".join([*source, "  return 0;", "}", ""]))
        subprocess.run([*os.environ.get("CC", "cc").split(), f"{program}.c", "-o", program], check=True)
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout


def freeze(layout: str, header: Path = HEADER) -> str:
    """layout.c with the structs it lacks."""
    new = {struct: names for struct, names in fields(header.read_text()).items() if f"STRUCT({struct}, " not in layout}
    return layout.rstrip("\n") + "\n" + lines(new, header) if new else layout


if __name__ == "__main__":
    before = LAYOUT.read_text()
    after = freeze(before)
    LAYOUT.write_text(after)
    print(f"{after.count('STRUCT(') - before.count('STRUCT(')} structs added to {LAYOUT}")
