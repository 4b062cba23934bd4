"""make wheels: the wheels of KVX in dist/, audited, and tried in an empty environment (smoke.py).

`kvx` has the Python code and libkvx for the CPU. `kvx-cu13` has a libkvx with CUDA kernels, which kvx/ops/library.py takes instead.
PyPI takes 100 MB a file: a longer list of architectures makes several wheels (kvx-cu13-sm80, ...), which kvx-cu13 then asks for.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
MAX_BYTES = 100_000_000
ARCHS_PER_WHEEL = 2  # each is about 30 MB compressed; the last one comes with PTX, another 10
LIBRARIES = ("libkvx.so", "libkvbm_kernels.so", "libkvx.json")
CPU = {"KVX_CUDA": "OFF", "KVX_REQUIRE_CUDA": ""}
VERSION = re.search(r"project\(kvx VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]


def run(*args: object, log: str | None = None, **env: str) -> None:
    """A command with this environment's tools. With `log`, what it says is in that file, and shown only when it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    out = (WORK / log).open("w+") if log else None
    done = subprocess.run(
        [str(a) for a in args], env={**os.environ, "PATH": path, **env}, stdout=out, stderr=subprocess.STDOUT if out else None
    )
    if done.returncode:
        if out:
            out.seek(0)
            sys.stderr.write(out.read())
        raise SystemExit(f"make wheels: {' '.join(map(str, args))} ended with {done.returncode}.")


def build_cpu() -> Path:
    """By pip in isolation, as anyone builds it."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run(*pip, f"--config-settings=build-dir={WORK / 'cpu'}", "--wheel-dir", WORK / "raw", ROOT, log="cpu.txt", **CPU)
    return next((WORK / "raw").glob(f"kvx-{VERSION}-*.whl"))


def split(archs: str) -> list[str]:
    """The list in pieces that fit into a wheel each."""
    if archs == "all":
        archs = re.search(r'set\(kvx_all_archs "(.+?)"\)', (ROOT / "CMakeLists.txt").read_text())[1]
    each = re.split("[,;]", archs)
    return [",".join(each[n : n + ARCHS_PER_WHEEL]) for n in range(0, len(each), ARCHS_PER_WHEEL)]


def compile_cuda(archs: str) -> Path:
    """The folder of a libkvx with kernels for these architectures. Slow; each line says which file is compiled."""
    build, prefix = WORK / f"cu13-{archs}", WORK / f"cu13-{archs}-lib"
    flags = [f"-DKVX_CUDA_ARCHS={archs}", "-DKVX_CUDA=ON", f"-DCMAKE_INSTALL_PREFIX={prefix}"]
    run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *flags)
    run("cmake", "--build", build)
    run("cmake", "--install", build, log="install.txt")
    return prefix / "kvx" / "lib"


def has_cuda(folder: Path) -> bool:
    facts = folder / "libkvx.json"
    if not facts.exists():
        raise SystemExit(f"make wheels: there is no {facts}. `make build` makes kvx/lib; CUDA_LIB names a folder like it.")
    return bool(json.loads(facts.read_text())["cuda_archs"])


def pack_cuda(folder: Path, out: Path, *, is_part: bool) -> Path:
    """A wheel of a built library. `is_part`: one of several, named by its first architecture."""
    archs = json.loads((folder / "libkvx.json").read_text())["cuda_archs"]
    sm = "sm" + re.match(r"\w+", archs)[0]
    files = {f"kvx_cu13/{sm}/{name}": (folder / name).read_bytes() for name in LIBRARIES}
    name = f"kvx-cu13-{sm}" if is_part else "kvx-cu13"
    about = f"KVX's CUDA kernels, compiled with CUDA 13 for {archs}. The package kvx finds and uses them."
    return write_wheel(out, name, about, [f"kvx=={VERSION}"], files, tag=f"linux_{platform.machine()}")


def join(wheels: list[Path], out: Path) -> Path:
    """kvx-cu13 where it is several: a wheel that holds nothing and asks for all of these."""
    needs = [f"{wheel.name.split('-')[0].replace('_', '-')}=={VERSION}" for wheel in wheels]
    return write_wheel(out, "kvx-cu13", "KVX's CUDA kernels, compiled with CUDA 13.", needs, {}, tag="any")


def write_wheel(folder: Path, name: str, about: str, needs: list[str], files: dict[str, bytes], *, tag: str) -> Path:
    """A wheel of files that are made already, which no build backend is needed for. auditwheel compresses."""
    base = f"{name.replace('-', '_')}-{VERSION}"
    info = f"{base}.dist-info"
    head = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {VERSION}",
        f"Summary: {about}",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Requires-Python: >=3.11",
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: kvx", f"Root-Is-Purelib: {str(tag == 'any').lower()}", f"Tag: py3-none-{tag}"]
    files = {
        **files,
        f"{info}/METADATA": ("\n".join(head) + "\n").encode(),
        f"{info}/WHEEL": ("\n".join(wheel) + "\n").encode(),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    digests = {n: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for n, data in files.items()}
    record = [f"{n},sha256={digests[n]},{len(data)}" for n, data in files.items()] + [f"{info}/RECORD,,"]
    path = folder / f"{base}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for n, data in {**files, f"{info}/RECORD": ("\n".join(record) + "\n").encode()}.items():
            archive.writestr(n, data)
    return path


def audit(raw: Path) -> Path:
    """Into dist/, with the libraries it needs and the oldest glibc it runs on in its name."""
    before = set(DIST.glob("*.whl"))
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, raw, log=f"{raw.stem}.txt")
    (wheel,) = set(DIST.glob("*.whl")) - before
    if "manylinux" not in wheel.name:
        raise SystemExit(f"make wheels: {wheel.name} is for this system alone. `auditwheel show {raw}` says what it needs.")
    return wheel


def smoke_test(wheels: list[Path]) -> None:
    """The first wheel and what pip gets for it, in an environment that has nothing else; then the others beside it.

    torch is that of requirements-dev.txt, as in the tests.
    """
    empty = WORK / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    run(sys.executable, "-m", "venv", empty)
    pip = [empty / "bin" / "python", "-m", "pip", "install", "--no-compile", "--quiet", "--disable-pip-version-check"]
    smoke = [empty / "bin" / "python", "-I", ROOT / "wheels" / "smoke.py"]
    run(*pip, "--constraint", ROOT / "requirements-dev.txt", wheels[0], log="pip.txt")
    run(*smoke)
    if wheels[1:]:
        run(*pip, *wheels[1:], log="pip-cu13.txt")
        run(*smoke, "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda-archs", default="", help="also compile kvx-cu13: native, all, or a list such as 80,90a")
    parser.add_argument("--cuda-lib", type=Path, help="instead, take the library of this folder, if it was built with CUDA")
    args = parser.parse_args()
    for folder in (DIST, WORK / "raw"):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("kvx*.whl"):
            old.unlink()

    wheels: list[Path] = []

    def finish(raw: Path, begin: float) -> None:
        wheel = audit(raw)
        size = wheel.stat().st_size
        print(f"{wheel.relative_to(ROOT)}: {size / 1e6:.1f} MB compressed, in {time.monotonic() - begin:.0f} s", flush=True)
        if size > MAX_BYTES:
            raise SystemExit(f"make wheels: {wheel.name} has more than {MAX_BYTES / 1e6:.0f} MB. Name fewer architectures.")
        wheels.append(wheel)

    begin = time.monotonic()
    finish(build_cpu(), begin)
    if args.cuda_lib:
        begin = time.monotonic()
        if has_cuda(args.cuda_lib):
            finish(pack_cuda(args.cuda_lib, WORK / "raw", is_part=False), begin)
        else:
            print(f"kvx-cu13 is not built: the library in {args.cuda_lib} was compiled without CUDA.", flush=True)
    elif args.cuda_archs:
        lists = split(args.cuda_archs)
        for archs in lists:
            begin = time.monotonic()
            finish(pack_cuda(compile_cuda(archs), WORK / "raw", is_part=len(lists) > 1), begin)
        if len(lists) > 1:
            wheels.append(join(wheels, DIST))
    else:
        print("kvx-cu13 is not built: make wheels KVX_CUDA=ON compiles it, where nvcc is.", flush=True)

    begin = time.monotonic()
    smoke_test(wheels)
    print(f"Tried in an empty environment, in {time.monotonic() - begin:.0f} s with what pip downloads")


if __name__ == "__main__":
    main()
