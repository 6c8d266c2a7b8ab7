"""Experts from the command line, and the mini-world's experts as an endpoint.

    rivet experts serve [--port PORT]     serve the mini-world's experts until stopped
    rivet experts check experts.yaml      ask every configured endpoint one question

`start_miniworld_experts` is what stages use: the same server as a child process.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from data.miniworld.experts import EXPERTS
from rivet.experts.config import ExpertConfig, ExpertsFileError, load_experts
from rivet.experts.server import ServerError, run_server
from rivet.experts.server_process import start_server

if TYPE_CHECKING:
    from rivet.experts.pool import CheckResult, ExpertPool


def miniworld_configs(base_url: str) -> list[ExpertConfig]:
    """The mini-world's experts, in the order of their cards, served at a base URL."""
    return [
        ExpertConfig(
            name=expert.name,
            skill=expert.skill,
            model=expert.name,
            base_urls=(base_url,),
            timeout_s=30.0,
            max_concurrency=64,
            max_tokens=256,
            send_seed=True,
        )
        for expert in EXPERTS.values()
    ]


@contextmanager
def start_miniworld_experts(*, timeout_s: float = 60.0) -> Iterator[list[ExpertConfig]]:
    """Serve the mini-world's experts in a child process; gives what an `ExpertPool` takes.

    Raises:
        ServerError: The server did not come up.
    """
    command = [sys.executable, "-m", "stages.experts", "serve", "--parent", "{parent}"]
    with start_server(command, timeout_s=timeout_s) as server:
        yield miniworld_configs(server.base_url)


@contextmanager
def open_experts(experts: str) -> Iterator[ExpertPool]:
    """The experts of a file, or with `embedded` the mini-world's own, served while this is open."""
    from rivet.experts.pool import ExpertPool  # slow to import; serving does without it

    if experts == "embedded":
        with start_miniworld_experts() as configs:
            yield ExpertPool(configs)
    else:
        yield ExpertPool(load_experts(experts))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet experts`. Returns 0 if all is well, 1 if something failed, 2 for bad usage."""
    arguments = _parser().parse_args(argv)
    if arguments.action == "serve":
        return _serve(arguments.port, arguments.parent)
    return _check(arguments.file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rivet experts", description="Serve or check experts.")
    actions = parser.add_subparsers(dest="action", required=True)
    serve = actions.add_parser("serve", help="serve the mini-world's experts on 127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="port; 0 picks a free one (default)")
    serve.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    check = actions.add_parser("check", help="ask every endpoint of an experts file one question")
    check.add_argument("file", help="the experts file (YAML)")
    return parser


def _serve(port: int, parent_pid: int | None) -> int:
    functions = {name: expert.reply for name, expert in EXPERTS.items()}
    try:
        run_server(functions, port=port, parent_pid=parent_pid)
    except ServerError as error:
        print(f"rivet experts serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _check(path: str) -> int:
    from rivet.experts.pool import ExpertPool  # slow to import; serving does without it

    async def ask_all(configs: list[ExpertConfig]) -> list[CheckResult]:
        async with ExpertPool(configs) as pool:
            return await pool.check()

    try:
        configs = load_experts(path)
    except ExpertsFileError as error:
        print(f"rivet experts check:\n{error}", file=sys.stderr)
        return 2
    results = asyncio.run(ask_all(configs))
    for result in results:
        print(_line(result))
    failed = sum(result.reply.status != "ok" for result in results)
    print(f"{len(results) - failed} of {len(results)} endpoints answered")
    return 1 if failed else 0


def _line(result: CheckResult) -> str:
    reply = result.reply
    head = f"{reply.name:<16} {reply.status:<14} {reply.latency_s * 1000:7.0f} ms"
    if reply.status == "ok":
        tokens = f"{reply.prompt_tokens}+{reply.completion_tokens} tokens"
        metered = tokens if reply.completion_tokens else "no usage reported"
        return f"{head}  {metered}, ${reply.cost_usd:.6f}  {result.base_url}"
    return f"{head}  {reply.detail}  {result.base_url}"


if __name__ == "__main__":
    sys.exit(main())
