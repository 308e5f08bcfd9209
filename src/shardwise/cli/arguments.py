"""Arguments that typer cannot parse by itself."""

from __future__ import annotations

from collections.abc import Sequence

_CONFIG_ENDINGS = (".yaml", ".yml", ".toml")


def fill_in_resume(arguments: Sequence[str]) -> list[str]:
    """Give a bare ``--resume`` its value ``latest``.

    A following word is its value unless it begins with ``-`` or ends as a configuration file does.
    """
    result: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[index:]]
        result.append(argument)
        if argument == "--resume":
            following = arguments[index + 1] if index + 1 < len(arguments) else "-"
            if following.startswith("-") or following.lower().endswith(_CONFIG_ENDINGS) or not following:
                result[-1] = "--resume=latest"
    return result


def is_configuration(argument: str) -> bool:
    """``argument`` ends as a configuration file does."""
    return argument.lower().endswith(_CONFIG_ENDINGS)
