"""What earlier runs chose, kept on disk: JSON files that only their owner may write."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from ..engines.shadow import cache_folder

#: Bump when an entry's meaning changes: older ones are then ignored.
VERSION = 1

#: The most entries that are kept.
MOST = 200

_FIELDS = {"plan": str, "steps_per_call": int}


class PlanMemory:
    """Remembers the chosen plan for one model, data shape, device and set of versions.

    Args:
        facts: What the choice depends on; anything that JSON can hold.
        folder: Where to keep it; the user's cache folder where it is None.
    """

    def __init__(self, facts: Any, folder: Path | None = None):
        text = json.dumps([VERSION, facts], sort_keys=True, default=str)
        self.key = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._folder = folder

    def load(self) -> dict[str, Any] | None:
        """Returns what was remembered; None where nothing was, or what there is cannot be trusted."""
        folder = self._place()
        if folder is None or not _is_ours(folder):
            return None
        try:
            entry = json.loads((folder / f"{self.key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(entry, dict) or entry.get("key") != self.key:
            return None
        if not all(isinstance(entry.get(name), kind) for name, kind in _FIELDS.items()) or entry["steps_per_call"] < 1:
            return None
        return entry

    def save(self, choice: dict[str, Any]) -> None:
        """Remembers a choice; written whole under another name first. Says nothing where the disk does not let it."""
        folder = self._place()
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_ours(folder):
                return
            entry = {**choice, "key": self.key, "saved": time.time()}
            handle, draft = tempfile.mkstemp(dir=folder, suffix=".draft")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entry, file)
            os.replace(draft, folder / f"{self.key}.json")
            _forget_oldest(folder)
        except OSError:
            return

    def _place(self) -> Path | None:
        if self._folder is not None:
            return self._folder
        return None if os.environ.get("KERAS_SPEEDUP_CACHE") == "off" else cache_folder() / "plans"


def _is_ours(folder: Path) -> bool:
    """Returns whether the folder belongs to this user and nobody else may write to it."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _forget_oldest(folder: Path) -> None:
    entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in entries[:-MOST]:
        path.unlink(missing_ok=True)
