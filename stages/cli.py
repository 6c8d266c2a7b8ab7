"""The `rivet` command: finds the subcommand, sets up logging, turns errors into exit codes.

    rivet COMMAND [RECIPE.yaml] [--name value ...]

Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted (resumable). An error
class of our own packages carries a message for the user and is shown without its traceback;
anything else is a bug and is shown whole, or left in the run's log.txt where there is one.
Subcommands are imported only when asked for, so that `rivet --help` answers at once.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import resource
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

# Command -> (module with `main(argv) -> int`, one line for `rivet --help`), in the usual order.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("stages.demo", "run the whole method on the mini-world, end to end"),
    "problems": ("stages.problems", "make a file of training problems, decontaminated"),
    "warmstart": ("stages.warmstart", "teach a controller the protocol from scripted dialogues"),
    "stage1": ("stages.stage1.main", "Stage I: expert-augmented RL"),
    "collect": ("stages.collect", "sample trajectories with experts into a store"),
    "solutions": ("stages.solutions", "ask the experts for whole solutions, for a baseline"),
    "stage2": ("stages.stage2.main", "Stage II: internalize verified trajectories"),
    "eval": ("stages.evaluate", "measure a checkpoint with or without experts"),
    "benchmarks": ("eval.list_benchmarks", "list the benchmarks, fetch them, write them as JSONL"),
    "contamination": ("eval.contamination", "find evaluation problems in a training set"),
    "import-gguf": ("stages.import_gguf", "save the model in a GGUF file as a checkpoint"),
    "regrade": ("eval.regrade", "grade the samples of an evaluation again, under other rules"),
    "compare": ("eval.compare", "say whether two evaluations differ, problem by problem"),
    "report": ("eval.report", "write the report of a run, with plots and trajectories"),
    "export": ("stages.export", "package a checkpoint with its card, and verify it"),
    "solve": ("stages.solve", "answer one problem with a checkpoint, without experts"),
    "serve": ("stages.serve", "serve a checkpoint: OpenAI's chat API and a web page"),
    "plan": ("stages.plan", "say what a recipe will need: memory, tokens, calls, USD, hours"),
    "study": ("stages.study", "repeat the method over seeds and settings"),
    "latent": ("stages.latent.main", "latent collaboration: learn to use experts' hidden states"),
    "latent-study": ("stages.latent.study", "every arm of latent collaboration over seeds"),
    "vllm": ("stages.vllm", "serve a checkpoint with vLLM for sampling"),
    "doctor": ("stages.doctor", "say what this machine has and lacks, and how to get it"),
    "experts": ("stages.experts", "serve the scripted experts, or check an experts file"),
}
# Enough; a hard limit can be a thousand million, and there are programs that walk through it.
_OPEN_FILES = 65536
OUR_PACKAGES = ("rivet", "stages", "eval", "data", "sandbox")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: Arguments after `rivet`; None takes those of the process.

    Returns:
        The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = argv[:1] == ["--debug"]
    if debug:
        argv.pop(0)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"rivet {version('rivet')}")
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"rivet: unknown command {command!r}{hint} (see `rivet --help`)", file=sys.stderr)
        return 2
    set_up_logging()
    raise_file_limit()
    return _run(command, rest, debug)


def raise_file_limit() -> None:
    """Let the process open as many files as it may.

    The usual 1024 are fewer than a thousand rollouts have connections to servers and experts and
    pipes to programs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with suppress(ValueError, OSError):  # some systems have a lower limit that they do not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def set_up_logging() -> None:
    """Show our own messages on stderr, on rank 0; elsewhere warnings only. Safe to call twice."""
    root = logging.getLogger()
    if not any(isinstance(handler, _ConsoleHandler) for handler in root.handlers):
        handler = _ConsoleHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    for package in OUR_PACKAGES:
        logging.getLogger(package).setLevel(level)


class _ConsoleHandler(logging.Handler):
    """Writes to stderr, above a progress bar if one is on screen."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if "tqdm" in sys.modules:
            from tqdm import tqdm

            tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr)


def _run(command: str, argv: list[str], debug: bool) -> int:
    try:
        return int(importlib.import_module(COMMANDS[command][0]).main(argv) or 0)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt as stop:
        from rivet.config_help import shown_command

        resume = shown_command(["rivet", command, *argv])
        print(f"\n{str(stop) or 'interrupted'}; resume with: {resume}", file=sys.stderr)
        return 130
    except Exception as error:
        return _explain(error, command, debug)


def _explain(error: Exception, command: str, debug: bool) -> int:
    """Print what went wrong, at the length that helps, and choose the exit code."""
    from rivet.config import ConfigError
    from rivet.files import is_disk_full

    notes = getattr(error, "__notes__", [])  # a run folder adds where its log is
    is_ours = type(error).__module__.split(".")[0] in OUR_PACKAGES
    if debug or not (is_ours or is_disk_full(error) or notes):
        traceback.print_exception(error)
    else:
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        print("\n".join([f"rivet {command}: {text}", *notes]), file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: rivet [--debug] COMMAND [RECIPE.yaml] [--name value ...]",
            "",
            "Turn collaboration with strong LLM experts into the capability of one compact model.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()),
            "",
            "`rivet COMMAND --help` lists its settings, --dry-run prints them resolved;",
            "--debug shows the traceback of every error.",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
