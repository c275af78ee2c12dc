"""State-space models of transformers as large as mamba-130m and mamba2-130m:
``foreign_state_space.py mamba|mamba2 BATCH TOKENS``. Without kernels of their own
installed, their scans are torch's operators."""

import sys

import torch
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig

name, batch, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sizes = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24}
if name == "mamba":
    config = MambaConfig(state_size=16, use_cache=False, **sizes)
else:
    config = Mamba2Config(
        num_heads=24, head_dim=64, state_size=128, n_groups=1, use_cache=False, **sizes
    )
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    ids = torch.randint(0, 50280, (batch, tokens), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
