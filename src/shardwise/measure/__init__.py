"""What a model holds and computes, found by running it: on meta tensors, or counted from outside."""
