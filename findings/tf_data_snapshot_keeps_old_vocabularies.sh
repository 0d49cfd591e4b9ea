#!/usr/bin/env bash
# Dataset.snapshot behind a StringLookup gives the ids of the old vocabulary, when the vocabulary has changed.
#
# Guess: snapshot computes a fingerprint of the pipeline and writes a new snapshot when anything in front of it has changed.
# What happens: the words of a lookup table are not in the fingerprint, nor is the value of a variable. A run with a new vocabulary reads
# the ids that the old one wrote, and trains the wrong embedding for each word. There is no warning. The same holds for
# TextVectorization, for a table from a file of another name, and for a text file that changed in place. Constants count, so
# Normalization is safe.
# Why: `GraphHasher` in tensorflow/core/data/hash_utils.cc hashes the operations of the graph and its constant tensors. A table or a
# variable that a function captures is a resource there, a handle without contents. Of a file it has the name.
# Workaround: put a hash of the vocabulary into the path, or look words up behind the snapshot.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: what three runs with one snapshot folder get for the words a b c; 0 or 1 is an unknown word.
#     StringLookup: [a b] 1 2 0; [b a] 1 2 0; [a b c] 1 2 0
#     TextVectorization: [a b] 2 3 1; [b a] 2 3 1; [a b c] 2 3 1
#     StaticVocabularyTable of a file: [a b] 0 1 2; [b a] 0 1 2; [a b c] 0 1 2
#     constant: [a b] 1 2 0; [b a] 2 1 0; [a b c] 1 2 3
#     StringLookup, no snapshot: [a b] 1 2 0; [b a] 2 1 0; [a b c] 1 2 3

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/run.py" <<'PYTHON'
import sys
from pathlib import Path

import keras
import tensorflow as tf

name, folder, *vocabulary = sys.argv[1:]


def table():
    path = Path(folder, "".join(vocabulary) + ".txt")
    path.write_text("\n".join(vocabulary))
    line, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    words = tf.lookup.TextFileInitializer(str(path), tf.string, line, tf.int64, number)
    return tf.lookup.StaticVocabularyTable(words, 1).lookup


def constant():
    words, numbers = tf.constant(vocabulary), tf.range(1, len(vocabulary) + 1)
    return lambda batch: tf.reduce_sum(tf.where(batch[:, None] == words, numbers, 0), axis=1)


make = {
    "StringLookup": lambda: keras.layers.StringLookup(vocabulary=vocabulary),
    "TextVectorization": lambda: keras.layers.TextVectorization(vocabulary=vocabulary),
    "StaticVocabularyTable of a file": table,
    "constant": constant,
    "StringLookup, no snapshot": lambda: keras.layers.StringLookup(vocabulary=vocabulary),
}
data = tf.data.Dataset.from_tensor_slices(["a", "b", "c"]).batch(3).map(make[name]())
if not name.endswith("no snapshot"):
    data = data.snapshot(str(Path(folder, "snapshot")))
(ids,) = data.as_numpy_iterator()
print(f"[{' '.join(vocabulary)}]", *ids.ravel())
PYTHON
output=$(
    for name in StringLookup TextVectorization "StaticVocabularyTable of a file" constant "StringLookup, no snapshot"; do
        folder=$(mktemp -d "$work/XXXX")
        first=$(run_python run.py "$name" "$folder" a b)
        second=$(run_python run.py "$name" "$folder" b a)
        third=$(run_python run.py "$name" "$folder" a b c)
        echo "$name: $first; $second; $third"
    done
)
expect_header "$output"
