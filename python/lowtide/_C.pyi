from typing import TypedDict

class BuildInfo(TypedDict):
    version: str
    torch: str
    cuda: bool
    cuda_version: str
    cuda_archs: str
    compiler: str

def build_info() -> BuildInfo: ...
