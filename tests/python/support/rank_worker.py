"""One rank of `ranks.RankPool`: takes tasks from a connection until it closes.

Started as a program by `ranks.py`:  rank_worker.py <fd> <settings, pickled hex>
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import io
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def load_module(name: str, path: str) -> ModuleType:
    """Test modules and programs come by path: their names are not importable."""
    if name == "__main__":
        name = f"__main__ of {path}"
    elif not Path(path).name.startswith("test_"):
        return importlib.import_module(name)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resolve(module_name: str, path: str, qualname: str) -> Any:
    target: Any = load_module(module_name, path)
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def drop_groups() -> None:
    """All but those of the mesh of all ranks: gloo's threads wake a hundred times a
    second for each."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    world = dist.group.WORLD
    groups = sys.modules.get("lowtide._sharding.groups")
    kept = {world}
    if groups is not None:
        for names, (theirs, made) in list(groups._known.items()):
            if theirs == [world]:
                kept |= {made.reduce_process_group, made.host_process_group}
            else:
                del groups._known[names]
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # Its meshes, groups included, are found again for equal ones.
        _clear_sharding_prop_cache()
    state: Any = distributed_c10d._world
    for group in list(state.pg_map):
        if group not in kept:
            dist.destroy_process_group(group)
            # Names of new groups count the names there are.
            state.pg_names[object()] = f"dropped {len(state.pg_names)}"
    gc.collect()


def run_task(message: bytes) -> bytes:
    import torch

    module_name, path, qualname, timeout, payload = pickle.loads(message)
    faulthandler.dump_traceback_later(timeout)
    try:
        fn = resolve(module_name, path, qualname)
        args, kwargs = torch.load(io.BytesIO(payload), weights_only=False)
        reply = ("value", fn(*args, **kwargs))
    except Exception as error:
        text = traceback.format_exc()
        reply = ("error", (type(error).__name__, str(error), text))
    finally:
        faulthandler.cancel_dump_traceback_later()
    gc.collect()
    out = io.BytesIO()
    torch.save(reply, out)
    return out.getvalue()


def main() -> None:
    die_with_parent()
    faulthandler.enable()
    connection = Connection(int(sys.argv[1]))
    settings = pickle.loads(bytes.fromhex(sys.argv[2]))
    sys.path[:] = settings["sys_path"]

    os.environ["RANK"] = str(settings["rank"])
    os.environ["WORLD_SIZE"] = str(settings["world_size"])
    os.environ["RANK_POOL_STORE"] = settings["store"]

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if settings["group"]:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(settings["store"], settings["world_size"]),
            rank=settings["rank"],
            world_size=settings["world_size"],
            timeout=timedelta(seconds=settings["group_timeout"]),
        )
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            break
        connection.send_bytes(run_task(message))
        if dist.is_initialized():
            drop_groups()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing gloo down can wait for peers that are gone already.
    os._exit(0)


if __name__ == "__main__":
    main()
