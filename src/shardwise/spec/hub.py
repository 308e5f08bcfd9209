"""Models by their name on the Hugging Face hub, found in this machine's cache of it. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
#: A file that every folder of a model has, and one that every folder of a fast tokenizer has.
_FILES = ("config.json", "tokenizer.json")


def local_folder(name: str | Path) -> Path:
    """The folder that ``name`` means: the path, or of a name on the hub such as ``Qwen/Qwen3-8B`` its cached snapshot.

    A path that exists is always that path. The cache is where ``huggingface_hub`` keeps it (``HF_HUB_CACHE``,
    ``HF_HOME``), and the snapshot that of the branch ``main`` when it was fetched last. A name that is not in the cache
    is returned as a path, which does not exist.
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
    """Whether ``name`` has the form of a model's name on the hub: an organisation and a name."""
    return _NAME.fullmatch(name) is not None and not name.startswith((".", "~", "runs/"))


def hub_name(folder: Path) -> str | None:
    """The name of the model whose snapshot ``folder`` is; ``None`` where it is not one of the cache."""
    owner = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not owner.startswith("models--"):
        return None
    return owner.removeprefix("models--").replace("--", "/", 1)


def folder_name(folder: Path) -> str:
    """The name of the model in ``folder``: the folder's name, or the model's on the hub without its organisation."""
    return (hub_name(folder) or folder.resolve().name).rpartition("/")[2]


def how_to_fetch(name: str) -> str:
    """The advice on fetching a folder, for the message that it is missing."""
    return f"`hf download {name}` fetches it" if is_hub_name(name) else "nothing is downloaded"
