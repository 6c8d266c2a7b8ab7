"""The model card of an export: what it is, how to run it, how it was trained, what was measured.

Only measured numbers are printed; where nothing was measured the card says so. The same numbers go
into the card's `model-index`, which `huggingface_hub` parses as `EvalResult`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rivet.hub import is_hub_name
from rivet.runs import RunDir, RunDirError
from rivet.settings import ProtocolSettings
from stages.export_licences import Licences
from stages.measurements import ResultRow

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TAG = "rivet"  # in the metadata of every card of ours
PLACEHOLDER = "PATH_TO_THIS_FOLDER"  # a push puts the repository's name there


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the card says about the model itself."""

    name: str
    parameters: int
    architecture: str
    dtype: str
    licences: Licences
    repo_id: str = ""
    is_adapter: bool = False

    @property
    def place(self) -> str:
        """What a user passes where a model is wanted."""
        return self.repo_id or PLACEHOLDER


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One stage of the training, from its run folder."""

    stage: str
    seed: Any
    started_at: str
    commit: str
    versions: dict[str, str]

    @classmethod
    def load(cls, folder: Path) -> TrainingRun:
        """Read a run folder; raises `RunDirError` if it is none."""
        manifest = RunDir.load(folder).manifest
        git = manifest.get("git") or {}
        return cls(
            manifest["stage"],
            manifest["seed"],
            manifest["started_at"],
            git.get("commit", "")[:10] + ("+changes" if git.get("dirty") else ""),
            manifest["versions"],
        )

    @staticmethod
    def is_run(folder: Path) -> bool:
        """Whether a folder is a run folder."""
        try:
            RunDir.load(folder)
        except RunDirError:
            return False
        return True


def write_card(
    folder: Path,
    facts: ModelFacts,
    settings: ProtocolSettings,
    results: Sequence[ResultRow],
    runs: Sequence[TrainingRun],
) -> Path:
    """Write `README.md` and read its metadata back, as the Hub will.

    Raises:
        ValueError: The metadata does not come back as it was written.
    """
    from huggingface_hub import ModelCard, ModelCardData

    results = _by_benchmark(results)
    expected = [_eval_result(row) for row in results]
    data = ModelCardData(
        **licence_data(facts.licences),
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[TAG, "math", "tool-use", "expert-distillation"],
        model_name=facts.name if expected else None,
        eval_results=expected or None,
        metrics=["accuracy"] if expected else None,
    )
    body = "\n\n".join(
        [
            f"# {facts.name}",
            _what_it_is(facts, settings),
            _how_to_run(facts, settings),
            _results_section(results),
            _training_section(runs),
            _limits_section(bool(results)),
            licence_section(facts.licences),
        ]
    )
    path = folder / "README.md"
    path.write_text(f"---\n{data.to_yaml()}\n---\n\n{body}\n", encoding="utf-8")
    parsed = ModelCard.load(path).data.eval_results or []
    if [r.metric_value for r in parsed] != [r.metric_value for r in expected]:
        raise ValueError(f"{path}: the card's model-index does not read back as written")
    return path


def is_ours(card: Path) -> bool:
    """Whether a file is the card of an export; PEFT puts a `README.md` into each adapter, too."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        tags = ModelCard.load(card, ignore_metadata_errors=True).data.tags
    except (OSError, ValueError, YAMLError):
        return False
    return TAG in (tags or [])


def _by_benchmark(results: Sequence[ResultRow]) -> list[ResultRow]:
    """Results of one benchmark together, as a `model-index` holds them; else in their order."""
    order = list(dict.fromkeys(_slug(row.benchmark) for row in results))
    return sorted(results, key=lambda row: order.index(_slug(row.benchmark)))


def _eval_result(row: ResultRow) -> EvalResult:
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type="text-generation",
        task_name="Mathematical problem solving",
        dataset_type=_slug(row.benchmark),
        dataset_name=row.benchmark,
        metric_type="accuracy",
        metric_name=f"accuracy, {row.condition}",
        metric_value=round(row.accuracy, 4),
        metric_args={
            "condition": row.condition,
            "problems": row.n,
            "ci95": [round(row.ci_low, 4), round(row.ci_high, 4)],
        },
    )


def _slug(text: str) -> str:
    words = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return "-".join(words)


def _what_it_is(facts: ModelFacts, settings: ProtocolSettings) -> str:
    size = facts.parameters
    shown = f"{size / 1e9:.2f}B" if size >= 1e9 else f"{size / 1e6:.2f}M"
    names = ", ".join(f"`{card.name}`" for card in settings.experts)
    taught = f" It was taught by the experts {names}." if names else ""
    return (
        f"A controller with {shown} parameters ({facts.architecture}, {facts.dtype}), trained with "
        "rivet to work with expert models and then to do without them."
        f"{taught} Deployed, it calls no other model: it writes the request to an expert *and* "
        "the expert's reply itself, and the Python in them runs locally."
    )


def _how_to_run(facts: ModelFacts, settings: ProtocolSettings) -> str:
    prompt = (
        "The prompt is the problem alone, through the chat template."
        if settings.prompt == "bare"
        else "The protocol is explained in a system message, which the chat template adds."
    )
    limits = settings.limits
    place = facts.place
    install = (
        "\nThis is a LoRA adapter: its base model is loaded with it." if facts.is_adapter else ""
    )
    return f"""## Run it
{install}
**With rivet**, which runs the programs in a sandbox:

```bash
rivet solve {place} "Find the GCD of 252, 198."
rivet serve {place}        # OpenAI's chat API and a web page
```

```python
from rivet import Solver

with Solver("{place}") as solver:
    print(solver.solve("Find the GCD of 252, 198.").answer)
```

**With transformers alone**, up to the first program:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = AutoModelForCausalLM.from_pretrained("{place}")
prompt = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Find the GCD of 252, 198."}}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)
ids = model.generate(**prompt, stop_strings=["</python>"], tokenizer=tokenizer)
print(tokenizer.decode(ids[0, prompt.input_ids.shape[1]:]))
```
{_with_vllm(facts)}
{prompt} The completion is made of `<think>`, `<expert>`, `<reply>`, `<python>`, `<output>` and
`<answer>` spans. Whoever samples from it without rivet must stop at `</python>`, run the code in a
sandbox and append `<output>...</output>`; an `<output>` that the model writes itself is made up.
`rivet.json` holds the version of the protocol ({settings.protocol_version}) and the limits of a
trajectory: {limits.max_completion_length} tokens, {limits.max_code_runs} programs."""


def _with_vllm(facts: ModelFacts) -> str:
    """How vLLM serves it; empty for an adapter, of which `rivet vllm` wants the whole weights."""
    if facts.is_adapter:
        return ""
    return f"""
**With vLLM**, which rivet then asks for tokens:

```bash
rivet vllm {facts.place} --port 8100          # vLLM with the settings that rivet needs
rivet serve {facts.place} --vllm http://127.0.0.1:8100
```
"""


def licence_data(licences: Licences) -> dict[str, Any]:
    """What the metadata of a card says of licences."""
    base = licences.base_model or ""
    return {
        "license": licences.weights,
        "base_model": base if is_hub_name(base) else None,  # a path means nothing elsewhere
        "datasets": [name for name, _ in licences.data if is_hub_name(name)] or None,
    }


def licence_section(licences: Licences) -> str:
    """The section of a card about licences."""
    lines = ["## Licence", "", f"- these weights: {licences.weights}"]
    if licences.base_model:
        lines.append(f"- base model, {licences.base_model}: {licences.base}")
    else:
        lines.append("- base model: none, trained from scratch")
    lines += [f"- data, {name}: {licence}" for name, licence in licences.data]
    if not licences.data:
        lines.append("- data: not stated when this was exported")
    return "\n".join(lines)


def _results_section(results: Sequence[ResultRow]) -> str:
    if not results:
        return "## Results\n\nNot measured."
    lines = [
        "## Results",
        "",
        "Condition `local`: the model alone, as deployed. `experts`: with the experts at hand. "
        "Intervals: 95%, clustered by problem.",
        "",
        "| benchmark | condition | accuracy % | 95% interval | problems | well-formed % |",
        "|---|---|---|---|---|---|",
    ]
    for row in results:
        formed = "-" if row.well_formed is None else f"{100 * row.well_formed:.1f}"
        interval = f"{100 * row.ci_low:.1f} to {100 * row.ci_high:.1f}"
        lines.append(
            f"| {row.benchmark} | {row.condition} | {100 * row.accuracy:.1f} | {interval} "
            f"| {row.n} | {formed} |"
        )
    return "\n".join(lines)


def _training_section(runs: Sequence[TrainingRun]) -> str:
    if not runs:
        return "## Training\n\nNo run folder was named when this was exported."
    lines = ["## Training", "", "| stage | started | seed | commit | torch | transformers | trl |"]
    lines.append("|---|---|---|---|---|---|---|")
    for run in runs:
        packages = " | ".join(run.versions.get(p, "-") for p in ("torch", "transformers", "trl"))
        lines.append(
            f"| {run.stage} | {run.started_at[:10]} | {run.seed} | {run.commit or '-'} "
            f"| {packages} |"
        )
    return "\n".join(lines)


def _limits_section(is_measured: bool) -> str:
    scope = " What it does on other problems than the benchmarks above is not known."
    return (
        "## Limits\n\n"
        "It runs programs that it writes: run it in rivet's sandbox or one of your own. Replies "
        "that it writes in an expert's name are its own words and can be wrong."
        f"{scope if is_measured else ''}"
    )
