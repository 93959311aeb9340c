"""A compiled model as a page: one file of HTML that loads nothing, for a browser or a notebook."""

from __future__ import annotations

import html
import json
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Any

from torch import nn

from tpcompile.driver import Compilation
from tpcompile.inspect.page.gather import gather

__all__ = ["embedded", "page"]

VIEWS = ("base", "outline", "align", "value", "graph", "weights", "ranks", "schedule", "search", "main")
SCRIPTS = tuple(f"script/{name}.js" for name in VIEWS)
"""In the order in which they are joined."""


def page(compilation: Compilation, model: nn.Module | None = None) -> str:
    """The page of a compilation; with the model, also the source of every stage, which is written without its weights.

    What comes from the model (names, lines, paths) is in the page as JSON alone, in which no character can end the script that holds
    it, and is shown as text. A policy in the page forbids all requests, and all scripts but its own.
    """
    parts = files(__name__)
    style, frame, *views = (parts.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "template.html", *SCRIPTS))
    script = "\n".join(['"use strict";', "(() => {", *views, "})();"])
    data = gather(compilation, model)
    inserted = {
        "TITLE": html.escape(f"{data['model']} on {data['mesh']['text']}"),
        "SCRIPT_HASH": _hash(script),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": encoded(data),
    }
    pieces = frame.split("⟦")
    return pieces[0] + "".join(inserted[key] + rest for key, rest in (piece.split("⟧", 1) for piece in pieces[1:]))


def embedded(document: str, height: int = 760) -> str:
    """A page in a frame of a notebook: in a sandbox, so that it can touch nothing outside of itself."""
    source = html.escape(document, quote=True)
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe sandbox="allow-scripts" style="{style}" title="compiled model" srcdoc="{source}"></iframe>'


def encoded(data: Any) -> str:
    """JSON that may stand in a script element: without <, > and &, and without the line separators that JavaScript knows."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()
