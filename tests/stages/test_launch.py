"""What is shipped for launching on GPUs resolves with the versions that are pinned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin

from rivet.config_help import own_fields
from rivet.experts.config import load_experts
from stages.cli import COMMANDS
from stages.stage1.config import Stage1Config

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "stages" / "launch"


def test_every_file_is_one_that_is_tested_here() -> None:
    assert {path.name for path in LAUNCH.iterdir()} == {
        "fsdp2.yaml",
        "zero3.yaml",
        "experts_open.yaml",
        "experts_api.yaml",
        "slurm_stage1.sh",
    }


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_accelerate_reads_the_configuration_without_an_unknown_key(name: str) -> None:
    config = load_config_from_file(str(LAUNCH / f"{name}.yaml"))
    assert config.num_processes == 8 and config.mixed_precision == "bf16"
    parser = launch_command_parser()
    known = {action.dest for action in parser._actions}
    raw = yaml.safe_load((LAUNCH / f"{name}.yaml").read_text())
    prefix = "fsdp_config" if name == "fsdp2" else "deepspeed_config"
    assert set(raw[prefix]) <= known, set(raw[prefix]) - known


def test_fsdp2_settings_make_the_plugin_that_they_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = yaml.safe_load((LAUNCH / "fsdp2.yaml").read_text())["fsdp_config"]
    for key, value in raw.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        monkeypatch.setenv(key.upper(), text)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert str(plugin.state_dict_type).endswith("FULL_STATE_DICT")


@pytest.mark.parametrize("name", ["experts_open", "experts_api"])
def test_expert_files_load_and_name_no_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PROVIDER_KEY", "k")
    experts = load_experts(LAUNCH / f"{name}.yaml")
    assert len(experts) >= 2 and all(expert.skill for expert in experts)
    assert name == "experts_open" or all(expert.has_price for expert in experts)


def test_the_slurm_script_is_sound_shell_and_names_what_exists() -> None:
    script = LAUNCH / "slurm_stage1.sh"
    bash = shutil.which("bash")
    assert bash is not None
    assert subprocess.run([bash, "-n", str(script)], env=dict(os.environ)).returncode == 0
    source = script.read_text()
    for path in re.findall(r"stages/[\w./-]+\.(?:yaml|sh)", source):
        assert (ROOT / path).is_file(), path
    commands = set(re.findall(r"-m stages\.cli (\w+)", source))
    assert commands == {"vllm", "stage1"} <= COMMANDS.keys()
    (given,) = re.findall(r'-- "\$RECIPE" (.*) "\$@"', source)
    settings = {item.name for item in own_fields(Stage1Config)}
    assert set(re.findall(r"--(\w+)", given)) == {"experts", "backend", "vllm_urls"} <= settings
