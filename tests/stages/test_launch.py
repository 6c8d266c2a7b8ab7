"""What is shipped for launching on GPUs resolves with the versions that are pinned."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from jinja2 import Environment

from data.miniworld.dialogues import code_of
from data.miniworld.experts import EXPERTS, parse_request, route, run_script
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
        "experts_gemma.yaml",
        "completion.jinja",
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


def test_the_model_among_the_mini_worlds_experts_takes_the_place_of_one_script() -> None:
    experts = {expert.name: expert for expert in load_experts(LAUNCH / "experts_gemma.yaml")}
    assert {name: expert.skill for name, expert in experts.items()} == {
        name: script.skill for name, script in EXPERTS.items()
    }
    assert [name for name, expert in experts.items() if expert.has_price] == ["numth"]
    # The examples are right, or the model would learn mistakes from them.
    example = r"Request: (.*)\n.*\n```python\n((?:.*\n)+?)```"
    examples = re.findall(example, experts["numth"].system)
    families = [parse_request(request) for request, _ in examples]
    assert len({parsed[0] for parsed in families if parsed}) == len(examples) == 6
    for request, program in examples:
        knows = EXPERTS[route((parse_request(request) or ("", ""))[0])]
        assert run_script(program) == run_script(code_of(knows.reply(request, 0)))


def test_a_base_model_is_asked_to_go_on_behind_the_examples() -> None:
    template = Environment().from_string((LAUNCH / "completion.jinja").read_text())
    system = {"role": "system", "content": "Examples.\n"}
    asked = {"role": "user", "content": "gcd 12, 18"}
    said = {"role": "assistant", "content": "print(6)\n"}
    text = template.render(messages=[system, asked, said, asked], bos_token="<bos>")
    request = "Request: gcd 12, 18\n"
    assert text == f"<bos>Examples.\n\n{request}print(6)\n\n{request}"


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


# As Slurm's: a SIGTERM to srun kills its task, `scancel --signal` reaches the task.
SRUN = """#!/bin/bash
case "$*" in
*"stages.cli vllm"*) echo $$ > server; exec sleep 60 ;;
esac
until [ -s server ]; do sleep 0.02; done
bash -c 'trap "kill -0 $(cat server) && echo beside its server > saved; exit 130" TERM
  echo $$ > task; while :; do sleep 0.02; done' &
trap 'kill -KILL $!; exit 143' TERM
wait $!
"""
SCANCEL = """#!/bin/bash
[ "$*" = "--signal=TERM 7.1" ] && kill -TERM "$(cat task)"
"""


def test_the_slurm_jobs_learner_saves_its_step_before_the_time_limit_while_its_server_lives(
    tmp_path: Path,
) -> None:
    commands = {"srun": SRUN, "scancel": SCANCEL, "curl": "#!/bin/bash\n"}
    commands["scontrol"] = "#!/bin/bash\nprintf 'a\\nb\\n'\n"
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EXPERTS": "e.yaml", "MODEL": "m"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}
    job = subprocess.Popen(
        ["bash", str(LAUNCH / "slurm_stage1.sh"), "recipe.yaml"],
        cwd=tmp_path,
        env=dict(os.environ) | given | slurm,
        start_new_session=True,
    )
    try:
        task = tmp_path / "task"
        until(lambda: (task.exists() and bool(task.read_text())) or job.poll() is not None)
        job.terminate()
        assert job.wait(timeout=30) == 130
        assert (tmp_path / "saved").read_text() == "beside its server\n"
        until(lambda: not Path(f"/proc/{(tmp_path / 'server').read_text().strip()}").exists())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
