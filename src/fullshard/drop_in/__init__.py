"""fullshard in place of `torch.distributed.fsdp`, for programs that do not know of it."""
