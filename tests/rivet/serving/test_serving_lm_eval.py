"""lm-eval drives the server as it drives any chat endpoint, and scores what the model answers.

lm-eval is no dependency of rivet: it brings a dozen packages. The test runs where the variable
LM_EVAL, or the path, names its command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from learnt import save_learnt
from running_server import running

from rivet.async_solver import AsyncSolver
from rivet.tokenization import ProtocolTokenizer

LM_EVAL = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
TASK = Path(__file__).with_name("lm_eval_task")
ROWS = [json.loads(line) for line in (TASK / "problems.jsonl").read_text().splitlines()]


def test_the_ten_problems_have_the_answers_that_their_programs_print() -> None:
    assert len(ROWS) == 10
    for row in ROWS:
        expression = row["program"].removeprefix("print(").removesuffix(")")
        assert str(eval(expression, {"__builtins__": {}})) == row["answer"]


@pytest.mark.slow
@pytest.mark.skipif(not LM_EVAL, reason="needs lm-eval: pip install 'lm-eval[api]', or LM_EVAL=...")
def test_lm_eval_scores_the_server(tmp_path: Path, tag_tokenizer: ProtocolTokenizer) -> None:
    assert LM_EVAL
    checkpoint = save_learnt(
        tmp_path / "checkpoint",
        tag_tokenizer,
        {row["question"]: int(row["answer"]) for row in ROWS},
        {row["question"]: row["program"] for row in ROWS},
        steps=400,
    )
    with running(AsyncSolver(checkpoint), max_concurrent=4) as url:
        arguments = f"model=m,base_url={url}/v1/chat/completions,num_concurrent=4,max_retries=2"
        command = [LM_EVAL, "--model", "local-chat-completions", "--model_args", arguments]
        command += ["--tasks", "rivet_ten", "--include_path", str(TASK), "--apply_chat_template"]
        done = subprocess.run(
            [*command, "--output_path", str(tmp_path / "out"), "--log_samples"],
            cwd=TASK,
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"},
        )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]["rivet_ten"]
    assert scores["exact_match,none"] >= 0.9, scores
