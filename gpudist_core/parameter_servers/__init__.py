"""Train with parameter servers, asynchronously or in lock-step, with tables partitioned over the servers."""

from gpudist_core.parameter_servers.tables import PartitionedEmbedding, PartitionedTable, partition
from gpudist_core.parameter_servers.training import CoordinatedTraining

__all__ = ["CoordinatedTraining", "PartitionedEmbedding", "PartitionedTable", "partition"]
