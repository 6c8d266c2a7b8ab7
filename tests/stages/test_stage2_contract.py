"""Pins the private hooks of TRL 1.16 and transformers 5.17 that the Stage II trainer relies on.

A failure here means that a new version moved something: read the trainer's docstring, then the
library's source, before changing a test.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version

import torch
import trl.trainer.utils as trl_utils
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer
from trl import SFTTrainer

from stages.fused_head import score_trained_only


def source(function: object) -> str:
    return inspect.getsource(function)  # type: ignore[arg-type]


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=16, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def test_versions_are_those_that_the_trainer_was_written_against() -> None:
    assert version("trl").startswith("1.16.") and version("transformers").startswith("5.17.")


def test_num_items_is_computed_once_a_step_from_all_micro_batches() -> None:
    assert list(inspect.signature(Trainer._get_num_items_in_batch).parameters) == [
        "self",
        "batch_samples",
        "device",
    ]
    assert "self._get_num_items_in_batch(batch_samples, device)" in source(
        Trainer.get_batch_samples
    )
    assert "num_items_in_batch=num_items_in_batch" in source(Trainer.training_step)


def test_loss_is_not_divided_by_accumulation_steps_when_num_items_is_given() -> None:
    assert "not self.model_accepts_loss_kwargs or num_items_in_batch is None" in source(
        Trainer.training_step
    )


def test_compute_loss_has_the_arguments_that_we_take() -> None:
    assert list(inspect.signature(SFTTrainer.compute_loss).parameters) == [
        "self",
        "model",
        "inputs",
        "return_outputs",
        "num_items_in_batch",
    ]


def test_trl_gives_the_model_its_fused_head_with_the_outputs_that_we_log() -> None:
    text = source(SFTTrainer.__init__)
    assert "add_fused_lm_head(" in text
    assert 'outputs=("log_probs", "entropy", "is_top1")' in text
    assert "data_collator is not None:" in text  # why `packing` is hidden from TRL


def test_metrics_are_averaged_from_lists_in_log() -> None:
    assert "self._metrics[mode].items()" in source(SFTTrainer.log)
    assert "self._metrics[mode].clear()" in source(SFTTrainer.log)
    assert "self._total_train_tokens" in source(SFTTrainer.compute_loss)


def test_sampler_hook_is_called_with_the_data_set_and_epoch_reaches_it() -> None:
    assert "sampler_fn=self._get_train_sampler" in source(Trainer.get_train_dataloader)
    assert "train_dataloader.set_epoch(epoch)" in source(Trainer._run_epoch)
    assert "epoch=epoch,\n                train_dataloader=train_dataloader," in source(
        Trainer._inner_training_loop
    )


def test_trainer_state_is_written_after_everything_that_resuming_needs() -> None:
    text = source(Trainer._save_checkpoint)
    order = [
        text.index(part)
        for part in (
            "self.save_model(",
            "self._save_optimizer_and_scheduler(",
            "self._save_rng_state(",
            "self.state.save_to_json(",
            "rotate_checkpoints(",
        )
    ]
    assert order == sorted(order)


def test_scoring_trained_positions_only_changes_no_value_and_no_gradient() -> None:
    ids = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, ::2] = -100
    results = []
    for is_patched in (False, True):
        fresh = model()
        trl_utils.add_fused_lm_head(fresh)
        before = trl_utils._use_triton, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
        if is_patched:
            with score_trained_only(torch.device("cpu"), fresh):
                output = fresh(input_ids=ids, labels=labels, fused_lm_head=True)
            assert (trl_utils._use_triton, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE) == before
        else:
            output = fresh(input_ids=ids, labels=labels, fused_lm_head=True)
        output.log_probs.sum().backward()
        results.append((output.log_probs.detach(), [p.grad for p in fresh.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    assert (results[1][0] == 0).sum() == (labels[:, 1:] == -100).sum()
