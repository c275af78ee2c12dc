"""What the installed transformers has."""

from importlib.metadata import version

# Whether it shards models itself and saves their shards (its DistributedConfig).
SHARDS = tuple(int(part) for part in version("transformers").split(".")[:2]) >= (5, 24)
SHARDS_NOT = "transformers 5.24 needs Python 3.11"
