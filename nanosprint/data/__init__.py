"""Token shards: making, fetching, checking and reading them. Only `loader` imports torch.

shards      the .bin format; datasets are folders of them        tokenizers  text to ids and back
datasets    from a recipe's data name to a folder                download    published sets
prepare     your own text to shards (reading: sources)           info        what is in a dataset
shakespeare, tiny   the embedded corpora                         order       which tokens a step reads
loader      lanes, prefetch, explicit state; validation          publish, lock   all or nothing; taking turns
"""

from nanosprint.data.datasets import ensure_dataset
from nanosprint.data.shards import ShardError, checksum, find_shards, open_shard
from nanosprint.data.tokenizers import load_tokenizer, stream_text

__all__ = ["ShardError", "checksum", "ensure_dataset", "find_shards", "load_tokenizer", "open_shard", "stream_text"]
