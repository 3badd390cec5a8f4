"""A headless browser for campaigns, and the views in which each page is looked at."""

from __future__ import annotations

import argparse
import importlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NO_BROWSER = 3  # exit code
# Sizes in CSS pixels and colour schemes, as playwright's new_context takes them.
VIEWS: dict[str, dict[str, Any]] = {
    "desk": {"viewport": {"width": 1280, "height": 900}},
    "desk, dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True},
}


def browser_options(description: str | None) -> argparse.Namespace:
    """Read the options of a campaign in a browser: --browser, and --keep for pictures."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--keep", type=Path, help="folder for pictures of every view")
    return parser.parse_args()


@contextmanager
def browser_at(path: str | None) -> Iterator[Any]:
    """A headless browser.

    Raises:
        SystemExit: with `NO_BROWSER`, after a line that says what is missing.
    """
    try:
        start = importlib.import_module("playwright.sync_api").sync_playwright
    except ImportError:
        print("no browser: this needs playwright (pip install playwright) and Chromium")
        raise SystemExit(NO_BROWSER) from None
    if path is None:
        print("no browser: name one by --browser")
        raise SystemExit(NO_BROWSER)
    with start() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def take_picture(page: Any, folder: Path | None, name: str) -> None:
    """Keep a picture of a whole page as a PNG; without a folder none."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(folder / f"{name.replace(', ', '-')}.png"), full_page=True)
