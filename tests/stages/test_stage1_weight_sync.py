"""Weights reach the servers before each step, and servers that do not have them stop the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FakeVLLM
from peft import PeftModel
from stage1_world import ScriptedSource, build_config, build_model, build_tokenizer, build_trainer

from rivet.config import ConfigError, load_config
from rivet.rewards import CostTerm
from rivet.rollout.vllm_server import RequestRefusedError
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from stages.stage1.config import Stage1Config
from stages.stage1.sampling import EngineSource, engine_source
from stages.stage1.trainer import Stage1Trainer
from stages.stage1.weight_sync import (
    AdapterSender,
    FullSender,
    WeightSync,
    WeightSyncError,
    backend_of,
    score,
)

LORA: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_alpha": 8}
CANARY = [[2, 5, 9, 30, 31, 7], [2, 8, 8]]


class AdapterServer(FakeVLLM):
    """Scores with the base model and the adapter that a request names, as vLLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = self._score
        self.asked: list[str] = []

    def _score(self, model: str, ids: list[int]) -> list[float]:
        self.asked.append(model)
        adapted = PeftModel.from_pretrained(build_model(), self.adapters[model])
        return score(adapted, ids, "cpu").tolist()


@contextmanager
def serving(*servers: FakeVLLM) -> Iterator[EngineSource]:
    """Servers and a source over them, all in the source's own event loop."""
    import asyncio
    import threading

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    plain = build_tokenizer()
    plain.chat_template = "{{ messages[0].content }}"
    tokenizer = ProtocolTokenizer(plain)
    try:
        for server in servers:
            call(server.start())
        with engine_source(
            build_model(),
            tokenizer,
            ProtocolSettings("bare", ""),
            [],
            batch_size=8,
            temperature=1.0,
            seed=0,
            cost=CostTerm(),
            vllm_urls=[server.url for server in servers],
        ) as source:
            yield source
    finally:
        for server in servers:
            call(server.kill())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def trained(
    folder: Path, source: EngineSource, *, canary: Sequence[Sequence[int]] = CANARY, **changes: Any
) -> Stage1Trainer:
    trainer = build_trainer(
        folder,
        source=ScriptedSource(),
        max_steps=3,
        save_strategy="no",
        learning_rate=0.5,
        **LORA,
        **changes,
    )
    WeightSync(source, AdapterSender(source, folder / "vllm"), canary).attach(trainer)
    trainer.train()
    return trainer


def test_every_step_has_its_version_on_every_server_and_the_canary_agrees(tmp_path: Path) -> None:
    one, two = AdapterServer(), AdapterServer()
    with serving(one, two) as source:
        trainer = trained(tmp_path, source)
    for server in (one, two):
        versions = list(dict.fromkeys(server.asked))
        assert [v.rsplit("-", 1)[1] for v in versions] == ["00001", "00002", "00003"]
        assert server.unloaded == versions[:-1] and list(server.adapters) == versions[-1:]
    logged = [line for line in trainer.state.log_history if "sync/canary_error" in line]
    assert len(logged) == 3
    assert max(line["sync/canary_largest"] for line in logged) < 1e-4
    assert [path.name for path in (tmp_path / "vllm").iterdir()] == ["step-00003"]


def test_a_server_that_says_yes_and_keeps_old_weights_stops_the_run(tmp_path: Path) -> None:
    class Stale(AdapterServer):
        def _score(self, model: str, ids: list[int]) -> list[float]:
            self.asked.append(model)
            return score(build_model(), ids, "cpu").tolist()

    fresh, stale = AdapterServer(), Stale()
    with serving(fresh, stale) as source:
        # The adapter of step 1 is the identity: there is nothing to see yet.
        with pytest.raises(WeightSyncError, match=f"step 2: .*{stale.url} differs") as caught:
            trained(tmp_path, source)
    assert "expected at most 0.001" in str(caught.value)


def test_a_score_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    server = AdapterServer()
    server.scores = lambda model, ids: [float("nan")] * (len(ids) - 1)
    with serving(server) as source, pytest.raises(WeightSyncError, match="step 1"):
        trained(tmp_path, source)


def test_a_server_without_adapters_is_named_before_anything_is_sampled(tmp_path: Path) -> None:
    class Plain(AdapterServer):
        async def _reply(self, path: str, body: dict[str, Any]) -> Any:
            if path == "/v1/load_lora_adapter":
                return 404, {"error": {"message": "Not Found"}}
            return await super()._reply(path, body)

    with serving(Plain()) as source:
        with pytest.raises(RequestRefusedError, match="404: Not Found.*--enable-lora"):
            trained(tmp_path, source)


def full_trainer(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `FullSender` needs of a trainer; TRL's transfer is replaced by a note in a list."""

    class Link:
        def __init__(self, *, server_base_url: str, group_port: int, **settings: Any) -> None:
            self._note = f"weights to {server_base_url} by {group_port}"

        def sync_weights(self) -> None:
            happened.append(self._note)

    monkeypatch.setattr("trl.generation.vllm_generation.VLLMGeneration", Link)
    accelerator = SimpleNamespace(wait_for_everyone=lambda: happened.append("barrier"))
    return SimpleNamespace(model=None, processing_class=None, accelerator=accelerator)


def test_no_process_goes_on_before_every_server_has_all_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []
    trainer = full_trainer(happened, monkeypatch)
    with serving(FakeVLLM()) as source:
        FullSender(source, ["http://a:1/v1", "http://b:1"]).send(trainer, 1)
    sent = ["weights to http://a:1 by 51216", "weights to http://b:1 by 51217"]
    assert happened == [*sent, "barrier"]


def test_a_server_that_was_lost_ends_the_run_before_whole_weights_are_sent_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []
    trainer = full_trainer(happened, monkeypatch)

    def break_off(model: str, ids: list[int]) -> list[float]:
        raise ConnectionError

    one, two = FakeVLLM(), FakeVLLM()
    one.scores, two.scores = break_off, lambda model, ids: [0.0] * (len(ids) - 1)
    with serving(one, two) as source:
        sender = FullSender(source, [one.url, two.url])
        source.call(backend_of(source).score([1, 2]))
        with pytest.raises(WeightSyncError, match=f"step 2: lost {one.url}; expected every server"):
            sender.send(trainer, 2)
    assert happened == []


def test_scores_are_log_probabilities_and_leave_the_model_as_it_was() -> None:
    model = build_model().train()
    ids = [2, 5, 9, 30]
    got = score(model, ids, "cpu")
    with torch.no_grad():
        logps = model.eval()(torch.tensor([ids])).logits.log_softmax(-1)[0]
    assert got.tolist() == pytest.approx([logps[n, ids[n + 1]].item() for n in range(3)], abs=1e-6)
    model.train()
    score(model, ids, "cpu")
    assert model.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm_urls": ["http://x"]}, "vllm_urls is set, but backend is local"),
        ({"backend": "vllm"}, "expected use_peft: true, or a GPU"),
        ({"backend": "vllm", **LORA, "vllm_urls": ["http://x"], "vllm_args": ["-x"]}, "together"),
        ({"backend": "vllm", **LORA, "canary_tolerance": 0.0}, "canary_tolerance is 0.0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(tmp_path, **changes)


def test_what_whole_weights_need_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.stage1.config.torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("stages.stage1.config.is_vllm_available", lambda: False)
    monkeypatch.setenv("VLLM_API_KEY", "secret-of-mine")
    with pytest.raises(ValueError, match="or vLLM in the trainer's own environment"):
        build_config(tmp_path, backend="vllm")
    monkeypatch.setattr("stages.stage1.config.is_vllm_available", lambda: True)
    with pytest.raises(ValueError, match="or servers without a key.*unset VLLM_API_KEY"):
        build_config(tmp_path, backend="vllm")
    monkeypatch.delenv("VLLM_API_KEY")
    assert not build_config(tmp_path, backend="vllm").use_peft


def test_a_recipe_names_the_backend_and_its_servers(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: m\noutput_dir: o\nuse_cpu: true\nnum_generations: 4\nuse_peft: true\n"
        "per_device_train_batch_size: 4\nbackend: vllm\nvllm_urls: ['http://127.0.0.1:8000']\n"
    )
    config = load_config(Stage1Config, recipe)
    assert (config.backend, config.vllm_urls) == ("vllm", ["http://127.0.0.1:8000"])
    recipe.write_text(recipe.read_text().replace("backend: vllm", "backend: vlm"))
    with pytest.raises(ConfigError, match="backend"):
        load_config(Stage1Config, recipe)
