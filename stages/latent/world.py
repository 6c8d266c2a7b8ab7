"""The latent world in a folder: problems, three frozen specialists, and the policy before RL.

    WORLD/problems/{train,validation,test}.jsonl
    WORLD/experts/NAME/       a Hugging Face checkpoint each
    WORLD/policy/             weights, tokenizer, rivet.json
    WORLD/world.json          settings, accuracies, digests of the specialists' weights, CPU time

Built once and shared by every arm; each part is written whole or not at all, so that a build that
was killed goes on with the part that was missing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.latentworld.tasks import FAMILIES, build_splits
from data.problems import Problem, load_problems
from rivet.files import atomic_folder, atomic_write_json, atomic_write_text
from rivet.latent.experts import ExpertSpec, FrozenExpert, Reading, weights_digest
from rivet.latent.prompts import LatentPrompts, add_placeholder
from rivet.rollout.types import RolloutLimits
from rivet.settings import ProtocolSettings
from stages.latent.specialists import (
    SPECIALISTS,
    Specialist,
    build_specialist,
    completion_accuracy,
    fit,
    policy_rows,
    word_tokenizer,
)
from stages.mini_controller import build_model, build_tokenizer

logger = logging.getLogger(__name__)

VERSION = 2
# One token of each: the others say little of the answer, and attention must first find the one that
# does. Measured with four: no expert is listened to after 200 supervised steps.
LAST_K = 1
_POLICY_STEPS, _POLICY_RATE = 700, 3e-3


class WorldError(ValueError):
    """A latent world's folder holds another world than the one that is asked for."""


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """What a world is made of.

    Attributes:
        seed: Of problems, weights and training.
        train, validation, test: Problems of each family.
        effort: Scales every number of training steps; 1 is the world of the recipes.
        num_context_tokens: K that the policy's prompts are made for.
    """

    seed: int = 1
    train: int = 2500
    validation: int = 100
    test: int = 150
    effort: float = 1.0
    num_context_tokens: int = 4
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class World:
    """A built world."""

    folder: Path
    settings: WorldSettings

    def problems(self, split: str) -> list[Problem]:
        """Problems of a split."""
        return load_problems(self.folder / "problems" / f"{split}.jsonl")

    @property
    def policy(self) -> Path:
        """Checkpoint of the policy before RL."""
        return self.folder / "policy"

    def specs(self) -> list[ExpertSpec]:
        """The specialists, as a recipe would name them."""
        return [
            ExpertSpec(
                specialist.family,
                str(self.folder / "experts" / specialist.family),
                last_k=LAST_K,
                reading="chat" if specialist.template else "plain",
            )
            for specialist in SPECIALISTS
        ]

    @property
    def facts(self) -> dict[str, Any]:
        """Content of `world.json`."""
        return json.loads((self.folder / "world.json").read_text(encoding="utf-8"))


def open_world(folder: str | Path, settings: WorldSettings) -> World:
    """The world of a folder, built where it is missing.

    Raises:
        WorldError: The folder holds another world.
    """
    world = World(Path(folder), settings)
    marker = world.folder / "settings.json"
    if marker.is_file():
        found = json.loads(marker.read_text(encoding="utf-8"))
        if found != asdict(settings):
            different = {k: (found.get(k), v) for k, v in asdict(settings).items()}
            different = {k: pair for k, pair in different.items() if pair[0] != pair[1]}
            raise WorldError(
                f"{folder}: holds a world with other settings ({different}, there and wanted); "
                "choose another folder, or remove it"
            )
    else:
        world.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_json(marker, asdict(settings))
    if not (world.folder / "world.json").is_file():
        _build(world)
    return world


def _build(world: World) -> None:
    started, cpu = time.perf_counter(), time.process_time()
    facts: dict[str, Any] = {"settings": asdict(world.settings), "experts": {}}
    splits = _problems(world)
    texts = [p.problem for p in splits["train"]] + [p.answer for p in splits["train"]]
    for specialist in SPECIALISTS:
        facts["experts"][specialist.family] = _specialist(world, specialist, splits, texts)
    facts["policy"] = _policy(world, splits)
    facts["wall_s"] = round(time.perf_counter() - started, 1)
    facts["cpu_s"] = round(time.process_time() - cpu, 1)
    atomic_write_json(world.folder / "world.json", facts)


def _problems(world: World) -> dict[str, list[Problem]]:
    folder = world.folder / "problems"
    if not folder.is_dir():
        s = world.settings
        logger.info("drawing problems")
        splits = build_splits(
            {"train": s.train, "validation": s.validation, "test": s.test}, s.seed
        )
        with atomic_folder(folder) as temporary:
            for split, problems in splits.items():
                lines = [json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in problems]
                atomic_write_text(temporary / f"{split}.jsonl", "".join(lines))
    return {split: world.problems(split) for split in ("train", "validation", "test")}


def _specialist(
    world: World,
    specialist: Specialist,
    splits: dict[str, list[Problem]],
    texts: Sequence[str],
) -> dict[str, Any]:
    """Train one specialist, if it is not there, and say how good it is."""
    target = world.folder / "experts" / specialist.family
    seed = world.settings.seed
    if not target.is_dir():
        logger.info("training the specialist in %s", specialist.family)
        tokenizer = word_tokenizer(texts, digits=specialist.digits, template=specialist.template)
        model = build_specialist(specialist, tokenizer, seed)
        reader = _reader(specialist, model, tokenizer)
        fit(
            model.requires_grad_(True),
            _rows(reader, splits["train"], specialist.family),
            steps=max(1, round(specialist.steps * world.settings.effort)),
            learning_rate=specialist.learning_rate,
            seed=seed,
            name=specialist.family,
        )
        with atomic_folder(target) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    spec = next(s for s in world.specs() if s.name == specialist.family)
    expert = FrozenExpert.load(spec)
    accuracy = {
        family: completion_accuracy(expert.model, _rows(expert, splits["test"], family))
        for family in FAMILIES
    }
    parameters = sum(p.numel() for p in expert.model.parameters())
    return {
        "parameters": parameters,
        "accuracy": accuracy,
        "digest": weights_digest(expert.model),
        "fingerprint": expert.fingerprint(),
    }


def _reader(specialist: Specialist, model: Any, tokenizer: Any) -> FrozenExpert:
    reading: Reading = "chat" if specialist.template else "plain"
    spec = ExpertSpec(specialist.family, "in memory", last_k=LAST_K, reading=reading)
    return FrozenExpert(spec, model, tokenizer)


def _rows(expert: FrozenExpert, problems: Sequence[Problem], family: str) -> list[Any]:
    """What a specialist reads and answers, of one family."""
    end = expert.tokenizer.eos_token_id
    return [
        (
            expert.encode(p.problem),
            [*expert.tokenizer(p.answer, add_special_tokens=False).input_ids, end],
        )
        for p in problems
        if p.meta["family"] == family
    ]


def _policy(world: World, splits: dict[str, list[Problem]]) -> dict[str, Any]:
    """Train the policy, if it is not there."""
    s = world.settings
    if not world.policy.is_dir():
        logger.info("training the policy to read numbers, to follow hints and to use a box")
        corpus = [p.problem for p in splits["train"]]
        tokenizer, placeholder = add_placeholder(build_tokenizer(corpus))
        settings = ProtocolSettings(
            prompt="bare", after_tag="", limits=RolloutLimits(max_completion_length=8)
        )
        plain = LatentPrompts(tokenizer, settings, placeholder, 0)
        listening = LatentPrompts(tokenizer, settings, placeholder, s.num_context_tokens)
        model = build_model(tokenizer, seed=s.seed, num_hidden_layers=2)
        fit(
            model,
            policy_rows(splits["train"], plain, listening, s.seed),
            steps=max(1, round(_POLICY_STEPS * s.effort)),
            learning_rate=_POLICY_RATE,
            seed=s.seed,
            name="policy",
        )
        with atomic_folder(world.policy) as temporary:
            model.save_pretrained(temporary)
            tokenizer.hf.save_pretrained(temporary)
            settings.save(temporary)
    return {}
