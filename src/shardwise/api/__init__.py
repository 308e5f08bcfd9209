"""The public calls, one file a verb: parallelize, fully_shard, train_step, save and load, dry_run, ..."""
