"""`rivet doctor`: what this machine has, what is missing, what that costs, how to get it.

Nothing is installed or changed, nothing is downloaded, and no key is ever shown. The exit code is
1 where a required part is missing or broken.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from rivet.config import parse_config

State = Literal["ok", "missing", "broken"]
_SIGNS = {"ok": "ok", "missing": "--", "broken": "NO"}
_LEAST_DISK_GB = 5.0
_PYTHON = ">=3.11"


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of `rivet doctor`."""

    json: bool = field(default=False, metadata={"help": "Print the findings as JSON instead."})
    dir: str = field(
        default="runs", metadata={"help": "Where runs will be written; its disk is looked at."}
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        state: `ok`; `missing`: something optional is not there; `broken`: a required part.
        found: What is there.
        cost: What does not work without it.
        remedy: How to get it.
    """

    name: str
    state: State
    found: str
    cost: str = ""
    remedy: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet doctor`; 1 if a required part is missing."""
    config = parse_config(
        DoctorConfig,
        argv,
        prog="rivet doctor",
        description="Say what this machine has and lacks. Changes nothing, shows no key.",
    ).config
    findings = list(examine(Path(config.dir)))
    if config.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(report(findings))
    return int(any(finding.state == "broken" for finding in findings))


def report(findings: Sequence[Finding]) -> str:
    """Findings as text, with cost and remedy under what is missing."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_SIGNS[finding.state]}  {finding.name:<{width}}  {finding.found}")
        for label, text in (("without it", finding.cost), ("get it", finding.remedy)):
            if text and finding.state != "ok":
                lines.append(f"    {'':<{width}}  {label}: {text}")
    broken = sum(finding.state == "broken" for finding in findings)
    missing = sum(finding.state == "missing" for finding in findings)
    last = "Everything is there." if not broken + missing else ""
    if missing and not broken:
        parts = "part is" if missing == 1 else "parts are"
        last = f"Everything that is required is there; {missing} optional {parts} not."
    if broken:
        parts = "part is" if broken == 1 else "parts are"
        last = f"{broken} required {parts} missing or broken."
    return "\n".join([*lines, "", last])


def examine(folder: Path) -> Iterator[Finding]:
    """Look at everything, one part after the other; a part that fails costs its own line only."""
    yield _python()
    yield from packages()
    for name, look in (
        ("torch device", _device),
        ("vLLM", _vllm),
        ("sandbox", _sandbox),
        ("disk", lambda: _disk(folder)),
        ("Hub cache", _hub_cache),
    ):
        yield _guarded(name, look)
    yield from keys()


def _guarded(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as error:  # whatever is broken on a machine must not end the report
        return Finding(name, "broken", f"cannot be examined: {type(error).__name__}: {error}")


def _python() -> Finding:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    found = f"{version} ({sys.executable})"
    if SpecifierSet(_PYTHON).contains(version, prereleases=True):
        return Finding("Python", "ok", found)
    return Finding("Python", "broken", found, "rivet does not run", f"install Python {_PYTHON}")


# --- packages -----------------------------------------------------------------------------------


def packages(distribution: str = "rivet") -> Iterator[Finding]:
    """Installed versions against the range that the tests ran with."""
    try:
        wanted = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        remedy = "run `make setup`, or `pip install -e .` in the checkout"
        cost = "versions cannot be compared with the tested ones"
        yield Finding("rivet", "broken", "is not installed", cost, remedy)
        return
    yield Finding("rivet", "ok", metadata.version(distribution))
    for line in wanted:
        if "extra ==" in line:
            continue
        requirement = line.partition(";")[0].strip()
        name = re.split(r"[^\w.-]", requirement)[0]
        yield _package(name, requirement[len(name) :].strip())


def _package(name: str, tested: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    remedy = f"pip install '{name}{tested}' (`make setup` does)"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "broken", "is not installed", "rivet does not run", remedy)
    if SpecifierSet(tested).contains(version.partition("+")[0], prereleases=True):
        return Finding(name, "ok", f"{version} (tested: {tested})")
    cost = "nobody has tested this version; it may fail, or be wrong without failing"
    return Finding(name, "broken", f"{version} (tested: {tested})", cost, remedy)


# --- the machine --------------------------------------------------------------------------------


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        shown = ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)
        return Finding("torch device", "ok", shown)
    threads = torch.get_num_threads()
    cost = "training and sampling are slow: small models only"
    remedy = "a CUDA GPU with a CUDA build of torch"
    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build"
    return Finding("torch device", "missing", f"CPU, {threads} threads ({build})", cost, remedy)


def _vllm() -> Finding:
    from rivet.rollout.vllm_process import VLLMNotFoundError, find_python

    try:
        return Finding("vLLM", "ok", f"in {find_python()}")
    except VLLMNotFoundError as error:
        shown = "is not installed" if "not installed" in str(error) else str(error)
    cost = "sampling runs in transformers: slower from about a billion parameters on"
    remedy = "pip install -e '.[vllm]' with a GPU, `make setup-vllm` without; or a server's URL"
    return Finding("vLLM", "missing", shown, cost, remedy)


def _sandbox() -> Finding:
    from sandbox import SandboxError
    from sandbox.doctor import examine as examine_sandbox

    try:
        walls, promises = examine_sandbox()
    except SandboxError as error:
        cost = "no program can run: no training, no solving"
        remedy = "see docs/sandbox.md for what the kernel must allow"
        return Finding("sandbox", "broken", str(error), cost, remedy)
    fallen = [wall.name for wall in walls if not wall.is_held]
    broken = [promise.name for promise in promises if not promise.is_held]
    details = "`python -m sandbox doctor` says more"
    if broken:
        cost = "programs of a model could do harm: do not run any here"
        return Finding("sandbox", "broken", f"broken: {', '.join(broken)}", cost, details)
    if fallen:
        shown = f"every promise holds, without: {', '.join(fallen)}"
        return Finding("sandbox", "missing", shown, "fewer walls behind each other", details)
    return Finding("sandbox", "ok", f"every wall stands ({len(walls)}), every promise holds")


def _disk(folder: Path) -> Finding:
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free / 1e9
    shown = f"{free:.1f} GB free for {folder.resolve()}"
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        remedy = "choose another --output_dir, or ask for the right to write"
        shown = f"{there} cannot be written ({error.strerror})"
        return Finding("disk", "broken", shown, "no run can be kept", remedy)
    if free >= _LEAST_DISK_GB:
        return Finding("disk", "ok", shown)
    cost = "a run of a pretrained model fills it; the mini-world needs 0.2 GB"
    return Finding("disk", "missing", shown, cost, f"free {_LEAST_DISK_GB:g} GB or more")


def _hub_cache() -> Finding:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    names = sorted(p.name for p in cache.glob("models--*")) if cache.is_dir() else []
    offline = ", offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    shown = f"{cache}: {len(names)} models{offline}"
    if names or not offline:
        return Finding("Hub cache", "ok", shown)
    cost = "no pretrained model can be loaded by its name"
    return Finding("Hub cache", "missing", shown, cost, "unset HF_HUB_OFFLINE, or copy a cache")


# --- keys ---------------------------------------------------------------------------------------


def keys() -> Iterator[Finding]:
    """Which keys are set; only that, never what they are."""
    from huggingface_hub import get_token

    wanted = (
        ("HF_TOKEN", bool(get_token()), "gated models and `--push` do not work",
         "export HF_TOKEN=..., or `hf auth login`"),
        ("RIVET_API_KEY", _is_set("RIVET_API_KEY"), "`rivet serve` answers on loopback only",
         "export RIVET_API_KEY=... with a key of your choice"),
    )  # fmt: skip
    for name, is_there, cost, remedy in wanted:
        yield Finding(name, "ok" if is_there else "missing", "set" if is_there else "not set",
                      cost, remedy)  # fmt: skip
    for name in _expert_keys():
        state: State = "ok" if _is_set(name) else "missing"
        shown = "set" if state == "ok" else "not set"
        yield Finding(name, state, f"{shown}; named by experts.yaml", "those experts do not answer",
                      f"export {name}=...")  # fmt: skip


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name, "").strip())


def _expert_keys() -> list[str]:
    """Variables that an experts.yaml in this folder names."""
    try:
        text = Path("experts.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return sorted(
        set(re.findall(r"^\s*(?:- )?key_env:\s*['\"]?([A-Za-z_]\w*)", text, re.MULTILINE))
    )


if __name__ == "__main__":
    raise SystemExit(main())
