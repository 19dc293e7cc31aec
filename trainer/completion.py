"""Tab completion in bash for ``python -m trainer``. Hydra's own knows scripts only, but answers the same queries."""

from __future__ import annotations

import os

COMMAND = "-m trainer"

SCRIPT = """\
_midflight_completion() {
    [[ "$COMP_LINE" =~ ^[^[:space:]]+[[:space:]]+-m[[:space:]]+trainer[[:space:]] ]] || return
    local word="${COMP_WORDS[COMP_CWORD]}" choices
    choices="$(COMP_POINT=$COMP_POINT COMP_LINE="$COMP_LINE" "$1" -m trainer -sc query=bash)"
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _midflight_completion python python3 .venv/bin/python
"""


def wanted(arguments: list[str]) -> bool:
    """Whether the command line is one that the shell sends."""
    return bool({"-sc", "--shell-completion"} & set(arguments))


def prepare(arguments: list[str]) -> str | None:
    """The script to print for ``install=bash``; for a query ``None``, and Hydra finds a line that it understands."""
    if "install=bash" in arguments:
        return SCRIPT
    line = os.environ.get("COMP_LINE", "")
    _, found, rest = line.partition(f" {COMMAND} ")
    if found:
        os.environ["COMP_LINE"] = f"trainer {rest}"
        os.environ["COMP_POINT"] = str(len(f"trainer {rest}"))
    return None
