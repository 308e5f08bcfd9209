"""Files with which a scheduler starts a run: Slurm, Kubernetes, SkyPilot. Text in, text out; nothing is started."""
