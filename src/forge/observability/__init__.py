"""What a run measured and said: metrics, where they go, the console, the rollout log, and the environment it ran in."""
