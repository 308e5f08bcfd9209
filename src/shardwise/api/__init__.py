"""The public calls, one file for each verb: parallelize, fully_shard, train_step, save and load, dry_run, ..."""
