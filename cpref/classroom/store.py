"""Execute notebooks and store them with their outputs, and with nothing that changes by itself.

    python -m cpref.classroom.store notebooks/*.ipynb

That is how the lessons come by the outputs which their tests compare with. Times of execution and
versions of the kernel are left out, so that a diff shows what a reader would see.
"""

import sys
from pathlib import Path

import nbclient
import nbformat

_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_WIDGET = "application/vnd.jupyter.widget-view+json"  # why: without its kernel it shows nothing


def store(path: Path) -> None:
    """Execute the notebook in its own folder and write it back.

    Raises nbclient.exceptions.CellExecutionError, and writes nothing, if a cell fails that is not
    tagged `raises-exception`.
    """
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                output.get("data", {}).pop(_WIDGET, None)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def _joined(outputs: list) -> list:
    """Consecutive pieces of one stream as one: where they were cut depends on the moment."""
    joined: list = []
    for output in outputs:
        last = joined[-1] if joined else None
        streams = last and output.output_type == last.output_type == "stream"
        if streams and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"executing {name}", flush=True)
        store(Path(name))
