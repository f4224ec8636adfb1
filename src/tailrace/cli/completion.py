"""``tailrace completion``: the completion script of a shell."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from tailrace.cli.session import flush_output, write_output

_HELP: Final = """Print a script that makes a shell complete commands, flags and the values of flags.

For example:

    tailrace completion bash > ~/.local/share/bash-completion/completions/tailrace

    tailrace completion zsh > ~/.zfunc/_tailrace

    tailrace completion fish > ~/.config/fish/completions/tailrace.fish

The directory has to exist. For zsh, `~/.zshrc` needs `fpath+=~/.zfunc; autoload -Uz compinit; compinit`.
In bash, `source <(tailrace completion bash)` needs no file.
"""

_ZSH_CALL: Final = """
if [[ "${funcstack[1]}" == "_tailrace" ]]; then
  _tailrace "$@"
else
  compdef _tailrace tailrace
fi
"""

command = App(name="completion", help=_HELP, help_format="markdown")


@command.default
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.")],
    /,
) -> None:
    from tailrace.cli.app import build

    script = build([]).generate_completion(prog_name="tailrace", shell=shell)
    if shell == "zsh":
        # The file works as `_tailrace` on the fpath; the rest makes `source` work as well.
        script = script.replace("_cyclopts_tailrace", "_tailrace") + _ZSH_CALL
    write_output(script.encode())
    flush_output()
