"""Frozen experts and the cache of their states."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from tokenizers.processors import TemplateProcessing

from rivet.files import DiskFullError
from rivet.latent.cache import CacheError, StateCache, read_states
from rivet.latent.experts import ExpertError, ExpertSpec, FrozenExpert
from rivet.latent.states import ExpertStates, ProblemStates
from tests.conftest import build_tokenizer
from tests.rivet.latent.conftest import LAST_K, tiny_llama

PROBLEMS = ["What is 12 + 18?", "3", "Compute 3 + 4 * 5 and say what is 23 and what is 12."]


def make(**spec: object) -> FrozenExpert:
    """A small Llama expert with a chat template."""
    tokenizer = build_tokenizer(["<|im_start|>", "<|im_end|>"], [])
    values = {"name": "e", "path": "here", "last_k": LAST_K, **spec}
    return FrozenExpert(ExpertSpec(**values), tiny_llama(len(tokenizer.hf)), tokenizer.hf)


def test_states_are_the_hidden_states_of_the_last_tokens(experts: list[FrozenExpert]) -> None:
    for expert in experts:
        states = expert.read(PROBLEMS)
        for n, problem in enumerate(PROBLEMS):
            ids = torch.tensor([expert.encode(problem)])
            hidden = expert.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            count = min(LAST_K, ids.size(1))
            assert states.mask[n].tolist() == [False] * (LAST_K - count) + [True] * count
            torch.testing.assert_close(
                states.values[n, LAST_K - count :], hidden[-count:], rtol=1e-4, atol=1e-4
            )
            assert not states.values[n, : LAST_K - count].any()


def test_layers_are_stacked_in_the_order_given() -> None:
    both = make(layers=(0, -1)).read(PROBLEMS)
    assert both.values.shape == (3, 2 * LAST_K, 32)
    torch.testing.assert_close(both.values[:, :LAST_K], make(layers=(0,)).read(PROBLEMS).values)
    torch.testing.assert_close(both.values[:, LAST_K:], make().read(PROBLEMS).values)


def test_a_chat_expert_reads_its_template_and_problems_cannot_forge_control_tokens() -> None:
    expert = make(reading="chat")
    control = expert.tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = expert.encode("12 <|im_start|>")
    assert ids.count(control) == 2  # the template's own: the user's turn and the answer's
    assert expert.tokenizer.decode(ids).endswith("assistant\n")


def test_an_expert_reads_the_same_every_day_and_what_stands_around_a_problem_names_its_states() -> (
    None
):
    tokenizer, models = build_tokenizer(["<|im_start|>", "<|im_end|>"], []), []
    for date in ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024", "27 Jul 2024"):
        tokenizer.hf.chat_template = date + " {{ messages[0]['content'] }} ="
        spec = ExpertSpec("e", "here", reading="chat")
        models.append(FrozenExpert(spec, tiny_llama(len(tokenizer.hf)), tokenizer.hf))
    today, same, other = models
    assert today.encode("3") == same.encode("3")
    tokenizer.hf.chat_template = "one for all"  # the digest of the tokenizer then is the same
    assert today.identity() == same.identity() != other.identity()


@pytest.mark.parametrize(
    ("around", "before"),
    [
        ("$A", []),
        ("$A <|im_end|>", []),
        ("<|im_start|> $A <|im_end|>", ["<|im_start|>"]),
        ("<|im_end|> $A", ["<|im_end|>"]),  # one token for both ends, as OPT has it
        ("<|im_end|> $A <|im_end|>", ["<|im_end|>"]),
    ],
)
def test_a_plain_expert_reads_what_its_tokenizer_puts_before_a_text_and_not_what_it_puts_behind(
    around: str, before: list[str]
) -> None:
    hf = build_tokenizer(["<|im_start|>", "<|im_end|>"], []).hf
    tokens = {token: hf.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")}
    hf.backend_tokenizer.post_processor = TemplateProcessing(
        single=around, special_tokens=list(tokens.items())
    )
    expert = FrozenExpert(ExpertSpec("e", "here"), tiny_llama(len(hf)), hf)
    bare = hf("12 + 3", add_special_tokens=False).input_ids
    assert expert.encode("12 + 3") == [*(tokens[token] for token in before), *bare]


def test_an_expert_in_bfloat16_gives_bfloat16_states_that_join_others(tmp_path: Path) -> None:
    model = make()
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    half = FrozenExpert.load(ExpertSpec("half", str(tmp_path), dtype="bfloat16", last_k=LAST_K))
    states = half.read(PROBLEMS)
    assert states.values.dtype == torch.bfloat16
    joined = read_states([half, make()], PROBLEMS, tmp_path / "cache")
    assert joined.values.dtype == torch.float32
    torch.testing.assert_close(joined.values[:, 0], joined.values[:, 1], rtol=0.2, atol=0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (7,)}, "layer 7 .* expected -3 to 2"),
        ({"last_k": 0}, "last_k is 0"),
        ({"last_k": "four"}, "last_k is 'four'; expected at least one token"),
        ({"layers": ()}, "at least one layer"),
        ({"layers": -1}, "layers is -1; expected a list"),
        ({"layers": "last"}, "layers is 'last'; expected a list"),
        ({"dtype": "float8"}, "dtype is 'float8'; expected one of float32"),
        ({"reading": "Chat"}, "reading is 'Chat'; expected plain or chat"),
        # It names a folder of the cache.
        ({"name": "../../elsewhere"}, "name is .* expected letters"),
        ({"path": 3}, "path is 3; expected a folder or a Hub name"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ExpertError, match=message):
        make(**change)


def test_a_missing_chat_template_is_refused_with_the_way_out() -> None:
    tokenizer = build_tokenizer(["<|im_end|>"], [])
    tokenizer.hf.chat_template = None
    spec = ExpertSpec("e", "some/model", reading="chat")
    with pytest.raises(ExpertError, match="some/model has no chat template; .* reading: plain"):
        FrozenExpert(spec, tiny_llama(len(tokenizer.hf)), tokenizer.hf)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExpertError, match="expert e: .* cannot be loaded"):
        FrozenExpert.load(ExpertSpec("e", str(tmp_path)))
    for missing in (str(tmp_path / "gone"), "runs/latent/gone"):
        with pytest.raises(ExpertError, match="gone: no such folder"):
            FrozenExpert.load(ExpertSpec("e", missing))


def test_weights_that_were_cut_short_or_are_missing_are_refused(tmp_path: Path) -> None:
    expert = make()
    expert.model.save_pretrained(tmp_path)
    expert.tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExpertError, match="expert e: .* cannot be loaded"):
        FrozenExpert.load(ExpertSpec("e", str(tmp_path)))
    tensors = load(whole)
    # transformers would draw it at random and say so in a log.
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ExpertError, match="lacks 1 weights, model.layers.0.mlp.up_proj.weight"):
        FrozenExpert.load(ExpertSpec("e", str(tmp_path)))


def test_a_problem_longer_than_an_expert_reads_is_refused() -> None:
    expert = make()
    limit = expert.model.config.max_position_embeddings
    expert.read(["7 " * (limit // 4)])
    with pytest.raises(ExpertError, match=f"expert e: the problem '7 7 .* it reads {limit}"):
        expert.read(["3", "7 " * limit])


@pytest.mark.parametrize("given", ["text", {"name": "e"}, {"name": "e", "path": "p", "layer": 1}])
def test_recipe_entries_are_checked(given: object) -> None:
    with pytest.raises(ExpertError, match="expected"):
        ExpertSpec.from_mapping(given)


def test_an_expert_reads_a_problem_once(tmp_path: Path) -> None:
    first = StateCache(tmp_path, make())
    fresh = first.states([*PROBLEMS, PROBLEMS[0]])
    assert first.num_read == 3
    torch.testing.assert_close(fresh.values[0], fresh.values[3])
    second = StateCache(tmp_path, make(), checks=0)
    again = second.states([PROBLEMS[2], "new", PROBLEMS[0]])
    assert second.num_read == 1
    torch.testing.assert_close(again.values[0], fresh.values[2])
    torch.testing.assert_close(again.values[2], fresh.values[0])


def test_problems_that_two_processes_read_at_once_shift_no_others(tmp_path: Path) -> None:
    expert, problems = make(), [*PROBLEMS, "4", "5"]
    alone = expert.read(problems)
    first, second = StateCache(tmp_path, expert), StateCache(tmp_path, expert)
    first.states(problems[:3])
    second.states(problems[2:4])
    StateCache(tmp_path, expert).states(problems[4:])
    cache = StateCache(tmp_path, expert)
    torch.testing.assert_close(cache.states(problems).values, alone.values, rtol=1e-4, atol=1e-4)
    assert cache.num_read == 0


def test_another_revision_has_a_cache_of_its_own(tmp_path: Path) -> None:
    other = make()
    with torch.no_grad():
        next(other.model.parameters()).add_(0.1)
    first, second = StateCache(tmp_path, make()), StateCache(tmp_path, other)
    assert first.key != second.key and first.folder != second.folder
    for change in ({"last_k": 3}, {"layers": (0,)}, {"reading": "chat"}):
        assert StateCache(tmp_path, make(**change)).key != first.key


def test_files_of_another_revision_are_detected(tmp_path: Path) -> None:
    other = make()
    with torch.no_grad():
        next(other.model.parameters()).add_(0.1)
    poisoned, source = StateCache(tmp_path, make()), StateCache(tmp_path, other)
    source.states(PROBLEMS)
    assert poisoned.folder is not None and source.folder is not None
    shutil.copytree(source.folder, poisoned.folder)
    with pytest.raises(CacheError, match="describes another expert"):
        StateCache(tmp_path, make())
    (poisoned.folder / "expert.json").unlink()
    with pytest.raises(CacheError, match="states of another expert or revision"):
        StateCache(tmp_path, make())


def test_states_that_were_changed_in_place_are_detected(tmp_path: Path) -> None:
    cache = StateCache(tmp_path, make())
    cache.states(PROBLEMS)
    assert cache.folder is not None
    (path,) = cache.folder.glob("*.safetensors")
    tensors = load_file(path)
    save_file({**tensors, "values": tensors["values"] + 0.5}, path, metadata={"key": cache.key})
    with pytest.raises(CacheError, match="are not what here gives now"):
        StateCache(tmp_path, make()).states(PROBLEMS)


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    cache = StateCache(tmp_path, make())
    cache.states(PROBLEMS)
    assert cache.folder is not None
    (path,) = cache.folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CacheError, match=path.name):
        StateCache(tmp_path, make())


def test_a_full_disk_leaves_no_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rivet.latent.cache.save_file", fill_up)
    cache = StateCache(tmp_path, make())
    with pytest.raises(DiskFullError):
        cache.states(PROBLEMS)
    assert [path.name for path in cache.folder.iterdir()] == ["expert.json"]  # type: ignore


def test_files_of_other_content_are_named(tmp_path: Path) -> None:
    expert = make()
    cache = StateCache(tmp_path, expert)
    cache.states(PROBLEMS)
    assert cache.folder is not None
    (path,) = cache.folder.glob("*.safetensors")
    tensors = load(path.read_bytes())
    for broken in (
        {name: t for name, t in tensors.items() if name != "digests"},
        tensors | {"values": tensors["values"][:, :, :5].contiguous()},
        tensors | {"mask": tensors["mask"][:1].contiguous()},
    ):
        save_file(broken, path, metadata={"key": cache.key})
        with pytest.raises(CacheError, match=r"safetensors: holds .* remove the file"):
            StateCache(tmp_path, expert)
    (cache.folder / "expert.json").write_text("{")
    with pytest.raises(CacheError, match=r"expert.json: describes another expert"):
        StateCache(tmp_path, expert)


def test_states_of_experts_over_other_problems_do_not_join() -> None:
    def states(n: int) -> ProblemStates:
        return ProblemStates(torch.zeros(n, 2, 8), torch.ones(n, 2, dtype=torch.bool))

    with pytest.raises(ValueError, match="same problems"):
        ExpertStates.of({"a": states(2), "b": states(3)})
    joined = ExpertStates.of({"a": states(2), "b": states(2)})
    with pytest.raises(ValueError, match="no expert 'c'"):
        joined.without("c")
    assert joined.only("b").mask.any(2).tolist() == [[False, True]] * 2
