"""The warm start: a controller that speaks the protocol, before it knows whom to ask.

Scripted dialogues of the mini-world are laid out as trajectories exactly as the rollout engine
splices them, and the Stage II trainer learns them: the controller's tokens and the tags of the
reply always, the expert's words and code in a small share of the trajectories only. So the
controller can write the form of a reply without having learnt much of its content. The expert is
drawn uniformly and is often wrong; the answer is copied from the program's output, never from the
gold.

Gate, on problems that were not trained on: the share of requests that copy the operands exactly.

    rivet warmstart stages/recipes/warmstart_mini.yaml
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from data.miniworld.dialogues import Dialogue, scripted_dialogues, tokenizer_corpus
from data.miniworld.experts import EXPERTS
from data.miniworld.tasks import build_split, check_families, request_for
from data.problems import Problem
from rivet.checkpoints import CheckpointError, check_weights
from rivet.config import parse_config, setting
from rivet.prompts import PromptBuilder
from rivet.protocol import STOP_EXPERT, parse, split_reply
from rivet.rollout.backend import SamplingParams
from rivet.rollout.local import LocalBackend
from rivet.rollout.splice import Splice, Splicer
from rivet.rollout.types import RolloutLimits, rollout_seed
from rivet.runs import RunDir
from rivet.settings import FILE_NAME as SETTINGS_FILE
from rivet.settings import ExpertCard, Prompt, ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from stages.checkpointing import load_controller
from stages.mini_controller import build_model, build_tokenizer
from stages.stage2.config import WeightedSFTConfig
from stages.stage2.dataset import to_dataset
from stages.stage2.training import train

logger = logging.getLogger(__name__)


class GateError(RuntimeError):
    """The warm start did not reach what Stage I needs; the message says what was reached."""


@dataclass
class WarmstartConfig(WeightedSFTConfig):
    """Settings of the warm start."""

    output_dir: str | None = setting("runs/warmstart", "The run folder.")
    model: str = setting(
        "", "Pretrained checkpoint to start from; empty builds the mini controller from scratch."
    )
    prompt: Prompt = setting(
        "instruct",
        "How a pretrained checkpoint without rivet.json is to be asked: `instruct` explains the "
        "protocol and lists the experts in a system message, `bare` gives the problem alone, which "
        "is half as long. The mini controller is always asked `bare`.",
    )
    dialogues: int = setting(24_000, "Scripted trajectories to learn from, at least 1.")
    problems_per_family: int = setting(
        1500, "Training problems of each mini-world family that the dialogues are about, 1 or more."
    )
    families: list[str] = setting(
        [], "Families of the mini-world that dialogues and gate are about; empty: all."
    )
    expert_span_share: float = setting(
        0.05,
        "Share of the trajectories in which the expert's text and code are trained, in [0, 1].",
    )
    vocab_size: int = setting(650, "Tokens of the mini controller's vocabulary, at least 400.")
    hidden_size: int = setting(128, "Width of the mini controller, a multiple of 32.")
    num_hidden_layers: int = setting(3, "Layers of the mini controller, at least 1.")
    gate_problems: int = setting(
        60, "Held-out problems of each family that the gate is measured on, at least 1."
    )
    gate: float = setting(
        0.85, "Share of exactly copied requests below which the run fails, in [0, 1]."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dialogues", "problems_per_family", "gate_problems", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        check_families(self.families)
        for name in ("expert_span_share", "gate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 to 1")


def run(config: WarmstartConfig) -> Path:
    """Train the warm start and check its gate.

    Returns:
        The checkpoint folder.

    Raises:
        GateError: Fewer requests than `gate` were copied exactly; the run stays unfinished.
        rivet.checkpoints.CheckpointError: `model` is missing or broken.
    """
    assert config.output_dir is not None
    # What can be wrong with `model` is found before a folder is made.
    pretrained = _pretrained_tokenizer(config.model) if config.model else None
    with RunDir.open(
        config.output_dir, config, stage="warmstart", overwrite=config.overwrite
    ) as folder:
        tokenizer, settings, model = _start(config, pretrained)
        problems = build_split("train", config.problems_per_family, config.seed, config.families)
        endless = scripted_dialogues(problems, config.seed)
        dialogues = list(itertools.islice(endless, config.dialogues))
        prompts = PromptBuilder(tokenizer, settings)
        trajectories = [
            render(dialogue, n, tokenizer, settings, prompts)
            for n, dialogue in enumerate(dialogues)
        ]
        scales = span_scales(len(dialogues), config.expert_span_share, config.seed)
        # Programs that fail are there to be survived, not to be written.
        scales = [0.0 if d.is_failing else s for d, s in zip(dialogues, scales, strict=True)]
        dataset = to_dataset(trajectories, expert_scales=scales)
        summary = train(
            folder,
            config,
            model=model,
            tokenizer=tokenizer,
            settings=settings,
            objective=config.objective(),
            dataset=dataset,
            peft_config=config.peft(),
        )
        held_out = build_split("validation", config.gate_problems, config.seed, config.families)
        copied = copied_share(model, tokenizer, prompts, held_out)
        sampled = copied_share(model, tokenizer, prompts, held_out, temperature=1.0)
        logger.info(
            "exactly copied requests: greedy %.1f%%, sampled %.1f%%; gate %.1f%%",
            100 * copied,
            100 * sampled,
            100 * config.gate,
        )
        _check_gate(copied, config)
        folder.finish(
            {
                "copied_requests": copied,
                "copied_requests_sampled": sampled,
                **summary,
            }
        )
        return folder.checkpoint


def render(
    dialogue: Dialogue,
    index: int,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    prompts: PromptBuilder,
) -> Trajectory:
    """Lay a dialogue out as the rollout engine does in `experts` mode: same tokens, same authors.

    Raises:
        AssertionError: The result is not well formed, so a script or the layout is broken.
    """
    style, splicer = settings.style, Splicer(tokenizer, settings.style)
    splice = Splice()
    splice.add("controller", tokenizer.encode(style.open("expert", dialogue.expert)))
    splice.add("controller", tokenizer.encode_untrusted(dialogue.request))
    splice.add("controller", tokenizer.encode(style.close("expert")))
    splice.add("expert", splicer.open_reply(dialogue.expert))
    for kind, piece in split_reply(dialogue.reply):
        if kind == "text":
            splice.add("expert", splicer.foreign(piece)[0])
        else:
            splice.add("expert", splicer.program(piece))
            splice.extend(splicer.output(dialogue.output, settings.limits.max_output_length))
    splice.add("expert", splicer.close_reply())
    splice.add("controller", tokenizer.encode("<answer>\\boxed{"))
    splice.add("controller", tokenizer.encode_untrusted(dialogue.answer))
    splice.add("controller", [*tokenizer.encode("}</answer>"), tokenizer.eos_id])
    ids = [token for _, tokens in splice.runs for token in tokens]
    authors = [author for author, tokens in splice.runs for _ in tokens]
    scanner = parse(tokenizer, ids, authors)
    assert not scanner.problem(), (scanner.problem(), dialogue)
    return Trajectory(
        id=f"{dialogue.problem.id}#{index}@0",
        problem_id=dialogue.problem.id,
        mode="experts",
        prompt_ids=prompts.build(dialogue.problem.problem),
        segments=scanner.segments(),
        finish="eos",
        well_formed=True,
        answer=scanner.answer(),
        sample_index=index,
        info={"family": dialogue.problem.meta.get("family", ""), "expert": dialogue.expert},
    )


def span_scales(count: int, share: float, seed: int) -> list[float]:
    """1 for a random `share` of the trajectories, whose expert's words are trained, else 0."""
    chosen = random.Random(f"spans\x1f{seed}").sample(range(count), round(share * count))
    scales = [0.0] * count
    for n in chosen:
        scales[n] = 1.0
    return scales


def copied_share(
    model: PreTrainedModel,
    tokenizer: ProtocolTokenizer,
    prompts: PromptBuilder,
    problems: Sequence[Problem],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> float:
    """Share of problems whose first request is exactly the one that a flawless copy gives."""
    sampling = SamplingParams(temperature=temperature)

    async def request_of(backend: LocalBackend, problem: Problem) -> str:
        generation = await backend.generate(
            prompts.build(problem.problem),
            stop=[STOP_EXPERT],
            max_new_tokens=64,
            sampling=sampling,
            seed=rollout_seed(seed, 0, problem.id, 0),
        )
        scanner = parse(tokenizer, generation.ids, ["controller"] * len(generation.ids))
        spans = [span for span in scanner.spans if span.name == "expert" and span.is_closed]
        return scanner.text(spans[0]).strip() if spans else ""

    async def requests() -> list[str]:
        async with LocalBackend(model, tokenizer) as backend:
            return await asyncio.gather(*(request_of(backend, p) for p in problems))

    found = asyncio.run(requests())
    return sum(
        request == request_for(problem) for request, problem in zip(found, problems, strict=True)
    ) / len(problems)


def _pretrained_tokenizer(model: str) -> ProtocolTokenizer:
    """The tokenizer of a pretrained model whose weights are there, if it is a folder."""
    try:
        tokenizer = ProtocolTokenizer.from_pretrained(model)
    except OSError as error:
        if Path(model).exists():
            raise
        raise CheckpointError(
            f"model: {model}: no such folder, and the Hub gives no such model "
            f"({str(error).splitlines()[0]}); expected the folder of a pretrained model, such "
            "as `rivet import-gguf` makes, or a name on the Hub"
        ) from error
    if Path(model).is_dir():
        check_weights(Path(model))
    return tokenizer


def _start(
    config: WarmstartConfig, pretrained: ProtocolTokenizer | None
) -> tuple[ProtocolTokenizer, ProtocolSettings, PreTrainedModel]:
    """The controller before training: a given one, or the mini controller from scratch."""
    cards = tuple(ExpertCard(expert.name, expert.skill) for expert in EXPERTS.values())
    if pretrained:
        if (Path(config.model) / SETTINGS_FILE).is_file():
            settings = ProtocolSettings.load(config.model)
        else:
            settings = ProtocolSettings(prompt=config.prompt, experts=cards)
        return pretrained, settings, load_controller(config.model, config)
    tokenizer = build_tokenizer(
        tokenizer_corpus(seed=config.seed), vocab_size=config.vocab_size, words=list(EXPERTS)
    )
    settings = ProtocolSettings(
        prompt="bare",
        after_tag="",
        experts=cards,
        limits=RolloutLimits(
            max_completion_length=160,
            max_expert_calls=2,
            max_code_runs=2,
            max_reply_length=96,
            max_output_length=32,
        ),
    )
    model = build_model(
        tokenizer,
        seed=config.seed,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
    )
    return tokenizer, settings, model


def _check_gate(copied: float, config: WarmstartConfig) -> None:
    if copied < config.gate:
        raise GateError(
            f"{config.output_dir}: {copied:.1%} of the requests are exact copies, expected at "
            f"least {config.gate:.0%}, or Stage I has nothing to build on; train longer "
            "(--max_steps) or lower --gate, with --overwrite true"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet warmstart RECIPE.yaml [--name value ...]`; prints the checkpoint's path."""
    parsed = parse_config(
        WarmstartConfig, argv, prog="rivet warmstart", description="Build the mini controller."
    )
    print(run(parsed.config))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
