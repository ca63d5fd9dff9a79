"""torchrun, tied to the process that started it.

`python -m cpref.classroom.agent FOLDER ARGUMENTS` is `torchrun ARGUMENTS`, but ends, with all its
ranks, as soon as its standard input is closed: when the one who started it is gone, however that
happened. Then it also removes the folder of temporary files, as its starter would have done.
"""

import contextlib
import os
import shutil
import sys
import threading

import psutil
from torch.distributed.run import main


def _end_with_the_starter(folder: str) -> None:
    while os.read(0, 1024):
        pass
    ranks = psutil.Process().children(recursive=True)
    for process in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ranks, timeout=5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with_the_starter, args=(folder,), daemon=True).start()
    main(arguments)
