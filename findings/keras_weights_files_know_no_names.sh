#!/usr/bin/env bash
# A .weights.h5 file has no names of layers, and no keys of a dict: two layers of one class and shape are swapped in silence.
#
# Guess: load_weights finds a layer by its explicit name, or by its key in a dict of layers, or raises if the structure differs.
# What happens: within a model the layers of a class are numbered in their order: dense, dense_1. In a functional model the order of the
# inputs or of the outputs decides that. So a two-tower model that is defined with its inputs in the other order gets the item's weights
# in the user's tower. Layers in a list or a dict of a subclassed model are numbered, too: keys do not count.
# Why: `_save_container_state` and `_load_container_state` in keras/src/saving/saving_lib.py take `list(container.values())` of a dict
# and name an entry by `naming.to_snake_case(saveable.__class__.__name__)` and a count. The comment there: names may vary between two
# instances.
# Workaround: keep each tower in an attribute of a subclassed model, or save and load towers one by one.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: whose weights a tower has after load_weights, in a model that has its towers in the order of the line; saved as user, item.
#     functional, user, item: user has user, item has item
#     functional, item, user: user has item, item has user
#     dict, user, item: user has user, item has item
#     dict, item, user: user has item, item has user

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/towers.py" <<'PYTHON'
import sys

import keras
import numpy as np

names = ["user", "item"]


def functional(order):
    towers = {name: keras.layers.Dense(4, name=f"{name}_tower") for name in order}
    inputs = {name: keras.Input((6,), name=name) for name in order}
    return keras.Model(inputs, keras.layers.Dot(1)([towers[name](inputs[name]) for name in order])), towers


class Subclassed(keras.Model):
    def __init__(self, order):
        super().__init__()
        self.towers = {name: keras.layers.Dense(4, name=f"{name}_tower") for name in order}

    def call(self, inputs):
        return keras.ops.sum(self.towers["user"](inputs["user"]) * self.towers["item"](inputs["item"]), axis=-1)


def with_dict(order):
    model = Subclassed(order)
    model({name: np.zeros((1, 6), "float32") for name in order})
    return model, model.towers


for kind, define in (("functional", functional), ("dict", with_dict)):
    file = f"{sys.argv[1]}/{kind}.weights.h5"
    model, saved = define(names)
    model.save_weights(file)
    for order in (names, names[::-1]):
        model, towers = define(order)
        model.load_weights(file)
        facts = []
        for name in names:
            (owner,) = (owner for owner in names if np.array_equal(saved[owner].kernel.numpy(), towers[name].kernel.numpy()))
            facts.append(f"{name} has {owner}")
        print(f"{kind}, {', '.join(order)}:", ", ".join(facts))
PYTHON
expect_header "$(run_python towers.py "$work")"
