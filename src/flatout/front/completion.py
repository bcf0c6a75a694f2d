"""A script that lets bash or zsh complete our command lines.

Idea: everything the script offers is read off the table of commands and the schema when it is printed, so there is no
second list to keep. Only runs are looked up when a word is completed.

Contract: the script is one function that prints candidates, in the language that both shells share, and a few lines for
each shell that hand them over. A candidate that ends in `=` is not followed by a space. Where there is no candidate,
the shell completes names of files.
"""

import shlex
from collections.abc import Iterable, Sequence

from flatout.config.catalogue import shipped_names
from flatout.config.facts import field_facts
from flatout.config.sizes import LONG_SIZES, size_names
from flatout.front.words import Command, Option

SHELLS = ("bash", "zsh")


def script(shell: str, commands: Sequence[Command]) -> str:
    """The script for one of SHELLS: the function `_flatout_candidates VERB ACTION PREVIOUS` prints what may come next,
    a line each."""
    verbs = [command for command in commands if " " not in command.name]
    names = [verb.name for verb in verbs]
    lines = ["_flatout_candidates() {", '  case "$1" in', f"    '') {_printed([*names, 'help'])}; return ;;"]
    for verb in verbs:
        actions = {one.name.partition(" ")[2]: one for one in commands if one.name.startswith(f"{verb.name} ")}
        lines.append(f"    {verb.name})")
        if actions:
            lines.append(f'      [ -n "$2" ] || {_printed(actions)}')
            lines.append('      case "$2" in')
            for name, action in actions.items():
                lines += [f"        {name})", *_body(action, "          "), "          return ;;"]
            lines.append("      esac")
        lines += [*_body(verb, "      "), "      return ;;"]
    settings = ["_flatout_settings() {", f"  {_printed(f'{path}=' for path in field_facts())}", "}", ""]
    return "\n".join([_HEAD, *lines, "  esac", "}", "", *settings]) + "\n" + (_BASH if shell == "bash" else _ZSH)


def _body(command: Command, indent: str) -> list[str]:
    """What a command takes: values after an option that wants one, else options and its other words."""
    after: dict[str, list[str]] = {}
    for option in command.options:
        if not option.by_place and option.more.get("action") != "store_true":
            after.setdefault(_values_of(option), []).extend(option.names)
    lines = [f'{indent}case "$3" in'] if after else []
    lines += [f"{indent}  {'|'.join(names)}) {values or ':'}; return ;;" for values, names in after.items()]
    lines += [f"{indent}esac"] if after else []
    others = dict.fromkeys(_values_of(option) for option in command.options if option.by_place)
    lines += [f"{indent}{values}" for values in others if values]
    if command.takes_config:
        lines.append(f"{indent}_flatout_settings")
    options = [name for option in command.options if not option.by_place for name in option.names]
    return [*lines, f"{indent}{_printed([*options, '--help'])}"] if command.run is not None else lines


def _values_of(option: Option) -> str:
    """The command that prints the values of an option or of a word."""
    name = option.names[0].lstrip("-")
    if "choices" in option.more:
        return _printed(option.more["choices"])
    if name == "hardware":
        return _printed(["auto", *shipped_names("hardware")])
    if name == "size":
        return _printed([*LONG_SIZES, *size_names()])
    if name == "resume":
        return f"{_printed(['auto'])}; _flatout_runs"
    if name in ("run", "runs"):
        return "_flatout_runs"
    if name in ("config", "preset"):
        return _printed(shipped_names("preset"))
    return _printed(field_facts()) if name == "field" else ""


def _printed(words: Iterable[str]) -> str:
    return "printf '%s\\n' " + " ".join(shlex.quote(word) for word in words)


_HEAD = """\
# Completion of flatout's command line, printed by `flatout completion`. Print it again after an update.
_flatout_runs() {
  [ -z "${ZSH_VERSION-}" ] || setopt local_options null_glob
  local run
  for run in runs/*/metrics.jsonl; do
    [ ! -f "$run" ] || printf '%s\\n' "${run%/metrics.jsonl}"
  done
}
"""
_BASH = """\
_flatout() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} verb= action= found= line
  [ "$COMP_CWORD" -lt 2 ] || verb=${COMP_WORDS[1]}
  [ "$COMP_CWORD" -lt 3 ] || action=${COMP_WORDS[2]}
  # Readline takes `a.b=c` for three words.
  case "$word$before" in *=) return ;; esac
  found=$(_flatout_candidates "$verb" "$action" "$before")
  COMPREPLY=()
  while IFS= read -r line; do
    case "$line" in ?*) case "$line" in "$word"*) COMPREPLY+=("$line") ;; esac ;; esac
  done <<< "$found"
  if [ "${#COMPREPLY[@]}" -eq 1 ]; then
    case "${COMPREPLY[0]}" in *=) compopt -o nospace 2>/dev/null ;; esac
  fi
}
complete -o default -F _flatout flatout
"""
_ZSH = """\
_flatout() {
  local verb= action=
  local -a found
  (( CURRENT < 3 )) || verb=${words[2]}
  (( CURRENT < 4 )) || action=${words[3]}
  compset -P '*=' || found=("${(@f)$(_flatout_candidates "$verb" "$action" "${words[CURRENT-1]}")}")
  compadd -S '' -- ${(M)found:#*=}
  compadd -- ${found:#*=} || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _flatout flatout
"""
