"""The plan that --dry-run prints: memory, time and disk by arithmetic."""
