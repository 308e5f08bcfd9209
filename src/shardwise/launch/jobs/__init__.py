"""Files with which a scheduler starts a run: Slurm, Kubernetes, SkyPilot. Only text is made; nothing is started."""
