"""Experts from the command line, and the mini-world's experts as an endpoint.

    rivet experts check experts.yaml      ask every configured endpoint one question
    rivet experts serve                   serve the mini-world's experts until stopped
    rivet experts serve --hf MODEL_DIR    serve a local Hugging Face chat model as an expert
    rivet experts spent RUN               what a run has spent on experts so far

`start_miniworld_experts` is what stages use: the same server as a child process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from data.miniworld.experts import EXPERTS
from rivet.experts.config import ExpertConfig, ExpertList, ExpertsFileError, load_experts
from rivet.experts.server import HOST, Expert, ServerError, run_server
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
        return _serve(arguments)
    return _check(arguments.file) if arguments.action == "check" else _spent(arguments.run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="rivet experts", description="Serve or check experts."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="ask every endpoint of an experts file one question")
    check.add_argument("file", help="the experts file (YAML)")
    serve = actions.add_parser(
        "serve", help="serve the mini-world's experts, or a local model, on 127.0.0.1"
    )
    serve.add_argument("--port", type=int, default=0, help="port; 0 picks a free one (default)")
    serve.add_argument("--hf", metavar="DIR", help="folder of a Hugging Face chat model")
    serve.add_argument("--name", help="the model's name at the endpoint (default: the folder's)")
    serve.add_argument(
        "--engine",
        choices=("transformers", "vllm"),
        default="transformers",
        help="what runs the model (default: transformers)",
    )
    serve.add_argument(
        "--max-batch",
        type=int,
        default=16,
        help="questions answered at once, at least 1 (default: 16)",
    )
    serve.add_argument("--dtype", default="auto", help="format of the weights (default: theirs)")
    serve.add_argument("--device", help="such as cuda:0 (default: a GPU if there is one)")
    serve.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    spent = actions.add_parser("spent", help="what a run has spent on experts so far")
    spent.add_argument("run", help="the run's folder")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    try:
        if arguments.hf is None:
            functions: dict[str, Expert] = {name: e.reply for name, e in EXPERTS.items()}
            run_server(functions, port=arguments.port, parent_pid=arguments.parent)
            return 0
        if arguments.max_batch < 1:
            raise ServerError(f"--max-batch is {arguments.max_batch}; expected at least 1")
        name = arguments.name or re.sub(r"[^\w.-]", "-", Path(arguments.hf).resolve().name)
        if arguments.engine == "vllm":
            return _serve_with_vllm(arguments, name)
        from rivet.experts.local_model import LocalModel

        print(f"loading {arguments.hf}", file=sys.stderr)
        model = LocalModel(
            arguments.hf,
            max_batch=arguments.max_batch,
            device=arguments.device,
            dtype=arguments.dtype,
        )
        run_server({name: model}, port=arguments.port, parent_pid=arguments.parent)
    except (ServerError, ImportError) as error:
        print(f"rivet experts serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _serve_with_vllm(arguments: argparse.Namespace, name: str) -> int:
    """Run vLLM's own server, until it or the shell that started it ends."""
    from rivet.rollout import vllm_guard
    from rivet.rollout.vllm_process import (
        VLLMNotFoundError,
        find_python,
        free_port,
        set_environment,
    )

    try:
        python = find_python()
    except VLLMNotFoundError as error:
        raise ServerError(str(error)) from error
    port = arguments.port or free_port(HOST)
    set_environment()
    command = vllm_command(
        python, arguments.hf, name, port, dtype=arguments.dtype, max_batch=arguments.max_batch
    )
    print(f"base_url http://{HOST}:{port}/v1, models {name}, once it is loaded", file=sys.stderr)
    return vllm_guard.run(command, port=port, parent_pid=arguments.parent or os.getppid())


def vllm_command(
    python: str, folder: str, name: str, port: int, *, dtype: str, max_batch: int
) -> list[str]:
    """The command line of vLLM's server for a chat model that is only asked, never trained."""
    from importlib.util import find_spec

    command = [
        # `vllm serve` fails in the CPU build: it asks for the version of a distribution `vllm`.
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder),
        *("--served-model-name", name, "--host", HOST, "--port", str(port)),
        *("--dtype", dtype, "--max-num-seqs", str(max_batch), "--disable-uvicorn-access-log"),
    ]
    if find_spec("torch") is not None:
        import torch

        # Compiling costs minutes and gains little on a CPU.
        command += [] if torch.cuda.is_available() else ["--enforce-eager"]
    return command


def _check(path: str) -> int:
    from rivet.experts.pool import ExpertPool  # slow to import; serving does without it

    async def ask_all(experts: ExpertList) -> list[CheckResult]:
        async with ExpertPool(experts) as pool:
            return await pool.check()

    try:
        experts = load_experts(path)
        if experts.cache.mode == "replay":
            return _check_record(experts)
        experts.cache = type(experts.cache)()  # a check is neither recorded nor replayed
    except ExpertsFileError as error:
        print(f"rivet experts check:\n{error}", file=sys.stderr)
        return 2
    results = asyncio.run(ask_all(experts))
    width = max(len(result.expert.name) for result in results)
    for result in results:
        print(_line(result, width))
    failed = sum(result.reply.status != "ok" for result in results)
    print(f"{len(results) - failed} of {len(results)} endpoints answered")
    return 1 if failed else 0


def _check_record(experts: ExpertList) -> int:
    """A replayed run asks nobody: what counts is the record."""
    from rivet.experts.cache import ReplyCache

    cache = ReplyCache(experts.cache, experts.cache_path)
    counts = cache.counts()
    cache.close()
    for expert in experts:
        print(f"{expert.name:<16} {counts.get(expert.name, 0)} replies recorded")
    print(f"cache mode is replay: nobody is asked; the record is {experts.cache_path}")
    return 0 if counts else 1


def _line(result: CheckResult, width: int) -> str:
    """Who, whether, how fast, at what price; and what is wrong."""
    reply, expert = result.reply, result.expert
    head = f"{reply.name:<{width}}  {reply.status:<12} {reply.latency_s * 1000:7.0f} ms"
    if reply.status != "ok":
        return f"{head}  {result.base_url}  {reply.detail}"
    price = f"${reply.cost_usd:.6f} a call" if expert.has_price else "no price set"
    notes = [f"{reply.prompt_tokens}+{reply.completion_tokens} tokens", price]
    if not reply.is_metered:
        notes.append("reports no usage: tokens are estimated")
    return f"{head}  {result.base_url}  {', '.join(notes)}"


def _spent(run: str) -> int:
    from rivet.experts.ledger import FILE_NAME, read_spent

    path = Path(run) / FILE_NAME
    if not path.is_file():
        print(
            f"rivet experts spent: {path}: no such file; expected the folder of a run whose "
            "experts have a price or a budget",
            file=sys.stderr,
        )
        return 1
    spent = read_spent(Path(run))
    for name, part in spent.items():
        print(f"{name:<16} {part}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
