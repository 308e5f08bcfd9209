"""Models by their name on the Hugging Face hub, found in the local cache. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
#: Files by which a cached snapshot is found: every model has the first, every fast tokenizer the second.
_FILES = ("config.json", "tokenizer.json")


def local_folder(name: str | Path) -> Path:
    """The folder of a path, or the cached snapshot of a name on the hub such as ``Qwen/Qwen3-8B``.

    An existing path takes precedence. The cache is that of ``huggingface_hub`` (``HF_HUB_CACHE``, ``HF_HOME``), and the
    snapshot is the one last fetched from the branch ``main``. A name that is not in the cache is returned as a path,
    which does not exist.
    """
    path = Path(name).expanduser()
    if path.exists() or not is_hub_name(str(name)) or importlib.util.find_spec("huggingface_hub") is None:
        return path
    from huggingface_hub import try_to_load_from_cache

    for file in _FILES:
        found = try_to_load_from_cache(str(name), file)
        if isinstance(found, str):
            return Path(found).parent
    return path


def is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form ``organisation/name`` of a name on the hub."""
    return _NAME.fullmatch(name) is not None and not name.startswith((".", "~", "runs/"))


def hub_name(folder: Path) -> str | None:
    """The hub name of the model whose cached snapshot is ``folder``; ``None`` if ``folder`` is not a snapshot."""
    owner = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not owner.startswith("models--"):
        return None
    return owner.removeprefix("models--").replace("--", "/", 1)


def folder_name(folder: Path) -> str:
    """The name of the model in ``folder``: its hub name without the organisation, or the folder's name."""
    return (hub_name(folder) or folder.resolve().name).rpartition("/")[2]


def how_to_fetch(name: str) -> str:
    """The advice about downloading a model, for the message that its folder does not exist."""
    return f"`hf download {name}` fetches it" if is_hub_name(name) else "nothing is downloaded"
