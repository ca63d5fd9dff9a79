"""What every lesson has: stored as it runs, readable without a kernel, complete, and no longer than
it needs to be. Whether the stored outputs are still true is for nbval: `make test-notebooks`."""

import html
import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from statistics import median

import nbformat
import pytest
from nbformat import NotebookNode

LESSONS = sorted((Path(__file__).parents[1] / "notebooks").glob("[0-9]*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"
PARTS = {
    "objectives": r"^\*\*After this lesson you can\*\*\n(- .+\n){2,}",
    "prerequisites and minutes": r"^\*\*You need\*\* .+ \*\*Time\*\* \d+ minutes\.$",
    "a prediction": r"^> \*\*Predict\.\*\* .+\?",
    "check yourself": r"^## (\d+\. )?Check yourself$",
    "answers that unfold": r"(<details><summary>.+</summary>\n\n[^<]+</details>\s+){3,}",
    "in production": r"^## (\d+\. )?In production\n\n\|",
    "sources": r"^## Sources\n\n(-|\d+\.) ",
    "its exercise": r"\b[Ee]xercises?\b",
}


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(lesson: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in lesson.cells if cell.cell_type == "code"]


def prose(lesson: NotebookNode) -> str:
    return "\n\n".join(cell.source for cell in lesson.cells if cell.cell_type == "markdown") + "\n"


def outputs(lesson: NotebookNode) -> Iterator[NotebookNode]:
    for cell in code_cells(lesson):
        yield from cell.outputs


def pictures(lesson: NotebookNode) -> list[NotebookNode]:
    shown = [output for output in outputs(lesson) if "data" in output]
    return [o for o in shown if any(kind.startswith("image/") for kind in o.data)]


# -- the checks: each raises AssertionError ----------------------------------------------------


def is_stored_as_it_ran(lesson):
    counts = [cell.execution_count for cell in code_cells(lesson)]
    assert counts == list(range(1, len(counts) + 1)), "not run from top to bottom"
    assert set(lesson.metadata) == {"kernelspec", "language_info"}
    assert lesson.metadata.kernelspec.name == "python3"
    for cell in lesson.cells:
        assert set(cell.metadata) <= {"tags"}, f"{cell.id} carries {set(cell.metadata)}"


def fails_only_where_it_means_to(lesson):
    for cell in code_cells(lesson):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in cell.metadata.get("tags", [])), cell.source
        said = [o.text for o in cell.outputs if o.get("name") == "stderr"]
        assert not said, f"warns: {said}"


def fits_the_page(lesson):
    for cell in code_cells(lesson):
        lines = cell.source.splitlines()
        assert len(lines) <= 20, f"{len(lines)} lines: {cell.source}"
        assert max(map(len, lines)) <= 88, f"too wide: {cell.source}"
    assert median(len(cell.source.splitlines()) for cell in code_cells(lesson)) < 10


def is_as_long_as_a_lesson(lesson):
    assert 30 <= len(lesson.cells) <= 50, f"{len(lesson.cells)} cells"
    words = len(prose(lesson).split())
    assert 1200 <= words <= 2500, f"{words} words"


def says_what_its_pictures_show(lesson):
    assert pictures(lesson)
    unfolding = [o.data["text/html"] for o in outputs(lesson) if "text/html" in o.get("data", {})]
    for output in pictures(lesson):
        (kind,) = (kind for kind in output.data if kind.startswith("image/"))
        alt = output.metadata.get(kind, {}).get("alt", "")
        assert len(alt.split()) >= 8, f"no alternative text: {alt!r}"
        assert output.data["text/plain"] == alt, "viewers without images read something else"
        assert any(html.escape(alt) in words for words in unfolding), "nothing to unfold"
    assert not re.findall(r"!\[\]|<img(?![^>]*alt=\"[^\"]+\")", prose(lesson))


def shows_a_picture_where_sliders_need_a_kernel(lesson):
    moving = [cell for cell in code_cells(lesson) if re.search(r"^widgets\.", cell.source, re.M)]
    assert moving, "no interactive figure"
    for cell in moving:
        shown = [output.data for output in cell.outputs if "data" in output]
        assert not any(WIDGET in data for data in shown), "stored without its state, it is an error"
        assert any("image/png" in data for data in shown), "no static twin"


def has_its_headings_in_order(lesson):
    found = re.findall(r"^(#+) (.+)$", re.sub(r"```.*?```", "", prose(lesson), flags=re.S), re.M)
    levels = [len(hashes) for hashes, _ in found]
    assert lesson.cells[0].source.startswith("# ")
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    numbers = [int(n) for _, title in found for n in re.findall(r"^(\d+)\. ", title)]
    assert numbers == list(range(1, len(numbers) + 1))


def has_every_part(lesson):
    missing = [part for part, form in PARTS.items() if not re.search(form, prose(lesson), re.M)]
    assert not missing, f"without {', '.join(missing)}"


def links_to_what_exists(lesson):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", prose(lesson)):
        assert (LESSONS[0].parent / target).exists(), target


def does_not_shout(lesson):
    assert not re.search(r"\w!(?!\[)", prose(lesson))


CHECKS = [
    is_stored_as_it_ran,
    fails_only_where_it_means_to,
    fits_the_page,
    is_as_long_as_a_lesson,
    says_what_its_pictures_show,
    shows_a_picture_where_sliders_need_a_kernel,
    has_its_headings_in_order,
    has_every_part,
    links_to_what_exists,
    does_not_shout,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson(path, check):
    check(read(path))


# -- the checks find what they look for ----------------------------------------------------------


def the_first(lesson, fits):
    return next(cell for cell in lesson.cells if fits(cell))


def with_widget(lesson):
    return the_first(lesson, lambda cell: cell.source.rstrip().endswith("widgets.work()"))


def unexecuted(lesson):
    code_cells(lesson)[3].execution_count = None


def timed(lesson):
    code_cells(lesson)[3].metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}


def failed(lesson):
    error = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
    code_cells(lesson)[3].outputs.append(error)


def never_failing(lesson):
    code_cells(lesson)[3].metadata["tags"] = ["raises-exception"]


def warning(lesson):
    said = nbformat.v4.new_output("stream", name="stderr", text="UserWarning")
    code_cells(lesson)[3].outputs.append(said)


def too_wide(lesson):
    code_cells(lesson)[3].source += "\n" + "x" * 89


def too_high(lesson):
    code_cells(lesson)[3].source += "\npass" * 20


def too_long(lesson):
    lesson.cells += [nbformat.v4.new_markdown_cell("word " * 30)] * 40


def without_words(lesson):
    del pictures(lesson)[0].metadata["image/png"]["alt"]


def without_anything_to_unfold(lesson):
    picture = the_first(lesson, lambda cell: cell.source.startswith("from cpref.show"))
    picture.outputs = [o for o in picture.outputs if "text/html" not in o.data]


def without_twin(lesson):
    del with_widget(lesson).outputs[0].data["image/png"]


def with_dead_widget(lesson):
    with_widget(lesson).outputs[0].data[WIDGET] = {"model_id": "0"}


def skipping_a_level(lesson):
    lesson.cells[1].source += "\n\n#### Deep"


def without_sources(lesson):
    for cell in lesson.cells:
        cell.source = cell.source.replace("## Sources", "## Further")


def broken_link(lesson):
    lesson.cells[1].source += "\n\n[before](01_nowhere.ipynb)"


def shouting(lesson):
    lesson.cells[1].source += "\n\nIt works!"


SPOILED = {
    unexecuted: is_stored_as_it_ran,
    timed: is_stored_as_it_ran,
    failed: fails_only_where_it_means_to,
    never_failing: fails_only_where_it_means_to,
    warning: fails_only_where_it_means_to,
    too_wide: fits_the_page,
    too_high: fits_the_page,
    too_long: is_as_long_as_a_lesson,
    without_words: says_what_its_pictures_show,
    without_anything_to_unfold: says_what_its_pictures_show,
    without_twin: shows_a_picture_where_sliders_need_a_kernel,
    with_dead_widget: shows_a_picture_where_sliders_need_a_kernel,
    skipping_a_level: has_its_headings_in_order,
    without_sources: has_every_part,
    broken_link: links_to_what_exists,
    shouting: does_not_shout,
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_check_finds_a_lesson_that_is(spoil):
    (path,) = (path for path in LESSONS if path.stem == "02_sharding")
    lesson = deepcopy(read(path))
    spoil(lesson)
    with pytest.raises(AssertionError):
        SPOILED[spoil](lesson)
