"""Frozen experts: any causal language model that reads a problem and leaves its hidden states.

An expert reads the problem as it would be asked it, either bare (`plain`) or through its own chat
template (`chat`), and gives the hidden states of the last tokens at chosen layers. Its weights
never get a gradient, and their digest says whether they are still what they were.

Shapes: N = problems, S = slots (layers x last tokens).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rivet.latent.policy_config import LatentPolicyConfig
from rivet.latent.states import ProblemStates
from rivet.prompts import strftime_fixed

Dtype = Literal["float32", "bfloat16", "float16"]
Reading = Literal["plain", "chat"]
_MARKER = "\u241aPROBLEM\u241a"


class ExpertError(ValueError):
    """A model cannot serve as a frozen expert; the message says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """One expert as a recipe names it.

    Attributes:
        name: What the adapter, the reports and the cache's folder call it: letters, digits, and
            `_`, `-` and `.` behind the first.
        path: A checkpoint folder, or a Hub name.
        revision: Commit, branch or tag on the Hub; empty takes the default.
        layers: Layers to take, -1 the last (after the final norm), 0 the embeddings.
        last_k: Last tokens to take, at least 1; a shorter problem leaves slots empty.
        dtype: Number format that it runs in.
        reading: `plain` reads the problem alone, `chat` through the chat template.
    """

    name: str
    path: str
    revision: str = ""
    layers: tuple[int, ...] = (-1,)
    last_k: int = 4
    dtype: Dtype = "float32"
    reading: Reading = "plain"

    def __post_init__(self) -> None:
        for key, is_right, expected in (
            ("name", _is_name(self.name), "letters, digits, and _, - and . behind the first"),
            ("path", isinstance(self.path, str) and self.path != "", "a folder or a Hub name"),
            ("revision", isinstance(self.revision, str), "text"),
            ("layers", _is_numbers(self.layers), "a list of at least one layer, such as [-1]"),
            ("last_k", type(self.last_k) is int and self.last_k >= 1, "at least one token"),
            ("dtype", self.dtype in get_args(Dtype), "one of " + ", ".join(get_args(Dtype))),
            ("reading", self.reading in get_args(Reading), "plain or chat"),
        ):
            if not is_right:
                raise ExpertError(
                    f"expert {self.name!r}: {key} is {getattr(self, key)!r}; expected {expected}"
                )
        object.__setattr__(self, "layers", tuple(self.layers))

    @classmethod
    def from_mapping(cls, given: Any) -> ExpertSpec:
        """Read a recipe's entry.

        Raises:
            ExpertError: It is no mapping, has unknown keys, or lacks name or path.
        """
        if not isinstance(given, dict):
            raise ExpertError(f"expert {given!r}: expected a mapping with name and path")
        unknown = set(given) - set(cls.__slots__)
        missing = {"name", "path"} - set(given)
        if unknown or missing:
            raise ExpertError(
                f"expert {given.get('name', given)!r}: unknown {sorted(unknown)}, missing "
                f"{sorted(missing)}; expected {', '.join(cls.__slots__)}"
            )
        return cls(**given)


def _is_name(given: object) -> bool:
    return isinstance(given, str) and re.fullmatch(r"\w[\w.-]*", given) is not None


def _is_numbers(given: object) -> bool:
    return (
        isinstance(given, list | tuple) and bool(given) and all(type(one) is int for one in given)
    )


class FrozenExpert:
    """A loaded expert.

    Args:
        spec: What to take from it.
        model: In evaluation mode from here on; it is frozen.
        tokenizer: Its own.

    Raises:
        ExpertError: A layer does not exist, there is no chat template, or no tokenizer.
    """

    def __init__(self, spec: ExpertSpec, model: PreTrainedModel, tokenizer: Any) -> None:
        self.spec = spec
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        depth = int(model.config.get_text_config().num_hidden_layers)
        wrong = [layer for layer in spec.layers if not -depth - 1 <= layer <= depth]
        if wrong:
            raise ExpertError(
                f"expert {spec.name}: layer {wrong[0]} of {spec.path}; it has {depth}, expected "
                f"{-depth - 1} to {depth}"
            )
        self._before, self._after = self._frame()

    @classmethod
    def load(cls, spec: ExpertSpec, *, device: str | torch.device = "cpu") -> FrozenExpert:
        """Load an expert from a folder or the Hub.

        Raises:
            ExpertError: It cannot be loaded as a causal language model with a tokenizer.
        """
        # A Hub name is OWNER/NAME or NAME; anything else is a path.
        if re.match(r"[/.~]|.*/.*/", spec.path) and not Path(spec.path).is_dir():
            raise ExpertError(
                f"expert {spec.name}: {spec.path}: no such folder; expected a checkpoint folder"
            )
        revision = {"revision": spec.revision} if spec.revision else {}
        try:
            tokenizer = AutoTokenizer.from_pretrained(spec.path, **revision)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                spec.path,
                dtype=getattr(torch, spec.dtype),
                output_loading_info=True,
                **revision,
            )
        except Exception as error:  # the tokenizers library raises bare exceptions
            raise ExpertError(
                f"expert {spec.name}: {spec.path} cannot be loaded ({error}); expected a "
                "checkpoint folder or a Hub name of a causal language model with its tokenizer"
            ) from error
        model, info = loaded
        if model.config.model_type == LatentPolicyConfig.model_type:
            raise ExpertError(
                f"expert {spec.name}: {spec.path} is a latent policy, which listens to experts "
                "itself; expected a causal language model"
            )
        if missing := sorted(info["missing_keys"]):
            raise ExpertError(
                f"expert {spec.name}: {spec.path} lacks {len(missing)} weights, {missing[0]} "
                "first; expected a whole checkpoint of a causal language model"
            )
        return cls(spec, model.to(device), tokenizer)

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def slots(self) -> int:
        """S, states that it gives per problem."""
        return len(self.spec.layers) * self.spec.last_k

    def fingerprint(self) -> str:
        """Digest of weights and tokenizer: equal for equal experts, wherever they lie."""
        return weights_digest(self.model) + "-" + _digest(_tokenizer_text(self.tokenizer))[:8]

    def identity(self) -> dict[str, Any]:
        """What its states depend on, JSON-able; a cache of other states is refused by it."""
        facts = asdict(self.spec) | {"layers": list(self.spec.layers), "width": self.width}
        # Where it lies does not matter, what it is does.
        facts = {k: v for k, v in facts.items() if k not in ("name", "path", "revision")}
        frame = {"before": self._before, "after": self._after}
        return facts | frame | {"fingerprint": self.fingerprint()}

    @torch.no_grad()
    def read(self, problems: Sequence[str], *, batch_size: int = 32) -> ProblemStates:
        """Hidden states of some problems.

        Args:
            problems: Their texts.
            batch_size: Problems read at the same time; similar lengths go together.

        Returns:
            Values in the expert's number format, shape (N, S, width). Slots of one layer lie
            together, the last token last.

        Raises:
            ExpertError: A problem is longer than it can read.
        """
        rows = [self.encode(problem) for problem in problems]
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for problem, row in zip(problems, rows, strict=True):
            if limit is not None and len(row) > limit:
                raise ExpertError(
                    f"expert {self.spec.name}: the problem {problem[:60]!r} has {len(row)} tokens, "
                    f"it reads {limit}; expected shorter problems, or an expert of longer texts"
                )
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
        dtype = getattr(torch, self.spec.dtype)
        values = torch.zeros(len(rows), self.slots, self.width, dtype=dtype)
        mask = torch.zeros(len(rows), self.slots, dtype=torch.bool)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            states, known = self._read_batch([rows[n] for n in chosen])
            values[chosen], mask[chosen] = states.to("cpu", dtype), known.cpu()
        return ProblemStates(values, mask)

    def encode(self, problem: str) -> list[int]:
        """Token ids that the expert reads; the problem's text cannot forge a control token."""
        ids = self.tokenizer(problem, add_special_tokens=False, split_special_tokens=True).input_ids
        return [*self._before, *ids, *self._after]

    def _read_batch(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """States (n, S, width) and their mask (n, S) of rows of token ids, padded on the right."""
        device, k = self.model.device, self.spec.last_k
        lengths = torch.tensor([len(row) for row in rows], device=device)
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long, device=device)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor(row)
        attention = torch.arange(ids.size(1), device=device) < lengths[:, None]
        # The body without the head: no logits over the vocabulary are needed.
        body = getattr(self.model, self.model.base_model_prefix, self.model)
        hidden = body(
            input_ids=ids, attention_mask=attention.long(), output_hidden_states=True
        ).hidden_states
        at = lengths[:, None] - k + torch.arange(k, device=device)  # (n, k)
        known = at >= 0
        index = at.clamp(min=0)[..., None].expand(-1, -1, self.width)
        layers = [hidden[layer].gather(1, index) * known[..., None] for layer in self.spec.layers]
        return torch.cat(layers, 1), known.repeat(1, len(layers))

    def _frame(self) -> tuple[list[int], list[int]]:
        """Token ids before and after the problem."""
        if self.spec.reading == "plain":
            # What the tokenizer puts before every text, such as BOS, and not what it puts behind.
            probe = self.tokenizer("0", add_special_tokens=False).input_ids
            around = self.tokenizer("0").input_ids
            return around[: around.index(probe[0])], []
        if not getattr(self.tokenizer, "chat_template", None):
            raise ExpertError(
                f"expert {self.spec.name}: {self.spec.path} has no chat template; expected one, or "
                "reading: plain"
            )
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARKER}],
            tokenize=False,
            add_generation_prompt=True,
            strftime_now=strftime_fixed,
        )
        if text.count(_MARKER) != 1:
            raise ExpertError(
                f"expert {self.spec.name}: its chat template does not render the user message "
                "once; expected reading: plain"
            )
        before, after = text.split(_MARKER)
        encode = self.tokenizer
        return (
            encode(before, add_special_tokens=False).input_ids,
            encode(after, add_special_tokens=False).input_ids,
        )


def weights_digest(model: torch.nn.Module) -> str:
    """Digest of a model's parameters and buffers, by name, format and content."""
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in _sorted_state(model):
        state.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1f".encode())
        state.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def _sorted_state(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in sorted(model.state_dict().items()):
        yield name, tensor if tensor.dim() else tensor[None]


def _tokenizer_text(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab()))
    return f"{text}\x1f{getattr(tokenizer, 'chat_template', None)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
