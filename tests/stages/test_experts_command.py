"""`rivet experts`: serving the mini-world's experts, and checking an experts file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from data.miniworld.experts import EXPERTS
from rivet.experts.completions import sample_seed
from rivet.experts.pool import ExpertPool
from stages.experts import main, start_miniworld_experts


@pytest.fixture(scope="module")
def configs():
    with start_miniworld_experts() as configs:
        yield configs


async def test_the_pool_gets_the_scripted_replies_over_http(configs):
    async with ExpertPool(configs) as pool:
        assert pool.names == tuple(EXPERTS)
        for name, expert in EXPERTS.items():
            for key in ("p1#0", "p1#1", "p1#2"):
                reply = await pool.ask(name, "gcd 12, 18", sample_key=key)
                assert reply.status == "ok"
                assert reply.text == expert.reply("gcd 12, 18", sample_seed(key))
                assert reply.completion_tokens > 0


def test_check_passes_on_what_serve_serves(configs, tmp_path, capsys):
    url = configs[0].base_urls[0]
    path = tmp_path / "experts.yaml"
    path.write_text(f"experts:\n  - {{name: calc, model: calc, base_url: '{url}'}}\n")
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "calc" in printed and " ms" in printed and "1 of 1 endpoints answered" in printed


def test_check_fails_and_says_what_is_wrong(configs, tmp_path, capsys):
    url = configs[0].base_urls[0]
    path = tmp_path / "experts.yaml"
    path.write_text(
        f"experts:\n  - {{name: calc, model: calx, base_url: '{url}'}}\n"
        "  - {name: far, model: m, base_url: 'http://127.0.0.1:9/v1'}\n"
    )
    assert main(["check", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "no model 'calx'" in printed and "connection" in printed
    assert "0 of 2 endpoints answered" in printed


def test_check_refuses_a_broken_file_as_bad_usage(tmp_path, capsys):
    path = tmp_path / "experts.yaml"
    path.write_text("experts:\n  - {name: calc, modle: m, base_url: 'http://h/v1'}\n")
    assert main(["check", str(path)]) == 2
    assert "did you mean model?" in capsys.readouterr().err


def test_serve_refuses_a_port_that_cannot_be_had(capsys):
    assert main(["serve", "--port", "99999"]) == 1
    assert "choose another --port" in capsys.readouterr().err


def test_the_serving_process_loads_neither_torch_nor_a_client():
    code = (
        "import sys, stages.experts, fastapi, uvicorn;"
        "bad = {'torch', 'transformers', 'openai', 'reasoning_gym', 'numpy'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
