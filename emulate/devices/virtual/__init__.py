"""Let many replicas take turns in one process: each one's step by one compiled function, their collectives by arithmetic."""
