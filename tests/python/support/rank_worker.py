"""The program of `fork_server.py`, and the ranks of `ranks.RankPool`, which it forks:
each takes tasks from a connection until it closes.

    rank_worker.py <descriptor of the server's connection>
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
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
# What most ranks import, and nothing that starts a thread.
PRELOADED = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "lowtide",
)


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


def destroy_group(group: Any) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    dist.destroy_process_group(group)
    # Names of new groups count the names there are, and one that comes again finds
    # the addresses of the first in the store.
    names: dict[Any, str] = distributed_c10d._world.pg_names
    names[object()] = f"dropped {len(names)}"


def drop_groups() -> None:
    """All but those of the mesh of all ranks: gloo's threads wake a hundred times a
    second for each."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    world = dist.group.WORLD
    groups = sys.modules.get("lowtide._sharding.groups")
    kept = {world}
    if groups is not None:
        for names, made in list(groups._known.items()):
            if made.are_of([world]):
                kept.add(made.reduce.process_group)
                if made.host is not None:
                    kept.add(made.host.process_group)
                made.runs.clear()
            else:
                del groups._known[names]
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # Its meshes, groups included, are found again for equal ones.
        _clear_sharding_prop_cache()
    state: Any = distributed_c10d._world
    for group in list(state.pg_map):
        if group not in kept:
            destroy_group(group)
    gc.collect()


def left_bytes() -> int:
    """Of lowtide's ledger: what a task's tensors, or threads of gloo's, still hold."""
    import torch

    from lowtide._base.memory import ledger

    gc.collect()
    return ledger(torch.device("cpu")).total_live


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def run_task(message: bytes) -> bytes:
    """`(left_bytes, num_threads, reply)`, the reply by `torch.save`, all pickled."""
    import torch

    module_name, path, qualname, timeout, payload = pickle.loads(message)
    faulthandler.dump_traceback_later(timeout)
    reply: Any
    try:
        fn = resolve(module_name, path, qualname)
        args, kwargs = torch.load(io.BytesIO(payload), weights_only=False)
        reply = ("value", fn(*args, **kwargs))
        del args, kwargs
    except Exception as error:
        text = traceback.format_exc()
        reply = ("error", (type(error).__name__, str(error), text))
    finally:
        faulthandler.cancel_dump_traceback_later()
    out = io.BytesIO()
    torch.save(reply, out)
    del reply
    return pickle.dumps((left_bytes(), num_threads(), out.getvalue()))


def serve(connection: Connection) -> None:
    """Forks ranks until the connection closes; see `fork_server.py`."""
    while True:
        try:
            what, *arguments = connection.recv()
        except EOFError:
            return
        if what == "status":
            pid, status = os.waitpid(arguments[0], os.WNOHANG)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        task, log = (reduction.recv_handle(connection) for _ in "12")
        pid = os.fork()
        if pid == 0:
            connection.close()
            be_rank(task, log, *arguments)
        os.close(task)
        os.close(log)
        connection.send(pid)


def be_rank(task: int, log: int, settings: dict[str, Any], env: dict[str, str]) -> None:
    """Never returns: the server's code is not this process's to run."""
    os.setsid()
    die_with_parent()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    try:
        os.environ.clear()
        os.environ.update(env)
        os.chdir(settings["folder"])
        sys.path[:] = settings["path"]
        work(Connection(task), settings)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing gloo down can wait for peers that are gone already.
    os._exit(0)


def work(connection: Connection, settings: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()
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
            return
        connection.send_bytes(run_task(message))
        if dist.is_initialized():
            drop_groups()


def main() -> None:
    die_with_parent()
    # Whom a shell starts in the background ignores it, with all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in PRELOADED:
        importlib.import_module(name)
    # Ranks collect garbage after every task: not a quarter of a million objects of
    # modules each time.
    gc.collect()
    gc.freeze()
    serve(Connection(int(sys.argv[1])))
    # Ranks that are still there end with their parent.
    os._exit(0)


if __name__ == "__main__":
    main()
