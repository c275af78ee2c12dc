"""llama_memory.py with compiled blocks; at its end, however it comes, a line with the
seconds that torch's compiler took.

    llama_compiled.py --system lowtide --config 8b --world 8 [...]
"""

from __future__ import annotations

import sys

import llama_memory
from torch._dynamo.utils import calculate_time_spent

SECONDS = "seconds of compilation:"


def main() -> None:
    sys.argv.append("--compile")
    try:
        llama_memory.main()
    finally:
        print(f"\n{SECONDS} {calculate_time_spent()['total_wall_time']}")


if __name__ == "__main__":
    main()
