"""The trainer behind ``shardwise train``: a user of ``shardwise.api``, one file for each part that can be replaced.

``config``       sections and fields; reading files and ``--set``, all mistakes at once (``document``: YAML and TOML)
``resolve``      checks across sections, against world, model and data (``hf``: what a Hugging Face folder says)
``start``        from a verb's arguments to ranks at work: which configuration, checks, the launch
``task``         what a Hugging Face model is trained for
``data/``        from files to the samples of each rank's step: text, token files, data sets, conversations
``build``        model, objective and optimizer of a configuration (``pretrained``: folders; ``lora``: adapters)
``loop``         the steps (``unread``: values that steps leave on the device; ``control``: exchange beside training)
``predict``      peak memory, predicted and measured
``folder``       a run's folder, its files and its lock
``checkpoints``  which one to continue from, writing and keeping them (``random_state``: generators as plain data)
``log``          metrics.jsonl, TensorBoard, Weights & Biases, the terminal, plan.json, summary.json
``proof``        strategies against one process on a run's own model and data
``export``       a run's checkpoint as a Hugging Face folder
``trained``      what has been trained and can be asked: a run, a checkpoint, or a Hugging Face folder
"""
