"""FSDP-style sharded training whose peak memory is planned instead of hoped for."""

try:
    from lowtide import _built_for
except ModuleNotFoundError:
    raise ImportError(
        "lowtide: extension: expected a built package, got a source tree. "
        "Run `make dev` in the checkout, or `pip install --no-build-isolation .`."
    ) from None
from lowtide import _version_check

_version_check.check_torch(built_for=_built_for.TORCH, built_for_cuda=_built_for.CUDA)

from lowtide import _C  # noqa: E402

__version__: str = _C.build_info()["version"]
