"""The training loop: setup, step, optimizer, skipped updates, logs, hang detection."""
