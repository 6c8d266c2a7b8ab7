"""`rivet experts`: serving the mini-world's experts, and checking an experts file."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from data.miniworld.experts import EXPERTS
from rivet.experts.completions import sample_seed
from rivet.experts.config import BudgetConfig, load_experts
from rivet.experts.ledger import Ledger, Spent
from rivet.experts.pool import ExpertPool
from stages.experts import main, start_miniworld_experts, vllm_command


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


def test_check_prints_prices_and_whose_tokens_are_estimated(configs, tmp_path, capsys):
    url = configs[0].base_urls[0]
    path = tmp_path / "experts.yaml"
    path.write_text(
        f"experts:\n  - {{name: calc, model: calc, base_url: '{url}', "
        "usd_per_million_prompt_tokens: 2, usd_per_million_completion_tokens: 4}\n"
    )
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert url in printed and "a call" in printed and "$0.0000" in printed


def test_check_of_a_replayed_run_asks_nobody_and_counts_the_record(configs, tmp_path, capsys):
    expert = "experts:\n  - {name: calc, model: calc, base_url: 'URL'}\n"
    path = tmp_path / "experts.yaml"
    there = expert.replace("URL", configs[0].base_urls[0])
    path.write_text(there + "cache: {mode: record, path: kept.sqlite}\n")

    async def ask() -> None:
        async with ExpertPool(load_experts(path)) as pool:
            await pool.ask("calc", "gcd 12, 18", sample_key="1/p#0@0/0")

    asyncio.run(ask())
    nobody = expert.replace("URL", "http://127.0.0.1:9/v1")
    path.write_text(nobody + "cache: {mode: replay}\n")
    assert main(["check", str(path)]) == 2
    assert "experts_cache.sqlite does not exist" in capsys.readouterr().err
    path.write_text(nobody + "cache: {mode: replay, path: kept.sqlite}\n")
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "calc             1 replies recorded" in printed and "nobody is asked" in printed


def test_spent_prints_the_books_of_a_run(tmp_path, capsys):
    ledger = Ledger(tmp_path, BudgetConfig())
    ledger.begin_call("calc")
    ledger.add("calc", Spent(0, 2, 100, 50, 0.125, 1))
    ledger.close()
    assert main(["spent", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "calc             1 calls, 150 tokens, $0.1250, 1 replies estimated\n"
    )
    assert main(["spent", str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_vllm_is_asked_to_serve_the_model_under_its_name():
    command = vllm_command("python3", "models/m", "big", 8001, dtype="auto", max_batch=4)
    assert command[:3] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    pairs = dict(zip(command[3:], command[4:], strict=False))
    assert (pairs["--model"], pairs["--served-model-name"]) == ("models/m", "big")
    assert (pairs["--host"], pairs["--port"]) == ("127.0.0.1", "8001")


def test_serve_names_what_is_wrong_with_a_model(tmp_path, capsys):
    assert main(["serve", "--hf", str(tmp_path)]) == 1
    assert "no config.json; expected a folder with a Hugging Face model" in capsys.readouterr().err
    assert main(["serve", "--hf", str(tmp_path), "--max-batch", "0"]) == 1
    assert "--max-batch is 0" in capsys.readouterr().err
