"""Configurations: precedence, conversions, and every fault named with its place."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from rivet.config import ConfigError, load_config, parse_config
from rivet.config_help import own_fields, shown_command, to_plain
from rivet.typed_values import describe

ROOT = Path(__file__).parents[2]


class Colour(Enum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


@dataclass
class Config:
    """One field of each type that stages use."""

    steps: int = field(default=10, metadata={"help": "Optimizer steps."})
    rate: float = field(default=1e-3, metadata={"help": "Learning rate; 50%% of what you want."})
    loss: Literal["paper", "positive", "off"] = field(default="paper", metadata={"help": "Loss."})
    name: str = field(default="x", metadata={"help": "Name."})
    experts: list[str] = field(default_factory=list, metadata={"help": "Names."})
    seeds: tuple[int, ...] = field(default=(1,), metadata={"help": "Seeds."})
    pair: tuple[int, int] = field(default=(1, 2), metadata={"help": "Two numbers."})
    weights: dict[str, float] = field(default_factory=dict, metadata={"help": "Weights."})
    folder: Path | None = field(default=None, metadata={"help": "Folder."})
    cap: int | None = field(default=5, metadata={"help": "Cap."})
    fast: bool = field(default=False, metadata={"help": "Fast."})
    maybe: bool | None = field(default=None, metadata={"help": "Maybe."})
    colour: Colour = field(default=Colour.RED, metadata={"help": "Colour."})
    extra: dict[str, Any] | str | None = field(default=None, metadata={"help": "Extra."})
    many: str | list[str] | None = field(default=None, metadata={"help": "One or many."})
    mixed: int | str | None = field(default=None, metadata={"help": "Number or name."})

    def __post_init__(self) -> None:
        if self.steps == 13 and self.fast:
            raise ValueError("steps=13 cannot be fast; use steps=12")


def parse(*argv: str) -> Config:
    """The configuration that a command line gives."""
    return parse_config(Config, argv, prog="rivet test").config


def recipe(folder: Path, text: str) -> Path:
    """A recipe file with this text."""
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def faults_of(folder: Path, text: str, **overrides: Any) -> list[str]:
    """Messages for a broken recipe, its folder left out."""
    with pytest.raises(ConfigError) as caught:
        load_config(Config, recipe(folder, text), **overrides)
    return [fault.replace(f"{folder}/", "") for fault in caught.value.faults]


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_defaults(
    tmp_path: Path,
) -> None:
    path = recipe(tmp_path, "steps: 20\nname: from recipe\n")
    parsed = parse_config(Config, [str(path), "--steps", "30"], prog="rivet test")
    assert (parsed.config.steps, parsed.config.name, parsed.config.rate) == (
        30,
        "from recipe",
        1e-3,
    )
    assert parsed.recipe == path and parsed.given == {"steps", "name"}
    assert parse("--config", str(path)).steps == 20


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        (["--rate", "5e-4"], "rate", 5e-4),
        (["--rate", "2"], "rate", 2.0),
        (["--rate=-0.5"], "rate", -0.5),
        (["--rate", "-1e-3"], "rate", -1e-3),
        (["--fast"], "fast", True),
        (["--fast", "true"], "fast", True),
        (["--fast", "False"], "fast", False),
        (["--maybe"], "maybe", True),
        (["--maybe", "null"], "maybe", None),
        (["--cap", "null"], "cap", None),
        (["--cap", "7"], "cap", 7),
        (["--name", "null"], "name", "null"),
        (["--name", "12"], "name", "12"),
        (["--name", "a # b: c"], "name", "a # b: c"),
        (["--name", "2024-01-01"], "name", "2024-01-01"),
        (["--name", "[not a list"], "name", "[not a list"),
        (["--loss", "off"], "loss", "off"),
        (["--colour", "blue"], "colour", Colour.BLUE),
        (["--experts", "calc", "12"], "experts", ["calc", "12"]),
        (["--experts", "calc"], "experts", ["calc"]),
        (["--experts", "[a, b]"], "experts", ["a", "b"]),
        (["--experts"], "experts", []),
        (["--seeds", "1", "2", "3"], "seeds", (1, 2, 3)),
        (["--seeds", "4"], "seeds", (4,)),
        (["--weights", '{"a": 1, "b": 5e-1}'], "weights", {"a": 1.0, "b": 0.5}),
        (["--folder", "runs/a"], "folder", Path("runs/a")),
        (["--extra", '{"a": [1]}'], "extra", {"a": [1]}),
        (["--extra", "file.json"], "extra", "file.json"),
        (["--many", "q_proj"], "many", "q_proj"),
        (["--many", "q_proj", "k_proj"], "many", ["q_proj", "k_proj"]),
        (["--mixed", "3"], "mixed", 3),
        (["--mixed", "three"], "mixed", "three"),
    ],
)
def test_values_are_read_as_their_field_means_them(
    argv: list[str], name: str, expected: object
) -> None:
    value = getattr(parse(*argv), name)
    assert value == expected and type(value) is type(expected)


def test_dashes_and_underscores_name_the_same_field() -> None:
    @dataclass
    class Two:
        a_b: int = 0

    assert parse_config(Two, ["--a-b", "3"], prog="x").config.a_b == 3


def test_every_fault_of_a_recipe_is_reported_at_once_with_line_and_nearest_name(
    tmp_path: Path,
) -> None:
    text = "stepz: 3\nrate: fast\n\nloss: positve\ncap: true\nname: 12\nseeds: [1, x]\npair: [1]\n"
    assert faults_of(tmp_path, text, experts="one") == [
        "recipe.yaml:1: stepz: unknown setting; did you mean steps?",
        "recipe.yaml:2: rate: got fast (text), expected number",
        "recipe.yaml:4: loss: got positve (text), expected paper | positive | off; "
        "did you mean positive?",
        "recipe.yaml:5: cap: got true, expected integer or null",
        "recipe.yaml:6: name: got 12 (integer), expected text; put it in quotes",
        "recipe.yaml:7: seeds: got [1, x] (list), expected list of integer",
        "recipe.yaml:8: pair: got [1] (list), expected list of integer",
        "override: experts: got one (text), expected list of text",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [1, 2\nname: y", "recipe.yaml:2: broken YAML"),
        ("steps: \0", "recipe.yaml: broken YAML"),
        ("- steps", "recipe.yaml:1: expected `name: value` lines, got a list"),
        ("steps: 1\nsteps: 2", "recipe.yaml:2: steps: set already in line 1"),
        ("a:\n  - {b: 1,\n     b: 2}", "recipe.yaml:3: b: set already in line 2"),
        ("steps: 13\nfast: true", "recipe.yaml: Config: steps=13 cannot be fast; use steps=12"),
        ("steps: !!python/object:os.system x", "recipe.yaml:1: broken YAML"),
    ],
)
def test_a_broken_recipe_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert faults_of(tmp_path, text)[0].startswith(message)


def test_a_missing_recipe_is_named_with_a_near_one(tmp_path: Path) -> None:
    recipe(tmp_path, "")
    with pytest.raises(ConfigError, match="recipes.yaml: no such file.*did you mean recipe.yaml"):
        load_config(Config, tmp_path / "recipes.yaml")


def test_an_empty_recipe_means_the_defaults(tmp_path: Path) -> None:
    assert load_config(Config, recipe(tmp_path, "# nothing\n")) == Config()


def test_a_choice_named_off_is_not_taken_for_a_boolean(tmp_path: Path) -> None:
    assert load_config(Config, recipe(tmp_path, "loss: off")).loss == "off"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stepz", "3"], "--stepz: unknown setting; did you mean steps?"),
        (["--steps", "1.5"], "--steps: got 1.5 (number), expected integer"),
        (["--rate", "nan"], "--rate: got nan (text), expected number"),
        (["--steps"], "--steps: got no value, expected integer"),
        (["--steps", "1", "2"], "--steps: got [1, 2] (list), expected integer"),
        (["a.yaml", "b.yaml"], "command line: unexpected argument 'b.yaml'"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_why(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_required_setting_that_nobody_sets_is_named() -> None:
    @dataclass
    class Needs:
        checkpoint: str

    with pytest.raises(ConfigError, match="checkpoint: required"):
        load_config(Needs)


def test_plain_arguments_fill_the_fields_that_a_command_names() -> None:
    parsed = parse_config(
        Config, ["gcd(1, 2) = ?", "7", "--fast"], prog="x", positional=("name", "steps")
    )
    assert (parsed.config.name, parsed.config.steps, parsed.config.fast) == (
        "gcd(1, 2) = ?",
        7,
        True,
    )


def test_dry_run_prints_a_recipe_that_gives_the_same_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--rate", "5e-4", "--colour", "blue", "--seeds", "1", "2", "--folder", "a"]
    with pytest.raises(SystemExit) as caught:
        parse(*argv, "--dry-run")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert load_config(Config, recipe(tmp_path, text)) == parse(*argv)


def test_help_lists_each_setting_with_type_help_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--loss paper | positive | off\n      Loss. (default: paper)" in text
    assert "50% of what you want. (default: 0.001)" in text


def test_no_command_line_shows_a_secret() -> None:
    words = [
        "rivet",
        "stage2",
        "r.yaml",
        "--hub_token",
        "hf_abc",
        "--seed",
        "1",
        "--hub-token=hf_x",
    ]
    shown = shown_command(words)
    assert "hf_" not in shown and shown.startswith("rivet stage2 r.yaml --hub_token ")
    assert "--seed 1" in shown


def test_tokens_of_the_vocabulary_are_no_secrets() -> None:
    plain = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "max_tokens": "3"}
    assert to_plain(plain) == plain


@pytest.mark.parametrize("text", ["2024-02-30", "0b_", "!!int x", "[" * 3000, "9" * 400])
def test_what_yaml_cannot_make_a_value_of_is_text_or_a_fault_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        parse("--rate", text)
    assert "--rate: got" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="recipe.yaml:1"):
        load_config(Config, recipe(tmp_path, f"rate: {text}\n"))


def test_secrets_are_not_written_down() -> None:
    plain = to_plain({"hub_token": "hf_abc", "max_tokens": 3, "inner": {"openai_api_key": "k"}})
    assert plain == {
        "hub_token": "<withheld>",
        "max_tokens": 3,
        "inner": {"openai_api_key": "<withheld>"},
    }


def test_types_are_described_in_words() -> None:
    assert describe(list[str] | str | None) == "list of text or text or null"
    assert describe(Colour) == "red | blue"


def test_reading_configurations_imports_no_torch() -> None:
    code = "import rivet.config, rivet.runs, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.fixture(scope="module")
def stage_config() -> type:
    """A GRPOConfig with a field of ours."""
    from trl import GRPOConfig

    @dataclass
    class StageConfig(GRPOConfig):
        """Ours."""

        expert_loss: Literal["paper", "mask"] = field(
            default="paper", metadata={"help": "Expert tokens."}
        )

    return StageConfig


def test_every_trl_argument_works_from_recipe_and_command_line(
    stage_config: type, tmp_path: Path
) -> None:
    path = recipe(
        tmp_path,
        "learning_rate: 5e-4\nsave_strategy: no\nuse_cpu: true\nbf16: false\n"
        "report_to: none\nlr_scheduler_kwargs: {num_cycles: 2}\nlogging_steps: 1\n",
    )
    argv = [str(path), "--num_generations", "4", "--epsilon_high", "null", "--expert_loss"]
    config = parse_config(stage_config, [*argv, "mask"], prog="rivet stage1").config
    assert config.learning_rate == 5e-4 and config.epsilon_high is None
    assert config.save_strategy == "no" and config.report_to == []
    assert config.lr_scheduler_kwargs == {"num_cycles": 2}
    assert (config.num_generations, config.expert_loss) == (4, "mask")


def test_an_impossible_combination_is_reported_with_the_recipe(
    stage_config: type, tmp_path: Path
) -> None:
    path = recipe(
        tmp_path,
        "use_cpu: true\nbf16: false\nsteps_per_generation: 4\ngeneration_batch_size: 3\n",
    )
    with pytest.raises(ConfigError, match="recipe.yaml: StageConfig: .*generation_batch_size"):
        load_config(stage_config, path)


def test_help_puts_our_settings_before_the_inherited(
    stage_config: type, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_config(stage_config, ["--help"], prog="rivet stage1")
    text = capsys.readouterr().out
    heads = ["settings:", "--expert_loss", "from GRPOConfig:", "--num_generations"]
    heads += ["from TrainingArguments:", "--weight_decay"]
    places = [text.index(head) for head in heads]
    assert places == sorted(places)
    assert [f.name for f in own_fields(stage_config)] == ["expert_loss"]


def test_help_puts_a_command_s_own_settings_before_those_mixed_in() -> None:
    @dataclass
    class Mixed:
        seed: int = 0
        size: int = 1

    @dataclass
    class Command(Mixed):
        model: str = ""
        size: int = 2

    assert [f.name for f in own_fields(Command)] == ["model", "size", "seed"]


def test_the_resolved_configuration_is_plain_data(stage_config: type) -> None:
    config = load_config(stage_config, use_cpu=True, bf16=False)
    plain = to_plain(config)
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain
    assert plain["save_strategy"] == "steps"


def test_an_error_survives_the_way_from_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["a: wrong", "b: wrong"])))
    assert error.faults == ("a: wrong", "b: wrong") and str(error) == "a: wrong\nb: wrong"
