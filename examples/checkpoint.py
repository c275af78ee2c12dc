"""Sharded checkpoints: every rank writes its own part of model and optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Checkpoint:
    """`settings` decide the course of a run: it resumes only under the same ones.

    The number of ranks is not among them; parameters are resharded on load.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.settings = settings

    def save(self, directory: Path, step: int) -> None:
        """Writes `directory`/step-<step>, which all ranks must see."""
        dcp.save(self._state(step), checkpoint_id=directory / f"step-{step}")

    def load(self, path: Path) -> int:
        """Returns the step to continue with."""
        state = self._state(step=0)
        dcp.load(state, checkpoint_id=path)
        saved = json.loads(state["settings"])
        differences = [
            f"{name} {saved.get(name)!r} (now {value!r})"
            for name, value in self.settings.items()
            if saved.get(name) != value
        ]
        if differences:
            raise ValueError(
                f"{path}: expected the settings the run was saved with, got others: "
                f"{', '.join(differences)}. Pass the same options."
            )
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return state["step"]

    def _state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "step": step,
            # As one string: a dict would be taken apart into entries.
            "settings": json.dumps(self.settings),
        }
