"""Keep tensors resident: one copy on each device, or one slice of a table on each."""

from gpudist_core.static.operations import ShardInfo
from gpudist_core.static.replicated import Replicated, replicate
from gpudist_core.static.sharded import ShardedEmbedding, ShardedTable, shard, table_of
from gpudist_core.static.sources import uniform

__all__ = ["Replicated", "ShardInfo", "ShardedEmbedding", "ShardedTable", "replicate", "shard", "table_of", "uniform"]
