"""Communication between ranks: the only package that issues collectives of torch.distributed."""
