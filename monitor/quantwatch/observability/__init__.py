"""What the service says about itself: meters, logs, traces, GPU telemetry. It decides nothing."""
