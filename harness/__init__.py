"""What every script needs and no paper is about: settings, data, checkpoints, logs, the machine."""
