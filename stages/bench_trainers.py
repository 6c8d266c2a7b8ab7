"""The trainers that `stages.bench_train` compares, over random models and ragged random rows.

Model and tokens of a pair are the same; nothing is learnt from random tokens, and a step costs what
any step of these lengths costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from data.problems import Problem
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import ExpertCall, Segment, Trajectory
from stages.plan_memory import PUBLISHED, Step, memory, shape_of_config
from stages.stage1.config import Stage1Config
from stages.stage1.rollouts import Asked, StepRollouts
from stages.stage1.trainer import Stage1Trainer
from stages.stage2.objective import AUTHOR_CODES, KIND_CODES, Objective
from stages.stage2.trainer import Stage2Trainer

_TEXT = ("controller", "reasoning")
_GROUP = 4
Builder = Callable[["Sizes", Path, Sequence[TrainerCallback]], Trainer]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Model and data of a benchmark; the defaults are a model of 27 million parameters.

    Attributes:
        shape: A published model, such as `qwen3-1.7b`, in the place of the first four sizes.
        hidden, layers, mlp, vocabulary: Widths and depth of a Qwen3.
        rows, steps: Rows of a step, and steps.
        prompt, shortest, longest: Tokens of every prompt, and bounds of the completions'.
        dtype: Of the weights; on a GPU `bfloat16` computes in it too, by autocast as the stages do.
        lora_r: Rank of an adapter; 0 trains everything.
        checkpointing: 1 recomputes activations.
        parts: Parts that Stage I and GRPO accumulate a step's gradient over.
    """

    shape: str = ""

    hidden: int = 512
    layers: int = 6
    mlp: int = 1536
    vocabulary: int = 16_384
    rows: int = 8
    prompt: int = 48
    shortest: int = 32
    longest: int = 384
    steps: int = 9
    dtype: str = "float32"
    lora_r: int = 0
    checkpointing: int = 0
    parts: int = 1

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """An option for each size."""
        for item in fields(cls):
            kind: Any = type(item.default)
            parser.add_argument(f"--{item.name}", type=kind, default=item.default)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Sizes:
        """The sizes that a command line names."""
        return cls(**{item.name: getattr(arguments, item.name) for item in fields(cls)})

    def arguments(self) -> list[str]:
        """The command line that names them."""
        return [text for k, v in asdict(self).items() for text in (f"--{k}", str(v))]

    def with_(self, **changes: Any) -> Sizes:
        """A copy with other values."""
        return replace(self, **changes)

    def described(self) -> dict[str, Any]:
        """For the report: the sizes, and the number of parameters."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self._config())
        parameters = sum(p.numel() for p in model.parameters())
        replaced = ("hidden", "layers", "mlp", "vocabulary") if self.shape else ("shape",)
        return {k: v for k, v in asdict(self).items() if k not in replaced} | {
            "parameters": parameters
        }

    def lengths(self) -> np.ndarray:
        """Completion lengths of every row of the run: many short ones, few long, (steps*rows,)."""
        random = np.random.default_rng(0)
        share = random.beta(1.0, 2.5, self.steps * self.rows)
        return (self.shortest + share * (self.longest - self.shortest)).astype(int)

    def scored_tokens(self) -> int:
        """Completion tokens of the largest step."""
        return int(self.lengths().reshape(self.steps, self.rows).sum(1).max())

    @property
    def group(self) -> int:
        """Trajectories of a problem."""
        return min(_GROUP, self.rows)

    def last_step_tokens(self) -> int:
        """Tokens of the rows of the last step, without padding."""
        return int(self.lengths()[-self.rows :].sum()) + self.rows * self.prompt

    def planned_peak(self) -> float:
        """Bytes that `rivet plan` expects a step of our trainers to take."""
        is_bf16 = self.dtype == "bfloat16"
        length = self.prompt + int(self.lengths()[-self.rows :].max())
        step = Step(
            tokens=self.rows * length,
            scored=self.last_step_tokens() - self.rows * self.prompt,
            lora_r=self.lora_r,
            has_checkpointing=bool(self.checkpointing),
            precision="bf16" if is_bf16 else "fp32",
            weight_bytes=2 if is_bf16 else 4,
            device="cuda" if torch.cuda.is_available() else "cpu",
            length=length,
        )
        return memory(shape_of_config(self.shape, self._config()), step).peak

    def accumulated(self) -> dict[str, int]:
        """The trainers' settings that split a step into parts."""
        return {
            "per_device_train_batch_size": self.rows // self.parts,
            "gradient_accumulation_steps": self.parts,
        }

    def adapter(self) -> LoraConfig | None:
        """As a stage makes it."""
        if not self.lora_r:
            return None
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=2 * self.lora_r,
            target_modules="all-linear",
            exclude_modules=["lm_head"],
            task_type="CAUSAL_LM",
        )

    def _config(self) -> Any:
        if self.shape:
            values = dict(PUBLISHED[self.shape])
            return AutoConfig.for_model(values.pop("model_type"), **values)
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=max(1, self.hidden // 256),
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )

    def model(self) -> Any:
        """A random model, made in its number format: in float32 a large one would not fit."""
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(self._config(), dtype=getattr(torch, self.dtype))


def tokenizer() -> ProtocolTokenizer:
    """The mini controller's: trainers demand one; the rows' ids are its own."""
    from data.miniworld.dialogues import tokenizer_corpus
    from data.miniworld.experts import EXPERTS
    from stages.mini_controller import build_tokenizer

    built = build_tokenizer(tokenizer_corpus(300), words=list(EXPERTS))
    built.hf.padding_side = "left"
    return built


def _rows(sizes: Sizes, vocabulary: int) -> list[list[int]]:
    """Prompt and completion ids of every row of the run."""
    random = np.random.default_rng(1)
    return [
        random.integers(2, vocabulary, sizes.prompt + length).tolist() for length in sizes.lengths()
    ]


def _arguments(sizes: Sizes, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": sizes.steps,
        "per_device_train_batch_size": sizes.rows,
        "learning_rate": 1e-5,
        "bf16": sizes.dtype == "bfloat16" and torch.cuda.is_available(),
        "gradient_checkpointing": bool(sizes.checkpointing),
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1000,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **more,
    }


def stage2(
    sizes: Sizes, folder: Path, callbacks: Sequence[TrainerCallback], **more: Any
) -> Trainer:
    """Our Stage II trainer without weights."""
    rows = _rows(sizes, 600)
    author = {name: code for code, name in enumerate(AUTHOR_CODES)}
    kind = {name: code for code, name in enumerate(KIND_CODES)}
    data: dict[str, list[Any]] = {"input_ids": [], "authors": [], "kinds": [], "length": []}
    for ids in rows:
        written = len(ids) - sizes.prompt
        data["input_ids"].append(np.array(ids, np.int32))
        for column, codes, (first, then) in (
            ("authors", author, ("prompt", _TEXT[0])),
            ("kinds", kind, ("prompt", _TEXT[1])),
        ):
            values = [codes[first]] * sizes.prompt + [codes[then]] * written
            data[column].append(np.array(values, np.uint8))
        data["length"].append(len(ids))
    return Stage2Trainer(
        sizes.model(),
        SFTConfig(**_arguments(sizes, folder, **{"train_sampling_strategy": "sequential", **more})),
        objective=Objective(),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer().hf,
        callbacks=callbacks,
        peft_config=sizes.adapter(),
    )


def trl_sft(sizes: Sizes, folder: Path, callbacks: Sequence[TrainerCallback]) -> Trainer:
    """TRL's, on the same rows."""
    rows = _rows(sizes, 600)
    labels = [[-100] * sizes.prompt + ids[sizes.prompt :] for ids in rows]
    return SFTTrainer(
        sizes.model(),
        SFTConfig(
            **_arguments(
                sizes,
                folder,
                train_sampling_strategy="sequential",
                dataset_kwargs={"skip_prepare_dataset": True},
            )
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": labels}),
        processing_class=tokenizer().hf,
        callbacks=list(callbacks),
        peft_config=sizes.adapter(),
    )


def packed(sizes: Sizes, folder: Path, callbacks: Sequence[TrainerCallback]) -> Trainer:
    """Ours, rows packed."""
    length = sizes.prompt + sizes.longest
    return stage2(sizes, folder, callbacks, packing=True, max_length=length)


def _trajectory(sizes: Sizes, asked: Asked, ids: list[int]) -> Trajectory:
    """A controller that asks, a reply, an answer; half of a group is right."""
    written = ids[sizes.prompt :]
    first, second = len(written) // 3, 2 * len(written) // 3
    reward = float(asked.sample_index % 2)
    sampled = [-1.0] * len(written)
    return Trajectory(
        id=asked.id,
        problem_id=asked.problem.id,
        mode="experts",
        prompt_ids=tuple(ids[: sizes.prompt]),
        segments=(
            Segment("controller", "request", tuple(written[:first]), tuple(sampled[:first])),
            Segment("expert", "reply", tuple(written[first:second])),
            Segment("controller", "answer", tuple(written[second:]), tuple(sampled[second:])),
        ),
        finish="answer",
        well_formed=True,
        answer="1",
        expert_calls=(ExpertCall("calc", "ok"),),
        outcome="right" if reward else "wrong",
        reward=reward,
        step=asked.step,
        sample_index=asked.sample_index,
    )


def stage1(sizes: Sizes, folder: Path, callbacks: Sequence[TrainerCallback]) -> Trainer:
    """Our Stage I trainer on given rollouts, which it stores as it always does."""
    rows = _rows(sizes, 600)

    class Given:
        def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
            start = (asked[0].step - 1) * sizes.rows
            return [_trajectory(sizes, one, rows[start + n]) for n, one in enumerate(asked)]

        def sample_until_mixed(
            self, groups: Sequence[Sequence[Sequence[Asked]]]
        ) -> list[list[list[Trajectory]]]:
            return [[self.sample(choices[0])] for choices in groups]

    per_step = sizes.rows // sizes.group
    return Stage1Trainer(
        model=sizes.model(),
        args=Stage1Config(
            model="random",
            num_generations=sizes.group,
            use_peft=bool(sizes.lora_r),
            lora_r=max(sizes.lora_r, 1),
            lora_alpha=2 * max(sizes.lora_r, 1),
            expert_loss="paper",  # every token of the completion is trained, as TRL does
            max_completion_length=sizes.longest,
            **_arguments(sizes, folder, **sizes.accumulated()),
        ),
        problems=[Problem(f"p{n}", f"{n}", "1") for n in range(per_step * sizes.steps)],
        rollouts=StepRollouts(Given(), TrajectoryStore(folder / "trajectories")),
        tokenizer=tokenizer(),
        experts=["calc"],
        callbacks=list(callbacks),
    )


def trl_grpo(sizes: Sizes, folder: Path, callbacks: Sequence[TrainerCallback]) -> Trainer:
    """TRL's, on the same rollouts."""
    rows = _rows(sizes, 600)

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        start = trainer.state.global_step * sizes.rows
        taken = rows[start : start + sizes.rows]
        return {
            "prompt_ids": [ids[: sizes.prompt] for ids in taken],
            "completion_ids": [ids[sizes.prompt :] for ids in taken],
            "logprobs": [[-1.0] * (len(ids) - sizes.prompt) for ids in taken],
        }

    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        return [float(n % 2) for n in range(len(completions))]

    count = sizes.rows // sizes.group * sizes.steps
    prompts = [[{"role": "user", "content": str(n)}] for n in range(count)]
    return GRPOTrainer(
        model=sizes.model(),
        reward_funcs=[reward],
        args=GRPOConfig(
            num_generations=sizes.group,
            max_completion_length=sizes.longest,
            shuffle_dataset=False,
            **_arguments(sizes, folder, **sizes.accumulated()),
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer().hf,
        rollout_func=rollout,
        callbacks=list(callbacks),
        peft_config=sizes.adapter(),
    )


BUILDERS: dict[str, Builder] = {
    "stage2": stage2,
    "trl_sft": trl_sft,
    "padded": stage2,
    "packed": packed,
    "stage1": stage1,
    "trl_grpo": trl_grpo,
}
