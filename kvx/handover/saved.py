"""A handover in a folder: its manifest, and a file for each part. It appears under its name when it is whole, or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kvx.errors import BadArgument, Incompatible
from kvx.files import load as load_cache
from kvx.files import save as save_cache
from kvx.handover.handover import Handover, from_manifest

_MANIFEST = "handover.json"


def save(path: str | Path, handover: Handover) -> None:
    """Write it to a folder that is not there yet."""
    path = Path(path)
    if path.exists():
        raise BadArgument(f"save(): {path} is there already. Give a name of its own.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        for n, part in enumerate(handover.parts):
            save_cache(partial / f"part{n}.safetensors", list(part.buffers), part.spec, check=False)
        (partial / _MANIFEST).write_text(handover.to_json())
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(path: str | Path, *, model: str = "") -> Handover:
    """Read a folder that save() wrote, and check its content. `model`: refuse another's."""
    path = Path(path)
    try:
        text = (path / _MANIFEST).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"load(): {path} has no readable {_MANIFEST}; kvx.handover.save() writes it. {error}") from None
    told = from_manifest(text, _Later())  # type: ignore[arg-type]  # the buffers come once the manifest is known to be whole
    if model and told.model != model:
        raise Incompatible(f"load(): {path} is of model {told.model!r}; here it is {model!r}. It was not read.")
    files = [load_cache(path / f"part{n}.safetensors", expect=p.spec) for n, p in enumerate(told.parts)]
    handover = from_manifest(text, [f.buffers for f in files])
    handover.check()
    return handover


class _Later:
    def __getitem__(self, part: int) -> tuple[()]:
        return ()
