"""The trainer behind ``shardwise train``: a user of ``shardwise.api``, one file for each part that can be replaced.

``config``       sections and fields; reading files and ``--set``, all mistakes at once (``document``: YAML and TOML)
``resolve``      checks across sections, against world, model and data (``hf``: what a Hugging Face folder says)
``start``        from a verb's arguments to ranks at work: which configuration, checks, the launch
``data``         text and token files as samples (``tokenizer``: text to ids; ``sampler``: who reads which sample)
``build``        model, objective and optimizer of a configuration (``pretrained``: Hugging Face folders)
``loop``         the steps (``unread``: values that steps leave on the device; ``control``: exchange beside training)
``predict``      peak memory, predicted and measured
``folder``       a run's folder, its files and its lock
``checkpoints``  which one to continue from, writing and keeping them (``random_state``: generators as plain data)
``log``          metrics.jsonl, TensorBoard, Weights & Biases, the terminal, plan.json, summary.json
``proof``        strategies against one process on a run's own model and data
``trained``      what has been trained and can be asked: a run, a checkpoint, or a Hugging Face folder
"""
