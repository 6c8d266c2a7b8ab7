"""What computed a result: time, command, git commit, package versions, platform."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rivet.config_help import shown_command

_PACKAGES = (
    "rivet torch transformers trl peft accelerate datasets vllm openai numpy math-verify "
    "reasoning-gym"
).split()


def process_facts() -> dict[str, Any]:
    """What is worth knowing later about the process that computes."""
    return {
        "started_at": now(),
        "command": shown_command(sys.argv),
        "git": _git_state(),
        "versions": _versions(),
        "platform": platform.platform(),
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_state() -> dict[str, Any] | None:
    """Commit of the checkout that this package runs from, None for an installed copy."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *args], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
