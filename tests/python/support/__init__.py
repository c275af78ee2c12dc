"""What tests of several folders share. The map:

what make test runs   selection
ranks                 ranks: a pool of gloo processes; fork_server and rank_worker:
                      those processes; commands: whole programs, with torchrun
a training run        training: Run and Trace; systems: lowtide or FSDP2; model: a
                      small Llama; reference: the rule, in one process; left_fold:
                      the order in which gloo adds; bits, recorder: bit by bit
models and layers     layers, blocks, fused, gpt2, models (of other libraries),
                      sharded_llama, extended (with FSDP2's all-gather extensions)
exceptions            bombs
random programs       random_steps
losses, regions, axes losses; regions; sequence_parallel, spmd
CUDA without a GPU    dry_cuda: a program; dry_process: a function; planned: plans;
                      gpu_check: its steps; cuda_steps and every *_dry_run: what
                      runs there; dry_programs: programs as others write them
"""
