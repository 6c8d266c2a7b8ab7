"""Tokens per second of the local backend beside plain batched sampling of the same model.

    python -m rivet.rollout.bench [--model CHECKPOINT] [--batch 64] [--rounds 5] [--threads 1]

Three loads: `uniform` (equal prompts and lengths), `ragged` (lengths from 8 to 256), `spliced` (two
turns with foreign tokens between them, as with an expert that answers at once). Two plain ways to
sample: `generate` of `transformers`, and a bare loop over the model's forward and its own cache.
Arms are measured in turn, round by round, so that a busy machine hits all of them; ratios are
medians over rounds, of time on the clock and, for machines that others use as well, of CPU time.
Tokens that a plain way samples past a row's length do not count. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from rivet.rollout.backend import SamplingParams
from rivet.rollout.local import LocalBackend
from rivet.tokenization import ProtocolTokenizer


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be sampled: per row a prompt and, per turn, how many tokens.

    Attributes:
        prompts: Equal lengths, so that the plain ways need no padding.
        lengths: Tokens per turn and row, shape (turns, B).
        splice: Foreign tokens between turns, per row.
    """

    prompts: list[list[int]]
    lengths: list[list[int]]
    splice: list[list[int]]

    @property
    def tokens(self) -> int:
        """Sampled tokens, all rows and turns."""
        return sum(map(sum, self.lengths))


def build_loads(batch: int, vocab_size: int, seed: int) -> dict[str, Load]:
    """The three loads, for a batch of rows."""
    rng = random.Random(seed)

    def ids(length: int) -> list[list[int]]:
        return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]

    def between(low: int, high: int) -> list[int]:
        lengths = [low + (high - low) * n // max(1, batch - 1) for n in range(batch)]
        rng.shuffle(lengths)
        return lengths

    prompts, splice = ids(32), ids(40)
    return {
        "uniform": Load(prompts, [[64] * batch], []),
        "ragged": Load(prompts, [between(8, 256)], []),
        "spliced": Load(prompts, [between(15, 35), between(5, 15)], splice),
    }


def sample_local(model: torch.nn.Module, tokenizer: ProtocolTokenizer, load: Load) -> None:
    """The local backend: every row goes on by itself."""
    eos = tuple(tokenizer.eos_ids)

    async def row(backend: LocalBackend, n: int) -> None:
        context = load.prompts[n]
        for turn, lengths in enumerate(load.lengths):
            got = await backend.generate(
                context,
                stop=("</expert>", "</python>", "<output>"),
                max_new_tokens=lengths[n],
                sampling=SamplingParams(),
                seed=n,
                banned_ids=eos,
                session=str(n),
            )
            if turn + 1 < len(load.lengths):
                context = [*context, *got.ids, *load.splice[n]]
        await backend.release(str(n))

    async def run() -> None:
        async with LocalBackend(model, tokenizer, max_batch=len(load.prompts)) as backend:
            await asyncio.gather(*[row(backend, n) for n in range(len(load.prompts))])

    asyncio.run(run())


def sample_generate(model: Any, tokenizer: ProtocolTokenizer, load: Load) -> None:
    """`generate` of `transformers`, turn by turn: all rows go on to the longest."""

    def turn(context: torch.Tensor, count: int) -> torch.Tensor:
        return model.generate(
            context,
            attention_mask=torch.ones_like(context),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            pad_token_id=tokenizer.eos_id,
        )

    _turns(turn, load)


def sample_loop(model: Any, tokenizer: ProtocolTokenizer, load: Load) -> None:
    """A bare loop: forward, softmax, multinomial, with the cache of `transformers`."""

    def turn(context: torch.Tensor, count: int) -> torch.Tensor:
        past, ids = None, context
        for _ in range(count):
            output = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = output.past_key_values
            ids = torch.multinomial(output.logits[:, -1].softmax(-1), 1)
            context = torch.cat([context, ids], dim=1)
        return context

    _turns(turn, load)


def _turns(turn: Callable[[torch.Tensor, int], torch.Tensor], load: Load) -> None:
    with torch.inference_mode():
        context = torch.tensor(load.prompts)
        for n, lengths in enumerate(load.lengths):
            context = turn(context, max(lengths))
            if n + 1 < len(load.lengths):
                context = torch.cat([context, torch.tensor(load.splice)], dim=1)


ARMS: dict[str, Callable[[Any, ProtocolTokenizer, Load], None]] = {
    "local": sample_local,
    "generate": sample_generate,
    "loop": sample_loop,
}


Rates = dict[str, dict[str, list[float]]]  # load -> arm -> one value a round


def measure(
    model: torch.nn.Module, tokenizer: ProtocolTokenizer, loads: dict[str, Load], rounds: int
) -> tuple[Rates, Rates]:
    """Tokens per second on the clock, and per CPU second. One more round is run to warm up."""
    clock: Rates = {load: {arm: [] for arm in ARMS} for load in loads}
    cpu: Rates = {load: {arm: [] for arm in ARMS} for load in loads}
    for n in range(rounds + 1):
        for name, load in loads.items():
            for arm, sample in ARMS.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                sample(model, tokenizer, load)
                wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
                if n > 0:
                    clock[name][arm].append(load.tokens / wall_s)
                    cpu[name][arm].append(load.tokens / cpu_s)
    return clock, cpu


def summarise(rates: Rates) -> dict[str, Any]:
    """Medians, and the ratios of `local` to `generate` and to the faster plain way."""
    figures: dict[str, Any] = {}
    for load, arms in rates.items():
        figures[load] = {arm: round(median(values)) for arm, values in arms.items()}
        rounds = list(zip(arms["local"], arms["generate"], arms["loop"], strict=True))
        figures[load]["to_generate"] = round(median(a / b for a, b, _ in rounds), 2)
        figures[load]["to_fastest"] = round(median(a / max(b, c) for a, b, c in rounds), 2)
    return figures


def mini_model(
    tokenizer: ProtocolTokenizer | None = None, *, context: int = 1024
) -> tuple[torch.nn.Module, ProtocolTokenizer]:
    """A random model of the mini-world controller's shape.

    Args:
        tokenizer: Whose vocabulary it has; None makes one up, of bytes and pairs of bytes.
        context: Longest context in tokens.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizer or _byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer.token_bytes),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=256,
        tie_word_embeddings=True,
        initializer_range=0.04,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.eos_id,
    )
    return Qwen3ForCausalLM(config).eval(), tokenizer


def _byte_tokenizer() -> ProtocolTokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(a + b for a in alphabet[:20] for b in alphabet[:20])][:640]
    tokenizer = Tokenizer(models.BPE(vocab={p: n for n, p in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    return ProtocolTokenizer(fast)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and one JSON object."""
    parser = argparse.ArgumentParser(prog="rivet.rollout.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", help="checkpoint folder; default: random, mini-world shape")
    parser.add_argument("--batch", type=int, default=64, help="rows (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the load")
    args = parser.parse_args(argv)
    if min(args.batch, args.rounds, args.threads) < 1:
        parser.error("--batch, --rounds and --threads are at least 1")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.model:
        from transformers import AutoModelForCausalLM

        tokenizer = ProtocolTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    else:
        model, tokenizer = mini_model()
    loads = build_loads(args.batch, len(tokenizer.token_bytes), args.seed)
    clock, cpu = measure(model, tokenizer, loads, args.rounds)
    figures = {"clock": summarise(clock), "cpu": summarise(cpu)}
    print("tokens/s            local  generate      loop   local to generate, to the fastest")
    for name, part in figures.items():
        for load, row in part.items():
            print(
                f"{name:<8}{load:<10}{row['local']:>7}{row['generate']:>10}{row['loop']:>10}"
                f"{row['to_generate']:>20}{row['to_fastest']:>16}"
            )
    print(json.dumps(figures | {"batch": args.batch, "threads": args.threads}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
