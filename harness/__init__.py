"""What every script needs and no paper is about: settings, the machine, checkpoints, logs, data."""
