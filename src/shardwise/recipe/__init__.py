"""What composes the parts for the user: parallelize, train_step, save and load, parity. One file per verb."""
