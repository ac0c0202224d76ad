"""An experiment: its definition, its checks, its jobs, and the stages that the scripts call."""
