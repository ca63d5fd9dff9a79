"""What each rank of a benchmark does; rank 0 keeps the results."""

import argparse
import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from ..classroom.rank import keep
from ..processes import init
from .contenders import contenders, missing
from .timing import Problem, compare


def main(words: list[str]) -> None:
    """words: one JSON object with the fields of `Problem`, lists of lengths and dtypes, rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("request", type=json.loads)
    request = parser.parse_args(words).request
    torch.set_num_threads(1)
    device = init(timeout=600)
    baseline, *others = contenders(dist.get_world_size(), request["heads"])
    wanted = [c for c in others if any(part in c.name for part in request["only"])]
    field = [baseline, *wanted]
    tables = []
    for seq_len in request["seq_len"]:
        for dtype in request["dtype"]:
            problem = Problem(
                batch=request["batch"],
                heads=request["heads"],
                head_dim=request["head_dim"],
                seq_len=seq_len,
                dtype=getattr(torch, dtype),
                backward=request["backward"],
                device=str(device),
            )
            results = compare(problem, field, request["rounds"], request["error_seq_len"])
            tables.append(
                {"seq_len": seq_len, "dtype": dtype, "results": list(map(asdict, results))}
            )
            if dist.get_rank() == 0:
                print(f"measured {seq_len} tokens, {dtype}", file=sys.stderr)
    keep(tables=tables, device=str(device), missing=missing())


if __name__ == "__main__":
    main(sys.argv[1:])
