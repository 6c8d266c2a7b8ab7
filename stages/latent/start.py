"""What an arm begins with: problems, frozen experts, what is heard of them, and the policy."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from data.problems import Problem
from eval.grade import load_gradable
from eval.latent_report import HARD
from rivet.checkpoints import CheckpointError, check_checkpoint
from rivet.config import ConfigError
from rivet.latent.adapter import AdapterSettings
from rivet.latent.cache import read_states
from rivet.latent.experts import ExpertError, FrozenExpert
from rivet.latent.policy import LatentPolicy, is_latent
from rivet.latent.prompts import LatentPrompts, add_placeholder, fit_embeddings
from rivet.settings import FILE_NAME, ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from stages.latent.config import WORLD_POLICY, LatentConfig
from stages.latent.listener import Listener
from stages.latent.world import World, WorldSettings, open_world

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Data:
    """Problems and where policy and experts lie."""

    train: list[Problem]
    test: list[Problem]
    policy: str
    experts: list[FrozenExpert]


@dataclass(frozen=True, slots=True)
class Start:
    """What an arm begins with."""

    policy: LatentPolicy
    tokenizer: ProtocolTokenizer
    settings: ProtocolSettings
    prompts: LatentPrompts


def gather(config: LatentConfig) -> Data:
    """Read problems and load the experts; the latent world is built if it is not there.

    Raises:
        ConfigError: There are too few problems, or training and test share some.
        CheckpointError: The policy's folder is no whole checkpoint of a causal language model.
        ExpertError: An expert cannot be loaded, or is listed twice.
    """
    world = None
    if config.uses_world:
        world = open_world(
            config.world,
            WorldSettings(
                seed=config.world_seed,
                effort=config.world_effort,
                train=config.problems_per_family,
                validation=min(100, config.test_per_family),
                test=config.test_per_family,
                num_context_tokens=config.num_context_tokens,
            ),
        )
    train = _training_problems(config, world)
    test = world.problems(config.split) if world and not config.test_problems else []
    if config.test_problems:
        test = _first_of_each_family(load_gradable(config.test_problems), config)
    _check_splits(config, train, test)
    policy = str(world.policy) if world else config.model
    _check_policy(policy, config)
    specs = world.specs() if world else config.specs()
    experts = (
        [FrozenExpert.load(spec, device=config.device) for spec in specs] if config.hears else []
    )
    _check_distinct(experts)
    return Data(train, test, policy, experts)


def _training_problems(config: LatentConfig, world: World | None) -> list[Problem]:
    if world is not None and config.problems == WORLD_POLICY:
        problems = world.problems("train")
    else:
        problems = load_gradable(config.problems)
    problems = problems[: config.max_problems or None]
    if len(problems) < config.prompts_per_step:
        raise ConfigError(
            [
                f"problems: {config.problems} gives {len(problems)} training problems; expected at "
                f"least {config.prompts_per_step}, what one step takes"
            ]
        )
    return problems


def _first_of_each_family(problems: list[Problem], config: LatentConfig) -> list[Problem]:
    """As many of the held-out problems as are measured, in order; says how many are left out."""
    seen: Counter[str] = Counter()
    kept = []
    for problem in problems:
        family = str(problem.meta.get("family", ""))
        seen[family] += 1
        if seen[family] <= config.test_per_family:
            kept.append(problem)
    if len(kept) < len(problems):
        logger.info(
            "%s: the first %d problems of each family are measured, %d of %d are left out",
            config.test_problems,
            config.test_per_family,
            len(problems) - len(kept),
            len(problems),
        )
    return kept


def _check_splits(config: LatentConfig, train: list[Problem], test: list[Problem]) -> None:
    """Refuse held-out problems that are trained on, a family named like the hard ones together, and
    families whose states cannot be shuffled.

    Raises:
        ConfigError: Names the first of them.
    """
    seen = {problem.problem for problem in train}
    shared = [problem.id for problem in test if problem.problem in seen]
    if shared:
        raise ConfigError(
            [
                f"test_problems: {len(shared)} of {len(test)} are training problems too, "
                f"{shared[0]} first; expected others"
            ]
        )
    if named := [problem.id for problem in test if problem.meta.get("family") == HARD]:
        raise ConfigError(
            [
                f"test_problems: {named[0]} is of the family {HARD!r}; expected another name: "
                "results call the hard families together so"
            ]
        )
    # In evaluation every arm that hears something is shuffled, in training the control alone.
    shuffled = {"problems": train if config.arm == "shuffled" else [], "test_problems": test}
    for setting, problems in shuffled.items() if config.hears else ():
        # The first of each text, as the listener has it.
        firsts = {problem.problem: problem for problem in reversed(problems)}.values()
        families = Counter(str(problem.meta.get("family", "")) for problem in firsts)
        alone = [family for family, count in families.items() if count == 1]
        if alone:
            raise ConfigError(
                [
                    f"{setting}: one distinct problem only of the family {alone[0]!r}; expected at "
                    "least two, whose states can be shuffled"
                ]
            )


def _check_policy(folder: str, config: LatentConfig) -> None:
    """Find what is wrong with the policy's folder before the experts read anything.

    Raises:
        CheckpointError: It is no whole checkpoint of a causal language model.
        rivet.settings.SettingsError: Its `rivet.json` is broken.
        rivet.tokenization.TokenizerError: Its tokenizer does not do.
    """
    if is_latent(folder):
        raise CheckpointError(
            f"{folder}: a latent policy already; expected a causal language model, such as the one "
            "that it was trained from"
        )
    check_checkpoint(folder, default=ProtocolSettings(prompt=config.prompt))


def _check_distinct(experts: Sequence[FrozenExpert]) -> None:
    """Refuse an expert that is listed twice: attention could not tell the two apart."""
    seen: dict[str, str] = {}
    for expert in experts:
        name, identity = expert.spec.name, json.dumps(expert.identity(), sort_keys=True)
        if identity in seen:
            raise ExpertError(
                f"experts {seen[identity]} and {name} are the same model, read in the same way; "
                "expected each once"
            )
        seen[identity] = name


def open_listeners(config: LatentConfig, data: Data) -> tuple[Listener, Listener]:
    """What is heard in training and in evaluation; the experts read what is not cached."""
    everything = [*data.train, *data.test]
    states = None
    if data.experts:
        states = read_states(data.experts, [p.problem for p in everything], config.cache)
    split = len(data.train)

    def listener(problems: list[Problem], rows: range) -> Listener:
        part = None if states is None else states.rows(list(rows))
        return Listener(problems, part, arm=config.arm, expert=config.expert, seed=config.seed)

    return (
        listener(data.train, range(split)),
        listener(data.test, range(split, len(everything))),
    )


def load_start(config: LatentConfig, data: Data) -> Start:
    """The policy before any step of this arm, with an untrained adapter."""
    tokenizer = ProtocolTokenizer.from_pretrained(data.policy)
    tokenizer, placeholder = add_placeholder(tokenizer)
    tokenizer.hf.padding_side = "left"  # as GRPOTrainer expects
    has_settings = (Path(data.policy) / FILE_NAME).is_file()
    settings = (
        ProtocolSettings.load(data.policy)
        if has_settings
        else ProtocolSettings(prompt=config.prompt)
    )
    length = config.max_completion_length or 64
    settings = replace(settings, limits=replace(settings.limits, max_completion_length=length))
    given = config.model_init_kwargs if isinstance(config.model_init_kwargs, dict) else {}
    causal: Any = AutoModelForCausalLM.from_pretrained(data.policy, **{"dtype": "float32", **given})
    fit_embeddings(causal, len(tokenizer.hf))
    # TRL gives both to the trained model; the tokenizer's end of turn ends a completion.
    causal.generation_config.eos_token_id = sorted(tokenizer.eos_ids)
    policy = LatentPolicy.from_causal_lm(
        causal,
        placeholder_id=placeholder,
        adapter=_adapter(config, data.experts, causal.config.get_text_config().hidden_size),
        experts=[
            describe(e) | {"is_heard": config.expert in ("", e.spec.name)} for e in data.experts
        ],
        seed=config.seed,
    )
    torch.nn.Module.to(policy, config.device)
    prompts = LatentPrompts(tokenizer, settings, placeholder, policy.config.num_context_tokens)
    return Start(policy, tokenizer, settings, prompts)


def _adapter(
    config: LatentConfig, experts: Sequence[FrozenExpert], output_width: int
) -> AdapterSettings | None:
    if config.arm == "single":
        return None
    return AdapterSettings(
        tuple(expert.spec.name for expert in experts),
        tuple(expert.width for expert in experts),
        num_slots=max((expert.slots for expert in experts), default=0),
        output_width=output_width,
        num_context_tokens=config.num_context_tokens,
        width=config.adapter_width,
        num_blocks=config.adapter_blocks,
        num_heads=config.adapter_heads,
        routing=config.arm if config.arm in ("static", "constant") else "attention",  # type: ignore[arg-type]
    )


def describe(expert: FrozenExpert) -> dict[str, Any]:
    """What a saved policy says about an expert that it needs."""
    spec = expert.spec
    commit = getattr(expert.model.config, "_commit_hash", None)
    return {
        "name": spec.name,
        "path": spec.path,
        "revision": spec.revision or commit or "",
        "layers": list(spec.layers),
        "last_k": spec.last_k,
        "dtype": spec.dtype,
        "reading": spec.reading,
        "fingerprint": expert.fingerprint(),
    }
