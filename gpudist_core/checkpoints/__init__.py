"""Save checkpoints on one topology and restore them on another."""

from gpudist_core.checkpoints.checkpoints import Checkpoints, Restored
from gpudist_core.errors import CheckpointRefused, FolderInUse, HostMissing, Preempted, SaveFailed

__all__ = ["CheckpointRefused", "Checkpoints", "FolderInUse", "HostMissing", "Preempted", "Restored", "SaveFailed"]
