"""What options of several commands have in common: checked before anything slow begins, and refused by their names."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import typer

from kvx.ops import backend as backends


def check_positive(option: str, value: float) -> None:
    if not value > 0:  # nor NaN
        raise typer.BadParameter(f"{value:g}; it must be more than 0", param_hint=option)


def check_device(device: str, option: str = "--device") -> None:
    """Raise unless ops run there: cpu, or cuda where a GPU and its driver are."""
    reason = backends.reason_missing(device) if device in ("cpu", "cuda") else "devices are cpu and cuda"
    if reason is None and device == "cuda" and not torch.cuda.is_available():
        reason = "libkvx sees a GPU and torch does not: this torch is built without CUDA, or CUDA_VISIBLE_DEVICES hides it"
    if reason is not None:
        raise typer.BadParameter(f"{device}: {reason}. `kvx doctor` says more", param_hint=option)


def refuse_ignored(context: typer.Context, why: str, *names: str) -> None:
    """Raise where one of these was given, which would do nothing."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"{why}. Leave it out", param_hint=f"--{name.replace('_', '-')}")


def check_folder(option: str, folder: Path | None) -> None:
    """Raise unless files can be made in it. None: there is no such folder."""
    if folder is not None and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder. Make it, or name another", param_hint=option)
    if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{folder} cannot be written into. Name another", param_hint=option)


def make_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be made: {error.strerror}. Name another", param_hint=option) from None
    check_folder(option, folder)


def check_new_folder(option: str, folder: Path) -> None:
    """Raise unless it can be made where it is said to be."""
    if folder.exists():
        raise typer.BadParameter(f"{folder} is there already. Name another", param_hint=option)
    if not folder.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {folder.parent} to put it in. Make that first", param_hint=option)
    check_folder(option, folder.parent)
