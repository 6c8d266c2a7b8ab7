"""The frame of every report: one HTML page that works offline, with its style and script inline.

It holds no address of another site, and a content policy forbids any script but the one given.
Sections are HTML, so whoever makes them escapes what models, problems and files say.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any


def asset(name: str) -> str:
    """Text of a style or a script of this package."""
    return (files("eval") / name).read_text(encoding="utf-8")


def page(title: str, sections: Mapping[str, str], *, script: str = "", data: str = "") -> str:
    """A whole page.

    Args:
        title: Heading, escaped here.
        sections: Heading to HTML; those without content are left out.
        script: The only script that the page may run; none by default.
        data: Elements that the script reads.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    parts = {name: body for name, body in sections.items() if body}
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name in parts)
    body = "".join(
        f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{content}</section>'
        for name, content in parts.items()
    )
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    end = f"{data}\n<script>{script}</script>" if script else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{asset("chart.css")}{asset("report.css")}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p class="lead">written {written}</p></header>
<nav>{links}</nav>
<main>{body}</main>
<footer>rivet. This page is complete in itself and loads nothing.</footer>
{end}
</body>
</html>
"""


def cards(charts: Mapping[str, str], *, is_wide: bool = False) -> str:
    """Charts side by side where there is room, each with its title; empty ones are left out."""
    shown = "".join(
        f'<div class="card"><h3>{escape(title)}</h3>{chart}</div>'
        for title, chart in charts.items()
        if chart
    )
    css = "grid2 wide" if is_wide else "grid2"
    return f'<div class="{css}">{shown}</div>' if shown else ""


def settings(config: Any) -> str:
    """What a run's `config.json` says, folded; nothing without one."""
    if not config:
        return ""
    text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
    return (
        f'<details class="card"><summary>config.json</summary><pre>{escape(text)}</pre></details>'
    )


def _anchor(name: str) -> str:
    return escape(name.lower().replace(" ", "-"), quote=True)
