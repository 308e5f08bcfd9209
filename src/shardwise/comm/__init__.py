"""The only door to torch.distributed: processes, process groups, collectives."""
