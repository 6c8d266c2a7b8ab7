"""TRL's own tool loop on the load of `stages.bench_rollouts`: what rivet is measured beside.

Written against TRL 1.16.0. `GRPOTrainer(tools=[...])` generates a turn of every row with
`generate` of `transformers`, then goes through the rows that called a tool, awaits each row's
asynchronous tools, and generates the next turn. Calls of one row run together, those of different
rows one after another. `LockStepTrainer` is the loop that this could at best become without giving
up turns: all calls of a turn at once, so that a turn costs its slowest call.

What is generated is forced: the prescribed token is the only one that a logits processor leaves.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import LogitsProcessor, LogitsProcessorList
from trl import GRPOConfig, GRPOTrainer

from stages.bench_load import EXPERT, Load


class Forced(LogitsProcessor):
    """Leaves one token a row possible.

    Args:
        ids: Prescribed tokens, shape (B, N); what follows them is its last column.
        start: Length of the prompts.
    """

    def __init__(self, ids: torch.Tensor, start: int) -> None:
        self._ids = ids
        self._start = start

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        step = min(input_ids.shape[1] - self._start, self._ids.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, self._ids[:, step, None], 0.0)


class ToolTrainer(GRPOTrainer):
    """TRL's trainer, whose model writes what the load prescribes.

    Args:
        model: Any causal language model.
        load: Prompts, tokens and latencies.
    """

    def __init__(self, model: Any, load: Load) -> None:
        self._load = load
        self._turn = 0
        self.spans: list[tuple[int, str, float, float]] = []  # row, what, from, to
        prompts = [load.messages(n) for n in range(len(load.rows))]
        super().__init__(
            model=model,
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(prefix="rivet-bench-"),
                per_device_train_batch_size=len(load.rows),
                num_generations=2,
                max_completion_length=load.longest_completion,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=load.tokenizer.hf,
            tools=[self._tool()],
        )

    def run(self) -> list[list[int]]:
        """Generate the batch once; the completions of every row, tool results included."""
        rows = self._load.rows
        # What `_generate_and_score_completions` sets before it generates.
        self._sync_tool_dicts = [{} for _ in rows]
        self._async_tool_dicts = [{EXPERT: self.tools[0]} for _ in rows]
        self._turn, self.spans = 0, []
        prompt_ids, completions, *_ = super()._generate(
            [self._load.messages(n) for n in range(len(rows))]
        )
        lengths = [self._load.completion_length(n) for n in range(len(rows))]
        if prompt_ids != self._load.prompts or list(map(len, completions)) != lengths:
            raise RuntimeError("TRL sampled other prompts or lengths than the load prescribes")
        return completions

    def _tool(self) -> Any:
        async def ask(call: int) -> str:
            """Ask an expert.

            Args:
                call: Number of the call.

            Returns:
                The reply.
            """
            row, turn = self._load.row_of_call(call)
            start = time.perf_counter()
            await self._wait(row, turn)
            self.spans.append((row, "expert", start, time.perf_counter()))
            return self._load.tool_result

        return ask

    async def _wait(self, row: int, turn: int) -> None:
        await asyncio.sleep(self._load.rows[row].latencies_s[turn])

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], None]:
        load, turn = self._load, self._turn
        rows = load.rows_of_turn(turn)
        if len(prompt_ids) != len(rows):
            raise RuntimeError(f"TRL goes on with {len(prompt_ids)} rows, expected {len(rows)}")
        scripts = [load.tool_script(n, turn) for n in rows]
        width = max(map(len, scripts))
        end = load.tokenizer.eos_id
        ids = torch.tensor([[*s, *[end] * (width + 1 - len(s))] for s in scripts])
        forced = Forced(ids.to(self.accelerator.device), max(map(len, prompt_ids)))
        model: Any = self.model
        plain = model.generate
        model.generate = lambda *a, **k: plain(
            *a, logits_processor=LogitsProcessorList([forced]), **k
        )
        start = time.perf_counter()
        try:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        finally:
            model.generate = plain
            self._turn += 1
            # A row is in the batch until the longest of the turn is done.
            self.spans += [(n, "sampling", start, time.perf_counter()) for n in rows]


class LockStepTrainer(ToolTrainer):
    """The same loop, if it made all calls of a turn at once."""

    async def _wait(self, row: int, turn: int) -> None:
        return

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], None]:
        if self._turn > 0:
            rows = self._load.rows_of_turn(self._turn)
            time.sleep(max(self._load.rows[n].latencies_s[self._turn - 1] for n in rows))
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)
