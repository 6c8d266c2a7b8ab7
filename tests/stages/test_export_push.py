"""A push uploads the export whole in one commit, goes on after failures, or says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, fake_hub
from huggingface_hub import constants

from stages import export
from stages.export_push import PushError, describe_push, push

FILES = {
    "README.md": b"---\nlicense: apache-2.0\ntags: [rivet]\n---\n# m\n",
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"\x00" * 3000,
    "model-00002-of-00002.safetensors": b"\x01" * 2000,
    "rivet.json": b"{}",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub that this process talks to, with a token that may write."""
    with fake_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", served.token)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something like an export, with files that must stay here."""
    path = tmp_path / "mine"
    (path / ".cache").mkdir(parents=True)
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    (path / ".cache" / "secret").write_text("no")
    (path / ".env").write_text("no")
    return path


def test_everything_goes_up_in_one_commit_and_nothing_hidden(hub: FakeHub, folder: Path) -> None:
    assert push(folder, "me/mine", private=True) == f"{hub.url}/me/mine"
    assert hub.files == FILES and hub.commits == 1
    assert hub.repos == {"me/mine": True}


def test_a_push_is_one_commit_where_the_hub_stores_chunks_too(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: True)
    monkeypatch.setattr(
        "huggingface_hub._upload_pipeline.pipelined_upload",
        lambda *_, **__: pytest.fail("it commits in batches"),
    )
    push(folder, "me/mine")
    assert hub.files == FILES and hub.commits == 1


def test_a_later_push_leaves_nothing_of_an_earlier_export_that_a_loader_would_take(
    hub: FakeHub, folder: Path
) -> None:
    push(folder, "me/mine")
    kept = {"figures/curve.png": b"png", ".gitattributes": b"", "x/old.safetensors": b"not ours"}
    old = ("model.safetensors", "model.safetensors.index.json", "adapter_config.json", "LICENSE")
    hub.files |= {**kept, **dict.fromkeys(old, b"old")}
    (folder / "config.json").write_bytes(b'{"new": 1}')
    push(folder, "me/mine")
    assert hub.files == {**FILES, **kept, "config.json": b'{"new": 1}'} and hub.commits == 2


def test_a_pushed_card_names_the_repository_in_its_commands(hub: FakeHub, folder: Path) -> None:
    card = "# m\nrivet solve PATH_TO_THIS_FOLDER 'one'\nrivet serve PATH_TO_THIS_FOLDER\n"
    (folder / "README.md").write_text(card)
    push(folder, "me/mine")
    pushed = hub.files["README.md"].decode()
    assert pushed == "# m\nrivet solve me/mine 'one'\nrivet serve me/mine\n"
    assert (folder / "README.md").read_text() == card


def test_a_push_survives_failures_that_pass(hub: FakeHub, folder: Path) -> None:
    failures = iter([503, -1, 0, 0, 0, 500, 0, 0, -1, 429])
    hub.fail = lambda request: next(failures, 0)
    push(folder, "me/mine", wait_s=0)
    assert hub.files == FILES and hub.commits == 1


def test_an_interrupted_push_leaves_nothing_visible_and_sends_no_file_twice(
    hub: FakeHub, folder: Path
) -> None:
    hub.fail = lambda request: 500 if "/commit/" in request else 0
    with pytest.raises(PushError, match=r"nothing half-written.*rivet export .*--push me/mine"):
        push(folder, "me/mine", wait_s=0)
    assert hub.files == {} and hub.uploads == 2
    hub.fail = lambda request: 0
    push(folder, "me/mine")
    assert hub.files == FILES and hub.uploads == 2


def test_a_wrong_token_is_not_tried_again(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(PushError, match="the token needs the right to write"):
        push(folder, "me/mine")
    assert hub.requests.count("POST /api/repos/create") == 1


def test_without_a_token_it_says_how_to_get_one(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(PushError, match="HF_TOKEN"):
        push(folder, "me/mine")
    assert hub.requests == []


@pytest.mark.parametrize("name", ["mine", "a/b/c", "me/", "me/m ine", "../x", "me/mine.git"])
def test_what_is_no_repository_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(PushError, match="push: "):
        push(folder, name)


def test_a_dry_run_lists_what_would_go_and_asks_nobody(
    hub: FakeHub, folder: Path, capsys: Any
) -> None:
    listed = describe_push(folder, "me/mine", private=False)
    assert "would upload 5 files, 5.0 kB" in listed and ".env" not in listed
    assert "model-00001-of-00002.safetensors     3.0 kB" in listed
    assert export.main([str(folder), "--push", "me/mine", "--dry-run"]) == 0
    assert capsys.readouterr().out.strip() == listed
    nowhere = str(folder.parent / "none")
    assert export.main([str(folder), "--push=me/mine", "--to", nowhere, "--dry-run"]) == 0
    assert "no export yet" in capsys.readouterr().out
    assert hub.requests == []
