"""A page of fusec in Chromium, for tests."""

import time
from pathlib import Path
from typing import Any

READY = "body[data-ready][data-whole]"


class Opened:
    """A page, its errors, and where it has connected to."""

    def __init__(self, browser: Any, path: Path, address: str = "", width: int = 1440, height: int = 900) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda r: None if r.url.startswith("file:") else self.errors.append(r.url))
        self.page.goto(f"{path.as_uri()}{address and '#'}{address}")
        self.page.wait_for_selector(READY, timeout=20_000)

    def __call__(self, script: str) -> Any:
        return self.page.evaluate(script)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def wait_until(self, condition: str) -> None:
        """Ask again and again: the page's policy forbids the evaluation that Playwright's own wait is made of."""
        end = time.monotonic() + 20
        while not self(condition):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(10)

    @property
    def said(self) -> str:
        return str(self.page.text_content("#said"))

    def close(self) -> None:
        self.page.close()
        assert not self.errors
