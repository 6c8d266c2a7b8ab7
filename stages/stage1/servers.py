"""The vLLM servers of a Stage I run: those of the settings, or one that the run starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from data.problems import Problem
from rivet.prompts import PromptBuilder
from rivet.rollout.vllm_open import server_settings
from rivet.rollout.vllm_process import managed_server
from rivet.runs import RunDir
from rivet.tokenization import ProtocolTokenizer
from stages.stage1.config import Stage1Config
from stages.stage1.sampling import EngineSource
from stages.stage1.training import Start
from stages.stage1.weight_sync import AdapterSender, FullSender, Sender, WeightSync

_CANARY_PROBLEMS = 2
_CANARY_LENGTH = 512


@contextmanager
def open_servers(args: Stage1Config, start: Start) -> Iterator[list[str]]:
    """URLs of the servers, the same in every process; none with the local backend.

    Raises:
        rivet.rollout.backend.BackendError: There is no vLLM to start.
        rivet.experts.server.ServerError: It did not come up.
        rivet.checkpoints.CheckpointError: The checkpoint is an adapter.
    """
    if args.backend != "vllm" or args.vllm_urls:
        yield list(args.vllm_urls)
        return
    urls: list[Any] = [None]
    if args.process_index == 0:
        settings = server_settings(
            Path(args.model),
            dtype=str(start.model.dtype).removeprefix("torch."),
            max_completion_length=args.max_completion_length or 0,
            max_batch=max(args.generation_batch_size or 1, 1),
            max_lora_rank=args.lora_r if args.use_peft else 0,
            use_weight_transfer=not args.use_peft,
            arguments=args.vllm_args,
        )
        with managed_server(settings) as server:
            urls = [server.base_url]
            broadcast_object_list(urls)
            yield urls
    else:
        broadcast_object_list(urls)
        yield urls


def weight_sync(
    args: Stage1Config, folder: RunDir, start: Start, source: EngineSource, urls: Sequence[str]
) -> WeightSync | None:
    """What keeps the servers at the trainer's weights; None with the local backend."""
    if args.backend != "vllm":
        return None
    sender: Sender
    if args.use_peft:
        sender = AdapterSender(source, folder.path / "vllm")
    else:
        sender = FullSender(source, urls)
    prompts = PromptBuilder(start.tokenizer, start.settings)
    texts = [
        canary(problem, prompts, start.tokenizer) for problem in start.problems[:_CANARY_PROBLEMS]
    ]
    return WeightSync(source, sender, texts, args.canary_tolerance)


def canary(problem: Problem, prompts: PromptBuilder, tokenizer: ProtocolTokenizer) -> list[int]:
    """A prompt and a completion of the kind that the run is about, as token ids."""
    completion = [
        *tokenizer.encode("<think>\n"),
        *tokenizer.encode_untrusted(problem.problem),
        *tokenizer.encode("\n</think>\n<answer>\n\\boxed{"),
        *tokenizer.encode_untrusted(problem.answer),
        *tokenizer.encode("}\n</answer>"),
    ]
    ids = [*prompts.build(problem.problem, "experts"), *completion]
    return ids[-_CANARY_LENGTH:]
