"""Tiny models and a tiny task that every test can afford, and a browser without a network."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import jaxtyping
import pytest
from tiny import learn_echo, tiny_model
from type_checks import checks_begin_anew  # noqa: F401 - before the package is imported

if TYPE_CHECKING:  # the process that hands out tests to others needs nothing heavy
    import torch

    from sparse_tl.backend import Model
    from sparse_tl.data.batches import TokenBatch

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        default="1",
        help="cases of each parametrised test to run, or all; which ones is drawn anew every day",
    )
    parser.addoption(
        "--turns",
        type=int,
        default=1,
        help="a test marked long runs every so many days; every day by default",
    )
    parser.addoption("--draw", help="a day, as 2026-01-31, to repeat its draw; by default today")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist get the options of the process that starts them.
    config.option.draw = config.option.draw or f"{datetime.now(UTC):%Y-%m-%d}"


def pytest_report_header(config: pytest.Config) -> str:
    option = config.option
    return f"drawn by --cases {option.cases} --turns {option.turns} --draw {option.draw}"


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Not every test needs every architecture every day, nor every long one every day."""
    kept = [item for item in _some_cases(config, items) if _has_its_turn(config, item)]
    config.hook.pytest_deselected(items=[*{*items}.difference(kept)])
    items[:] = kept


def _has_its_turn(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether this is a long test's day: it has one in `--turns`, whatever else is collected."""
    turns = config.option.turns
    if turns < 2 or not item.get_closest_marker("long"):
        return True
    # All of a file on one day, as they share its fixtures; case by case where none is drawn.
    name = item.name if item.get_closest_marker("every_case") else item.path.name
    day = datetime.fromisoformat(config.option.draw).toordinal()
    return (day + crc32(name.encode())) % turns == 0


def _some_cases(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Of each parametrised test, as many cases as the option says, drawn by the day."""
    if (cases := config.getoption("--cases")) == "all":
        return items
    by_test: dict[str, list[pytest.Item]] = {}
    every = [item for item in items if item.get_closest_marker("every_case")]
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, group in by_test.items():
        if len(group) > int(cases):
            by_test[name] = random.Random(f"{config.option.draw} {name}").sample(group, int(cases))
    drawn = {item for group in [every, *by_test.values()] for item in group}
    return [item for item in items if item in drawn]


@pytest.fixture(autouse=True)
def signals_stop() -> None:
    """As in a terminal; what is started in the background, or by `nohup`, ignores some.

    `accelerate.notebook_launcher` leaves its own.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def build_tiny() -> Callable[..., Model]:
    """Makes a model of two layers with random weights; see `tiny.tiny_model`."""
    return tiny_model


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real models and texts for tests; they are no part of the repository."""
    named = os.environ.get("SPARSE_TL_SHARED_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared test data at {folder}; set SPARSE_TL_SHARED_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct, or a skipped test where it is not."""
    pytest.importorskip("gguf", reason="the package gguf is not installed (pip install gguf)")
    from sparse_tl.zoo.language import cached_file

    if (file := cached_file("smollm2")).is_file():
        return file
    pytest.skip("SmolLM2 is not on this machine; `sparse-tl get smollm2` downloads it")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a network, and without its minutes of retries."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def echo_rows() -> Callable[..., TokenBatch]:
    """A task that needs attention: two random tokens in turn, so each repeats the last but one."""
    import torch

    from sparse_tl.data.batches import TokenBatch

    def rows(n: int = 96, length: int = 8, seed: int = 0) -> TokenBatch:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(13, (n, 2), generator=generator).repeat(1, length // 2)
        batch = TokenBatch.next_token(tokens)
        batch.loss_mask[:, 0] = False
        return batch

    return rows


@pytest.fixture(scope="session")
def _echo_weights(
    build_tiny: Callable[..., Model], echo_rows: Callable[..., TokenBatch]
) -> dict[str, torch.Tensor]:
    model = build_tiny()
    learn_echo(model, echo_rows)
    return model.state_dict()


@pytest.fixture(scope="session")
def build_echo(
    build_tiny: Callable[..., Model], _echo_weights: dict[str, torch.Tensor]
) -> Callable[[], Model]:
    """Always the same tiny model, trained on `echo_rows` to about 0.05 nats held out."""

    def build() -> Model:
        model = build_tiny()
        model.load_state_dict(_echo_weights)
        return model

    return build


def find_chromium() -> str | None:
    """The browser that tests drive: named by SPARSE_TL_CHROMIUM, or on PATH."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("SPARSE_TL_CHROMIUM") or next(
        filter(None, map(shutil.which, names)), None
    )


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, or a skipped test where there is none."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium found; put it on PATH or set SPARSE_TL_CHROMIUM to its path")
    switches = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    switches += ["--disable-background-networking", "--disable-component-update"]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=switches)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session", autouse=True)
def _one_browser_for_images() -> None:
    """Images of plots are drawn in one browser, since each takes three seconds to start."""
    import kaleido

    class Shared(AbstractAsyncContextManager[Any]):
        def __init__(self, n: int) -> None:
            kaleido.start_sync_server(n=n, silence_warnings=True)

        async def calc_fig(self, *args: Any, **options: Any) -> bytes:
            return kaleido.calc_fig_sync(*args, **options)

        async def __aexit__(self, *error: object) -> None:
            pass

    kaleido.Kaleido = Shared  # type: ignore[misc]


@pytest.fixture(scope="session")
def _offline_context(browser: Any) -> Any:
    context = browser.new_context(viewport={"width": 1032, "height": 900})
    context.set_offline(True)
    context.set_default_timeout(60_000)  # only failures wait so long
    return context


@pytest.fixture(scope="session")
def open_page(_offline_context: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Opens an offline page, which fails at its end if it had errors or opened a dialog."""

    @contextmanager
    def opened() -> Iterator[Any]:
        page = _offline_context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith("file:") else problems.append(r.url))

        def on_dialog(dialog: Any) -> None:
            problems.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("dialog", on_dialog)
        yield page
        page.close()
        assert not problems

    return opened


@pytest.fixture
def page(open_page: Any) -> Iterator[Any]:
    """An offline page; the test fails if the page has errors or opens a dialog."""
    with open_page() as page:
        yield page


@pytest.fixture
def unchecked_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches off the run-time type checks of the tests: users meet our own messages."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
