from typing import TypedDict, type_check_only

@type_check_only
class BuildInfo(TypedDict):
    version: str
    torch: str
    cuda: bool
    cuda_version: str
    cuda_archs: str
    compiler: str

def build_info() -> BuildInfo: ...
