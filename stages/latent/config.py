"""Settings of latent collaboration: those of Stage I, the experts, the adapter, and the arm.

An arm is one word: `full` is the system, the others are its controls. Without them no claim about
collaboration stands (arXiv:2602.09173 finds that much of a gain may be prefix-style conditioning).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rivet.config import ConfigError, setting
from rivet.latent.experts import ExpertError, ExpertSpec
from stages.latent.specialists import SPECIALISTS
from stages.stage1.config import AlarmAction, Stage1Config
from stages.stage1.objective import ExpertLoss

if TYPE_CHECKING:
    from peft import LoraConfig

Arm = Literal["full", "single", "constant", "shuffled", "one-expert", "static"]
ARMS = ("full", "single", "constant", "shuffled", "one-expert", "static")
# Arms whose context tells nothing about the problem.
UNINFORMED = ("single", "constant", "shuffled")
# Settings of Stage I that are about the mini-world, or about experts that are asked and answer in
# text. Nobody is here.
_NOT_HERE = (
    "families",
    "mode",
    "expert_weight",
    "expert_negative",
    "shaping",
    "shaping_gamma",
    "expert_cap",
    "denominator",
    "route_weight",
    "route_negative",
    "route_entropy",
    "rollout_deadline_s",
    "canary_tolerance",
    "cost_per_call",
    "cost_per_usd",
    "max_cost",
    "max_expert_rise",
)
_OF_THE_WORLD = ("world", "world_seed", "world_effort", "split", "problems_per_family")


@dataclass
class LatentConfig(Stage1Config):
    """Settings of `rivet latent`."""

    # --- who takes part
    model: str = setting(
        "",
        "Checkpoint folder of the policy: a causal LM with tokenizer and chat template; empty: the "
        "latent world's, built in `world`.",
    )
    experts: list[dict[str, Any]] = setting(  # type: ignore[assignment] # a list here
        [],
        "The frozen experts: name, path, and where wanted revision, layers, last_k, dtype, "
        "reading; empty: the latent world's specialists.",
    )
    world: str = setting(
        "runs/latent/world", "Folder of the latent world: problems, specialists, policy."
    )
    world_seed: int = setting(
        1, "Of the latent world's problems and models, so that arms and seeds share one world."
    )
    world_effort: float = setting(
        1.0,
        "Scales the training steps of the latent world's models, above 0; 1 is the world of "
        "the recipes.",
    )
    split: Literal["validation", "test"] = setting(
        "test",
        "Held-out problems of the latent world that are measured; settings are chosen on "
        "`validation`.",
    )
    cache: str = setting("runs/latent/cache", "Folder of the experts' cached states.")
    problems: str = setting("latentworld", "Training problems: a .jsonl(.gz), or `latentworld`.")
    test_problems: str = setting(
        "", "Held-out problems of the final evaluation, a .jsonl(.gz); empty: the latent world's."
    )
    problems_per_family: int = setting(2500, "Training problems of each family, at least 1.")
    max_problems: int = setting(0, "Use the first of the training problems only; 0: all.")
    test_per_family: int = setting(150, "Held-out problems of each family, at least 1.")
    prompt: Literal["bare", "instruct"] = setting(
        "bare",
        "How a policy without rivet.json is asked: the problem alone, or with a system "
        "message that asks for a box.",
    )
    # --- the arm
    arm: Arm = setting(
        "full",
        "`full`; or a control: `single` (no experts), `constant` (learned context, no experts), "
        "`shuffled` (states of another problem of the family), `one-expert` (see `expert`), "
        "`static` (one learned mixture for every problem).",
    )
    expert: str = setting("", "The expert of the arm `one-expert`.")
    controls: list[str] = setting([], "Arms that are run after `arm`, each in its own folder.")
    # --- the adapter
    num_context_tokens: int = setting(4, "K, context tokens, at least 1.")
    adapter_width: int = setting(96, "Width inside the adapter, a multiple of its heads.")
    adapter_blocks: int = setting(2, "Blocks of cross-attention, at least 1.")
    adapter_heads: int = setting(4, "Attention heads, at least 1.")
    # --- the supervised warm start
    warm_steps: int = setting(
        70, "Supervised steps before RL, policy frozen (without an adapter: the policy); 0: none."
    )
    warm_batch_size: int = setting(192, "Problems of a supervised step, at least 1.")
    # At 3e-3 and 64 problems some seeds had learnt nothing from the experts after 120 steps.
    warm_learning_rate: float = setting(
        1e-3, "Of the supervised steps, above 0; without an adapter a tenth of it."
    )
    # --- RL
    learning_rate: float = setting(1e-4, "Of the policy, theta; well below the adapter's.")
    adapter_learning_rate: float = setting(1e-3, "Of the adapter, phi, above 0.")
    train_policy: bool = setting(True, "Train theta too; false trains phi alone.")
    adapter_first_steps: int = setting(20, "RL steps before theta moves, at least 0.")
    entropy: float = setting(
        0.003,
        "The entropy of each sampled token counts like an advantage of this size, at least 0; at "
        "0.03 nothing is learnt.",
    )
    sample_batch_size: int = setting(1024, "Most samples at the same time, at least 1.")
    share_prompts: bool = setting(
        True, "Read a prompt once for all its samples in the training pass; false for long texts."
    )
    max_completion_length: int | None = setting(8, "Tokens of a completion, at least 1.")
    expert_loss: ExpertLoss = setting("mask", "As in Stage I; nothing is spliced in here.")
    collapse_alarm: AlarmAction = setting("off", "On a collapse `stop`, `warn`, or `off`.")
    output_dir: str | None = setting("runs/latent/run", "Folder of the arms' run folders.")
    save_steps: float = setting(50, "Steps between two checkpoints.")
    gradient_checkpointing: bool = setting(False, "Recompute to save memory.")

    def __post_init__(self) -> None:
        if not self.model:
            # Stage I requires one; the world's is known once it is built.
            self.model = WORLD_POLICY
        self._check_unused()
        super().__post_init__()
        self._check_arm()
        self._check_latent_values()
        specs = [ExpertSpec.from_mapping(given) for given in self.experts]
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ExpertError(f"experts: names {names}; expected each once")
        if (self.model == WORLD_POLICY) != (not specs):
            raise ValueError(
                "model and experts: expected both, or neither for the latent world's own"
            )
        names = names or [specialist.family for specialist in SPECIALISTS]
        if self.arm == "one-expert" and self.expert not in names:
            raise ValueError(f"expert is {self.expert!r}; expected one of {', '.join(names)}")
        if specs and (self.problems == WORLD_POLICY or not self.test_problems):
            raise ValueError(
                f"problems is {self.problems!r}, test_problems is {self.test_problems!r}; expected "
                "a .jsonl file each with a model of your own"
            )

    @property
    def uses_world(self) -> bool:
        """Whether policy and experts are the latent world's."""
        return self.model == WORLD_POLICY

    @property
    def hears(self) -> bool:
        """Whether the arm needs experts."""
        return self.arm not in ("single", "constant")

    def specs(self) -> list[ExpertSpec]:
        """The experts that the recipe names."""
        return [ExpertSpec.from_mapping(given) for given in self.experts]

    def peft(self) -> LoraConfig | None:
        """LoRA on the language model alone; the adapter is trained whole beside it."""
        if not self.use_peft:
            return None
        from peft import LoraConfig

        targets = self.lora_target_modules
        if targets == "all-linear":
            # PEFT's own word would take the adapter's modules too.
            targets = r".*language_model\..*_proj"
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=targets,
            use_rslora=self.use_rslora,
            modules_to_save=None if self.arm == "single" else ["context_adapter"],
            task_type="CAUSAL_LM",
        )

    def _check_unused(self) -> None:
        """Refuse what would change nothing.

        Raises:
            ConfigError: Every such setting.
        """
        known = type(self).__dataclass_fields__
        why = dict.fromkeys(
            _NOT_HERE, "no expert is asked and nothing is spliced in, and there is no mini-world"
        )
        if not self.uses_world:
            why |= dict.fromkeys(_OF_THE_WORLD, "it is of the latent world, and model is another")
        faults = [
            f"{name}: got {getattr(self, name)!r}, expected it left out: {reason}"
            for name, reason in why.items()
            if getattr(self, name) not in (known[name].default, [])
        ]
        if faults:
            raise ConfigError(faults)

    def _check_arm(self) -> None:
        wrong = [arm for arm in self.controls if arm not in ARMS or arm == "one-expert"]
        if wrong or len({self.arm, *self.controls}) != 1 + len(self.controls):
            raise ValueError(
                f"controls are {self.controls}; expected other arms than {self.arm}, each once, "
                f"among {', '.join(a for a in ARMS if a != 'one-expert')}"
            )
        if (self.arm == "one-expert") != bool(self.expert):
            raise ValueError(
                f"arm is {self.arm}, expert is {self.expert!r}; expected an expert with the arm "
                "one-expert, and with no other"
            )

    def _check_latent_values(self) -> None:
        for name in (
            "num_context_tokens",
            "adapter_width",
            "adapter_blocks",
            "adapter_heads",
            "warm_batch_size",
            "sample_batch_size",
            "test_per_family",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("warm_steps", "adapter_first_steps", "entropy", "max_problems"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0")
        for name in ("adapter_learning_rate", "warm_learning_rate", "world_effort"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected above 0 and finite")
        if self.adapter_width % self.adapter_heads:
            raise ValueError(
                f"adapter_width {self.adapter_width} is no multiple of {self.adapter_heads} heads"
            )
        if self.beta != 0:
            raise ValueError(
                f"beta is {self.beta}; expected 0: a reference policy without its context would be "
                "another policy"
            )
        if self.backend != "local":
            raise ValueError(
                f"backend is {self.backend!r}; expected local: other engines take no context tokens"
            )
        if self.gradient_checkpointing and self.share_prompts:
            raise ValueError(
                "gradient_checkpointing and share_prompts are true; expected one of them: what is "
                "recomputed leaves no cache that samples could share"
            )
        if not self.train_policy and (self.use_peft or self.arm == "single"):
            raise ValueError("train_policy is false; expected true with LoRA or the arm single")


WORLD_POLICY = "latentworld"


def arm_folder(config: LatentConfig) -> str:
    """Name of an arm's run folder: the arm, with its expert."""
    name = config.arm if not config.expert else f"one-{config.expert}"
    return re.sub(r"[^\w.-]", "_", name)
