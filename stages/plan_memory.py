"""Memory of one trainer process by part, from the model's shape and the settings of a run.

Counts what is held at the step's peak: weights, optimizer, gradients, activations, the KV cache of
the local engine. Models are built on the meta device, so a parameter count is exact and costs no
memory. The account of activations is that of transformers' Llama and Qwen attention blocks as they
run under autograd: what each saves for its backward pass, summed over a layer. A test holds the
whole against measured peaks. It does not know fragmentation, nor what a kernel takes for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Sharding = Literal["none", "full"]
Precision = Literal["fp32", "bf16"]

# Published configurations, for models that are not on this machine. A test builds each and compares
# the number of parameters with the published one.
_QWEN3 = {
    "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936,
    "tie_word_embeddings": True, "max_position_embeddings": 40_960,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49_152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
}  # fmt: skip
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_TOKEN_TILE, _VOCABULARY_TILE = 4096, 32_768  # of TRL's fused LM head
_CONTEXT_GB = 1.0  # what a CUDA context and its libraries take


class PlanError(ValueError):
    """A plan cannot be made; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a decoder that memory and arithmetic depend on.

    Attributes:
        name: As it was asked for.
        parameters: All of them, tied ones once.
        adapter_inputs: Sum of input and output widths over its linear layers, the LM head left
            out: a LoRA of rank r has r times as many parameters.
        linear_inputs: Sum of input widths over the same layers.
        hidden, layers, query, keys, mlp, vocabulary: Widths: of the residual stream, number of
            layers, all query heads, all key heads, the MLP, number of tokens.
        embeddings: Parameters of the embedding, a part of `parameters`.
        has_qk_norm: Whether queries and keys are normalised (Qwen3).
        heads: Query heads.
    """

    name: str
    parameters: int
    adapter_inputs: int
    linear_inputs: int
    hidden: int
    layers: int
    query: int
    keys: int
    mlp: int
    vocabulary: int
    embeddings: int
    has_qk_norm: bool
    heads: int


def shape_of(model: str) -> Shape:
    """The shape of a checkpoint folder, of a `config.json`, or of a published model.

    A folder that does not exist is taken for the published model that a part of its path begins
    with, such as `runs/qwen3-1.7b/warm/checkpoint`.

    Raises:
        PlanError: Neither is there, or the architecture is none that is accounted for.
    """
    from transformers import AutoConfig

    path = Path(model)
    folder = next((p for p in (path, path / "checkpoint") if (p / "config.json").is_file()), None)
    if folder is not None or path.is_file():
        config = AutoConfig.from_pretrained(folder or path)
    else:
        known = [n for n in PUBLISHED for part in path.parts if part.lower().startswith(n)]
        if not known:
            raise PlanError(
                f"{model}: no config.json there; expected a checkpoint folder, or a path in which "
                f"a name begins with one of {', '.join(PUBLISHED)}: name the shape with --shape"
            )
        values = dict(PUBLISHED[known[0]])
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    return shape_of_config(model, config)


def shape_of_config(name: str, config: Any) -> Shape:
    """The shape of a model's configuration.

    Raises:
        PlanError: The architecture is none that is accounted for.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if config.model_type not in _LLAMA_LIKE:
        raise PlanError(
            f"{name}: model_type is {config.model_type!r}; expected one of "
            f"{', '.join(_LLAMA_LIKE)}, whose layers are accounted for"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        adapter_inputs=sum(m.in_features + m.out_features for m in linear),
        linear_inputs=sum(m.in_features for m in linear),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        query=width * config.num_attention_heads,
        keys=width * config.num_key_value_heads,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        embeddings=model.get_input_embeddings().weight.numel(),
        has_qk_norm=config.model_type == "qwen3",
        heads=config.num_attention_heads,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """What one process does in one forward and backward pass.

    Attributes:
        tokens: Tokens of a micro-batch, padding included.
        scored: Positions of it that the LM head scores.
        lora_r: Rank of the adapter; 0 trains everything.
        has_checkpointing: Whether activations are recomputed.
        precision: Of the arithmetic.
        weight_bytes: Of one stored weight that is not trained by an adapter: 4 or 2.
        sharding: `full` spreads weights, gradients and optimizer over `processes` (FSDP, ZeRO-3).
        processes: Data-parallel processes.
        cached_tokens: Tokens in the local engine's KV cache while it samples.
        device: Where: `cuda` adds what its context takes.
        length: Tokens of a row. Off the GPU attention keeps its weights over them for the backward
            pass; 0 leaves them out.
    """

    tokens: int
    scored: int
    lora_r: int = 0
    has_checkpointing: bool = False
    precision: Precision = "fp32"
    weight_bytes: int = 4
    sharding: Sharding = "none"
    processes: int = 1
    cached_tokens: int = 0
    device: str = "cpu"
    length: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process by part. `peak` is no sum of all: parts do not peak together.

    Attributes:
        weights: Stored weights, and 16-bit copies of them where the arithmetic makes some.
        optimizer: Both moments of Adam, in float32.
        gradients: In float32.
        activations: Saved for the backward pass of one micro-batch.
        head: Tiles of logits and float32 sums of the fused LM head.
        kv_cache: Of the local engine, while it samples.
        context: Of the device.
        peak: What the process needs at most.
    """

    weights: float
    optimizer: float
    gradients: float
    activations: float
    head: float
    kv_cache: float
    context: float
    peak: float


def trainable(shape: Shape, lora_r: int) -> int:
    """Parameters that are trained."""
    return lora_r * shape.adapter_inputs if lora_r else shape.parameters


def memory(shape: Shape, step: Step) -> Memory:
    """Memory of one process that trains with AdamW.

    The peak of the learner is the largest of three moments: activations are whole, the LM head has
    worked and the backward pass begins in the last layer; it has turned activations into gradients;
    the embedding's second gradient (it is tied to the head) waits to be added to the first.
    """
    shards = step.processes if step.sharding == "full" else 1
    trained = trainable(shape, step.lora_r)
    frozen = shape.parameters - (0 if step.lora_r else trained)
    weights = (4 * trained + step.weight_bytes * frozen) / shards
    if step.precision == "bf16" and not step.lora_r and step.weight_bytes == 4:
        # Autocast keeps a 16-bit copy until the backward pass; sharded, that of two layers.
        layers = shape.parameters - shape.embeddings
        weights += 2 * (layers if shards == 1 else 2 * layers / shape.layers + shape.embeddings)
    optimizer, gradients = 8 * trained / shards, 4 * trained / shards
    activations, head = _activations(shape, step), _head(shape, step)
    in_head = 0.0 if step.lora_r else 4.0 * shape.embeddings / shards
    during_learning = max(
        activations + head + _workspace(shape, step),
        in_head + max(activations, gradients - in_head),
        gradients + in_head,
    )
    kv_cache = 2.0 * step.cached_tokens * shape.layers * shape.keys * _width(step)
    context = _CONTEXT_GB * 1e9 if step.device == "cuda" else 0.0
    held = weights + optimizer + context
    return Memory(
        weights,
        optimizer,
        gradients,
        activations,
        head,
        kv_cache,
        context,
        held + max(during_learning, kv_cache),
    )


def _width(step: Step) -> int:
    return 2 if step.precision == "bf16" else 4


def _activations(shape: Shape, step: Step) -> float:
    """Bytes saved for the backward pass of one micro-batch."""
    layer = step.tokens * _layer_bytes(shape, step)
    # Behind the last layer: the norm's input, its normalised form and its output.
    last = step.tokens * shape.hidden * (8 + _width(step))
    if not step.has_checkpointing:
        return shape.layers * layer + last
    inputs = shape.layers * step.tokens * shape.hidden * 4
    return inputs + layer + last


def _layer_bytes(shape: Shape, step: Step) -> float:
    """Bytes that one decoder layer saves per token.

    Each of two norms keeps its input and its normalised input, in float32, and its output, which
    is what the projections keep; queries and keys are kept rotated, and twice more where they are
    normalised; attention keeps them, values and its own output; the MLP keeps gate, activated
    gate, up and their product. Off the GPU attention with a mask keeps its weights too.
    """
    width = _width(step)
    norms = 2 * shape.hidden * (8 + width)
    kept = (8 + width) if shape.has_qk_norm else width
    attention = (shape.query + shape.keys) * kept + (shape.query + shape.keys) * width
    if step.device != "cuda":
        attention += shape.heads * step.length * width
    mlp = 4 * shape.mlp * width
    # An adapter's matrices are float32 and keep a float32 copy of a 16-bit input, and its product.
    adapter = 0
    if step.lora_r:
        per_layer = shape.linear_inputs // shape.layers
        adapter = (4 * per_layer if width == 2 else 0) + 4 * step.lora_r * 7
    return norms + attention + mlp + adapter


def _workspace(shape: Shape, step: Step) -> float:
    """Bytes of a layer's own backward pass: the gradients of its widest values, in the MLP.

    Added to those of the LM head, whose memory the allocator has seldom given back by then.
    """
    return 3.0 * step.tokens * shape.mlp * _width(step)


def _head(shape: Shape, step: Step) -> float:
    """Bytes that the fused LM head works in: a tile of logits, and float32 sums of gradients."""
    rows = min(step.scored, _TOKEN_TILE)
    # Off the GPU the tile's softmax is made by three temporaries of its size.
    tiles = 1 if step.device == "cuda" else 3
    tile = tiles * rows * min(shape.vocabulary, _VOCABULARY_TILE) * _width(step)
    sums = 4 * step.scored * shape.hidden + (0 if step.lora_r else 4 * shape.embeddings)
    return float(tile + sums)
