"""Configuration, data and the training loop behind ``shardwise train``. Importing it does not import torch."""
