"""The verb completion: a script that lets bash or zsh complete our command lines.

Idea: everything the script offers is read off the verbs' own parsers and the schema when it is printed, so there is no
second list to keep. Only runs are looked up when a word is completed.

Contract: as in `flatout.cli`. The script is one function that prints candidates, in the language that both shells
share, and a few lines for each shell that hand them over. A candidate that ends in `=` is not followed by a space.
"""

import argparse
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flatout.config.catalogue import shipped_names
from flatout.config.facts import field_facts, options_of, spot_at
from flatout.config.sizes import LONG_SIZES, size_names
from flatout.front.words import Parser, described

SHELLS = ("bash", "zsh")
_FILES = "@files"  # stands for the files that are there
Verb = Callable[[list[str]], int]


def completion(words: list[str], verbs: Mapping[str, Verb]) -> int:
    """`verbs` are those that the script completes, with the functions that make their parsers."""
    parser = Parser("completion", "Print a script that completes verbs, options, presets, settings and runs.")
    parser.add_argument("shell", choices=SHELLS, help="for which shell")
    parser.epilog = (
        "Once: flatout completion bash > ~/.local/share/bash-completion/completions/flatout, or in ~/.bashrc or "
        "~/.zshrc: source <(flatout completion bash), or zsh."
    )
    shell = parser.parse_words(words).shell
    print(_script(verbs) + (_BASH if shell == "bash" else _ZSH), end="")
    return 0


def _script(verbs: Mapping[str, Verb]) -> str:
    """The function `_flatout_candidates VERB ACTION PREVIOUS`, which prints what may come next, a line each."""
    lines = ["_flatout_candidates() {", '  case "$1" in', f"    '') {_printed([*verbs, 'help'])}; return ;;"]
    for name, function in verbs.items():
        told = described(function, [])
        if told.actions:
            lines.append(f"    {name})")
            lines.append(f'      if [ -z "$2" ]; then {_printed(told.actions)}; {"" if told.parser else "return; "}fi')
            lines.append('      case "$2" in')
            for action in told.actions:
                lines += _context(action, described(function, [action]).parser, "        ")
            lines.append("      esac")
            lines += [] if told.parser is None else _body(told.parser, "      ")
            lines.append("      ;;")
        else:
            lines += _context(name, told.parser, "    ")
    lines += ["  esac", "}", "", *_values(), ""]
    return "\n".join([_HEAD, *lines]) + "\n"


def _context(name: str, parser: Parser | None, indent: str) -> list[str]:
    body = [] if parser is None else _body(parser, f"{indent}  ")
    return [f"{indent}{name})", *body, f"{indent}  return ;;"]


def _body(parser: Parser, indent: str) -> list[str]:
    """What a verb takes: values after an option that wants one, else options and its other words."""
    after: dict[str, list[str]] = {}
    options: list[str] = []
    others: list[str] = []
    for action in parser._actions:
        if action.option_strings:
            options += [option for option in action.option_strings if option.startswith("--")]
            if action.nargs != 0 and not isinstance(action, argparse._HelpAction):
                after.setdefault(_values_of(action), []).extend(action.option_strings)
        else:
            others.append(_values_of(action))
    lines = [f'{indent}case "$3" in'] if after else []
    lines += [f"{indent}  {'|'.join(names)}) {values or ':'}; return ;;" for values, names in after.items()]
    lines += [f"{indent}esac"] if after else []
    lines += [f"{indent}{values}" for values in dict.fromkeys(others) if values]
    if parser.get_default("overrides") is not None:
        lines.append(f"{indent}_flatout_settings")
    return [*lines, f"{indent}{_printed(options)}"]


def _values_of(action: argparse.Action) -> str:
    """The command that prints the values of an option or of a word."""
    kind = (action.metavar if isinstance(action.metavar, str) else "") or action.dest
    if action.choices is not None:
        return _printed(action.choices)
    if action.dest == "hardware":
        return _printed(["auto", *shipped_names("hardware")])
    if action.dest == "size":
        return _printed([*LONG_SIZES, *size_names()])
    if action.dest == "resume":
        return f"{_printed(['auto'])}; _flatout_runs"
    if action.dest in ("run", "runs", "RUN"):
        return f"_flatout_runs; {_printed([_FILES])}"
    if action.dest in ("config", "config_option", "preset"):
        return f"{_printed(shipped_names('preset'))}; {_printed([_FILES])}"
    if any(word in kind.upper() for word in ("FILE", "FOLDER", "MODEL", "PICTURE")):
        return _printed([_FILES])
    return ""


def _values() -> list[str]:
    """Settings, and the words that one is chosen from."""
    lines = ["_flatout_settings() {", f"  {_printed(f'{path}=' for path in field_facts())}", "}", ""]
    lines += ["_flatout_choices() {", '  case "$1" in']
    by_words: dict[tuple[str, ...], list[str]] = {}
    for path, field in field_facts().items():
        options = options_of(spot_at(path.split(".")).described)
        known: list[Any] = [value for option in options for value in option.get("enum", [])]
        known += ["true", "false"] if field.annotation is bool else []
        if known:
            by_words.setdefault(tuple(map(str, known)), []).append(path)
    lines += [f"    {'|'.join(paths)}) {_printed(known)} ;;" for known, paths in by_words.items()]
    files = ["data.source", "data.folder", "data.validation", "chat.source", "chat.validation", "output.folder"]
    return [
        *lines,
        f"    {'|'.join([*files, 'model.init_from', 'lora.init_from'])}) {_printed([_FILES])} ;;",
        "  esac",
        "}",
    ]


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
  if [ "$word" = = ]; then
    found=$(_flatout_choices "$before") word=
  elif [ "$before" = = ]; then
    found=$(_flatout_choices "${COMP_WORDS[COMP_CWORD-2]}")
  else
    found=$(_flatout_candidates "$verb" "$action" "$before")
  fi
  COMPREPLY=()
  while IFS= read -r line; do
    if [ "$line" = @files ]; then
      compopt -o filenames 2>/dev/null
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$word")
    else
      case "$line" in ?*) case "$line" in "$word"*) COMPREPLY+=("$line") ;; esac ;; esac
    fi
  done <<< "$found"
  if [ "${#COMPREPLY[@]}" -eq 1 ]; then
    case "${COMPREPLY[0]}" in *=) compopt -o nospace 2>/dev/null ;; esac
  fi
}
complete -F _flatout flatout
"""
_ZSH = """\
_flatout() {
  local verb= action= key
  local -a found
  (( CURRENT < 3 )) || verb=${words[2]}
  (( CURRENT < 4 )) || action=${words[3]}
  if [[ ${words[CURRENT]} == *=* ]]; then
    key=${words[CURRENT]%%=*}
    compset -P '*='
    found=("${(@f)$(_flatout_choices $key)}")
  else
    found=("${(@f)$(_flatout_candidates "$verb" "$action" "${words[CURRENT-1]}")}")
  fi
  compadd -S '' -- ${(M)found:#*=}
  compadd -- ${${found:#*=}:#@files}
  [[ -z ${(M)found:#@files} ]] || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _flatout flatout
"""
