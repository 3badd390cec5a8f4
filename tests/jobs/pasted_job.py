"""Under torchrun: train with the lines that `gradlab recommend` printed, and write what each rank ended at.

pasted_job.py PRINTED FOLDER            PRINTED: the command's output, as it stood in a terminal
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from jobs.attach_tasks import pasted
from support.printed_lines import lines_of, lines_to_resume_of


def main() -> None:
    printed, folder = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    text = printed.read_text()
    os.chdir(folder)
    result = pasted(group, lines_of(text), resume=lines_to_resume_of(text))
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
