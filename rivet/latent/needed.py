"""The experts that a saved policy names: found where they lie, checked, and heard.

A policy's configuration says of each expert where it lay and the digest of its weights and
tokenizer. An expert may have moved since; another one, or another revision, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rivet.latent.adapter import AdapterSettings
from rivet.latent.cache import read_states
from rivet.latent.experts import ExpertError, ExpertSpec, FrozenExpert
from rivet.latent.policy_config import LatentPolicyConfig
from rivet.latent.states import ExpertStates

_REQUIRED = ("name", "path", "fingerprint")


def load_needed(
    config: LatentPolicyConfig,
    paths: Mapping[str, str] | None = None,
    *,
    device: str | torch.device = "cpu",
) -> list[FrozenExpert]:
    """Load the experts that a policy listens to, in its order.

    Args:
        config: Of the policy.
        paths: Where experts lie now, by name; the others lie where they were.
        device: Where they go.

    Raises:
        ExpertError: One is missing or is not the one that the policy listened to in training, or
            `paths` names another.
    """
    check_named(config)
    moved = dict(paths or {})
    names = [given["name"] for given in config.experts]
    if unknown := sorted(moved.keys() - set(names)):
        raise ExpertError(
            f"expert {unknown[0]}: this policy needs no such expert; expected names among "
            f"{', '.join(names) or 'none'}"
        )
    experts = []
    for given in config.experts:
        spec = spec_of(given, moved.get(given["name"], given["path"]))
        hint = (
            f"the policy was trained with {given['path']}"
            f"{' at ' + given['revision'] if given.get('revision') else ''}: say where that lies "
            f"now with --expert_paths '{{{spec.name}: FOLDER}}'"
        )
        try:
            expert = FrozenExpert.load(spec, device=device)
        except ExpertError as error:
            raise ExpertError(f"{error}; {hint}") from error
        found = expert.fingerprint()
        if found != given["fingerprint"]:
            raise ExpertError(
                f"expert {spec.name}: {spec.path} holds another model or revision (digest {found}, "
                f"expected {given['fingerprint']}); {hint}"
            )
        experts.append(expert)
    return experts


def check_named(config: LatentPolicyConfig, folder: str | Path = "") -> None:
    """Check what a policy's configuration says of its experts, short of loading any.

    Args:
        config: Of the policy.
        folder: Where it lies, for the message.

    Raises:
        ExpertError: An entry is broken, or the adapter was made for others than are named.
    """
    where = f"{Path(folder) / 'config.json'}: experts"
    for given in config.experts:
        wrong = (
            [key for key in _REQUIRED if not isinstance(given.get(key), str)]
            if isinstance(given, dict)
            else list(_REQUIRED)
        )
        if wrong:
            raise ExpertError(
                f"{where}: {given!r} lacks {', '.join(wrong)}; expected an entry as `rivet latent` "
                "writes it: copy the checkpoint again"
            )
        spec_of(given, given["path"])
    names = [given["name"] for given in config.experts]
    made_for = list((config.adapter or {}).get("expert_names", []))
    if names != made_for:
        raise ExpertError(
            f"{where}: {', '.join(names) or 'none'}; expected those that the adapter was made "
            f"for, {', '.join(made_for) or 'none'}: copy the checkpoint again"
        )


def spec_of(given: Mapping[str, object], path: str) -> ExpertSpec:
    """What is taken of an expert that a policy's configuration names."""
    known = {name: given[name] for name in ExpertSpec.__slots__ if name in given}
    return ExpertSpec.from_mapping(known | {"path": path})


def hear(
    config: LatentPolicyConfig,
    experts: Sequence[FrozenExpert],
    problems: Sequence[str],
    cache: str | Path | None,
) -> ExpertStates:
    """H of some problems, as the policy heard it in training: experts masked there are masked.

    Raises:
        rivet.latent.cache.CacheError: The cache holds what an expert would not say.
    """
    states = read_states(experts, problems, cache)
    for given in config.experts:
        if not given.get("is_heard", True):
            states = states.without(given["name"])
    return states


def silence(config: LatentPolicyConfig, count: int) -> ExpertStates | None:
    """What is heard of so many problems where every expert is masked; None without experts."""
    if not config.experts or config.adapter is None:
        return None
    s = AdapterSettings(**config.adapter)
    shape = (count, len(s.expert_names), s.num_slots)
    return ExpertStates(
        s.expert_names,
        s.expert_widths,
        torch.zeros(*shape, max(s.expert_widths)),
        torch.zeros(shape, dtype=torch.bool),
    )
