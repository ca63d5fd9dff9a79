"""A lesson as a reader meets it: JupyterLab in a browser, all cells run, a slider moved.

Needs playwright and a Chromium: `make test-browser` installs the first and says so where the second
is missing. The pictures that it takes are in out/browser/.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "out" / "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome")
KERNEL = ".jp-Notebook-ExecutionIndicator"
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[str]:
    """The address of a JupyterLab on a copy of the lessons, which renders all cells at once."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", home / "notebooks")
    settings = home / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--port=0"]
    options = [
        "--LabApp.news_url=None",
        "--IdentityProvider.token=browser",
        f"--ServerApp.root_dir={home / 'notebooks'}",
    ]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command + options, env=environment, stdout=log, stderr=log)
        try:
            yield _address(home / "runtime", server)
        finally:
            server.terminate()
            server.wait(20)


def _address(runtime: Path, server: subprocess.Popen) -> str:
    for _ in range(600):
        for found in runtime.glob(f"jpserver-{server.pid}.json"):
            return json.loads(found.read_text())["url"]
        time.sleep(0.1)
    raise TimeoutError("JupyterLab did not start within a minute")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def open_lesson(browser, lab: str, name: str, theme: str = "light"):
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme=theme)
    page.goto(f"{lab}lab/tree/{name}?token=browser&reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    # why: what is asked of a kernel that is still starting is lost
    page.wait_for_selector(f"{KERNEL}[data-status='idle']", timeout=90_000)
    return page


def run_all_cells(page) -> None:
    """Run them, and wait until the last one has its number and none is at work."""
    page.get_by_role("menuitem", name="Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).click()
    # why: the stored numbers are those of a finished run
    page.wait_for_selector(".jp-InputPrompt:has-text('[*]')", timeout=60_000)
    prompts = page.locator(".jp-CodeCell .jp-InputPrompt")
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        said = [text.strip() for text in prompts.all_inner_texts()]
        idle = page.locator(f"{KERNEL}[data-status='idle']").count()
        if idle and said == [f"[{number}]:" for number in range(1, len(said) + 1)]:
            return
        time.sleep(0.5)
    raise AssertionError(f"not all cells have run: {said}")


@pytest.mark.parametrize("name", ["09_balance.ipynb"])
def test_a_lesson_runs_and_its_slider_changes_the_picture(browser, lab, name):
    page = open_lesson(browser, lab, name)
    run_all_cells(page)
    assert page.locator(".jp-RenderedText[data-mime-type*='stderr']").count() == 0
    explorer = page.locator(".jupyter-widgets.widget-vbox").first
    explorer.scroll_into_view_if_needed()
    picture = explorer.locator("img")
    before = picture.get_attribute("src")
    handle = explorer.locator(".noUi-handle").first
    handle.focus()
    handle.press("ArrowRight")
    page.wait_for_function(
        "([image, before]) => image.src !== before", arg=[picture.element_handle(), before]
    )
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{Path(name).stem}.png")
    page.close()
