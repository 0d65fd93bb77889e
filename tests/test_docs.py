"""The documentation is true: its code runs and prints what it says, its names and links exist."""

import contextlib
import importlib.util
import io
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tiny import small_task_models

import sparse_tl

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("the documentation is in the repository alone", allow_module_level=True)

PAGES = sorted(DOCS.rglob("*.md")) + [ROOT / "README.md"]
# The gallery shows the bodies of functions, cut from the script that makes it.
CODE_PAGES = [page for page in PAGES if page.parent.name != "gallery"]
# Pages whose blocks are run one after the other.
RUN_PAGES = [
    DOCS / "tutorial.md",
    DOCS / "edges.md",
    DOCS / "coming-from.md",
    *(page for page in sorted((DOCS / "how-to").glob("*.md")) if "```python" in page.read_text()),
]
# Pages that take minutes with the built-in task models, and say nothing that depends on them.
LONG_PAGES = [
    DOCS / "coming-from.md",
    *(DOCS / "how-to" / f"{name}.md" for name in ("find-a-circuit", "gpus", "sparsify")),
]
# Of the page that searches all of a model's circuit edges.
SMALLEST = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_inner": 32}
# The title of a block says when it needs more than is here, such as a download.
RUN_TITLES = ("", ' title="sparse_tl"', ' title="TransformerLens: run here too"')
SMOLLM2 = ' title="needs SmolLM2"'
_FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"""(?:\]\(|src="|srcset=")([^)"\s]+)""")


@dataclass
class Block:
    """A fenced block of a page, and the output that stands below it, if any."""

    language: str
    options: str
    code: str
    line: int
    output: str | None = None


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    text = page.read_text("utf-8")
    end = 0
    for match in _FENCE.finditer(text):
        _, language, options, body = match.groups()
        body = textwrap.dedent(body)
        follows = found and not text[end : match.start()].strip()
        if language == "text" and follows and found[-1].language == "python":
            found[-1].output = body
        line = text[: match.start()].count("\n") + 2
        found.append(Block(language, options, body, line))
        end = match.end()
    return found


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", CODE_PAGES, ids=named)
def test_code_compiles(page: Path):
    for block in blocks_of(page):
        if block.language == "python":
            # Placed at its own line, so that an error names the line of the page.
            compile("\n" * (block.line - 1) + block.code, named(page), "exec")


@pytest.mark.long
@pytest.mark.parametrize("page", RUN_PAGES, ids=named)
def test_code_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if page in LONG_PAGES:
        size = SMALLEST if page.stem == "find-a-circuit" else None
        monkeypatch.setattr(sparse_tl, "load_task_models", partial(small_task_models, size=size))
    monkeypatch.chdir(tmp_path)
    _run(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG_PAGES, ids=named)
def test_code_runs_on_what_it_names(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    _run(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tutorial.md", "how-to/why-this-token.md"])
def test_pages_are_true_of_a_real_language_model(
    page: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    _run(DOCS / page, [SMOLLM2])


def _run(page: Path, titles: Sequence[str] = RUN_TITLES) -> None:
    namespace: dict[str, object] = {}
    for block in blocks_of(page):
        if block.language != "python" or block.options not in titles:
            continue
        code = compile("\n" * (block.line - 1) + block.code, named(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, namespace)
        if block.output is not None:
            assert printed.getvalue() == block.output, f"{named(page)}, line {block.line}"


def test_reference_has_every_public_name():
    documented = []
    for page in (DOCS / "reference").glob("*.md"):
        for path in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.MULTILINE):
            home, _, name = path.rpartition(".")
            documented.append(getattr(importlib.import_module(home), name))
    missing = [
        name
        for name in sparse_tl.__all__
        if not any(getattr(sparse_tl, name) is one for one in documented)
    ]
    assert missing == []


@pytest.mark.every_case
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_lead_to_files(page: Path):
    text = _FENCE.sub("", page.read_text("utf-8"))
    for target in _LINK.findall(text):
        path = target.partition("#")[0]
        if path and not re.match(r"[a-z]+:", path):
            assert (page.parent / path).exists(), f"{named(page)} links to {target}"
