"""Write the program that some choices stand for, the way people write it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.everyday.choices import GLOBAL_BATCH, REMAINDER, STEPS, Program
from fixtures.corpus.index import MARK

_INDENT = "    "


def text(program: Program) -> str:
    """Return the program's text."""
    lines = [f'"""{program.chosen or "the simplest choices"}."""', *_imports(program), "", *_examples(program), ""]
    if program.style in ("loop", "eager"):
        body = _core_step(program) if program.way == "core-step" else _loop(program)
    else:
        body = _keras(program)
    return "\n".join([*lines, *body]) + "\n"


def _imports(program: Program) -> Iterator[str]:
    needs_files = program.data in ("directory", "tfrecord") or program.callback in ("checkpoint", "tensorboard")
    yield from ["import os", "import tempfile", ""] * needs_files
    yield from ["import keras", "import numpy as np", "import tensorflow as tf"]
    yield from ["", "import gpudist_core as gd"] * program.way.startswith("core")


def _reads(program: Program) -> str:
    """Return what the model reads: `rows`, `images`, `sequences` or `words`."""
    return {"cnn": "images", "lstm": "sequences", "transformer": "sequences", "embedding": "words"}.get(program.model, "rows")


def _examples(program: Program) -> Iterator[str]:
    examples = GLOBAL_BATCH * STEPS + (REMAINDER if program.last == "uneven" else 0)
    yield "keras.utils.set_random_seed(3)"
    yield "draw = np.random.default_rng(3)"
    yield {
        "rows": f'x = draw.normal(size=({examples}, 10)).astype("float32")',
        "images": f'x = draw.random(({examples}, 8, 8, 1)).astype("float32")',
        "sequences": f'x = draw.normal(size=({examples}, 6, 4)).astype("float32")',
        "words": f'x = draw.integers(1, 20, ({examples}, 6)).astype("int32")',
    }[_reads(program)]
    first = {"rows": "x[:, 0]", "images": "x[:, :4].sum((1, 2, 3))", "sequences": "x[:, :, 0].sum(1)", "words": "x[:, 0]"}
    yield f'y = (np.abs({first[_reads(program)]}) * 2).astype("int32") % 4'
    if program.loss == "sample_weight":
        yield f'weight = draw.random({examples}).astype("float32") + 0.5'


def _parts(program: Program) -> str:
    return "(x, y, weight)" if program.loss == "sample_weight" else "(x, y)"


def _labels(program: Program, of: str = "y") -> str:
    return f'{{"kind": {of}, "size": {of}[:, None] / 4}}' if program.model == "two_outputs" else of


def _inputs(program: Program, of: str = "x") -> str:
    return f'{{"left": {of}[:, :5], "right": {of}[:, 5:]}}' if program.data == "dictionary" else of


def _tensors(program: Program) -> str:
    """Return the expression of all examples, as from_tensor_slices takes them."""
    weight = ", weight" if program.loss == "sample_weight" else ""
    return f"({_inputs(program)}, {_labels(program)}{weight})"


def _dataset(program: Program, batch: bool = True) -> Iterator[str]:
    """Yield lines that make `data`: a tf.data.Dataset of global batches, or of examples where `batch` is off."""
    yield from _source(program)
    order = program.pipe.split("-")
    if program.data == "directory":
        yield "data = data.unbatch()"
    if "shuffle" in order:
        yield f"data = data.shuffle({GLOBAL_BATCH * STEPS * 2}, seed=5)"
    if "cache" in order and "shuffle" not in order:
        yield "data = data.cache()"
    if batch:
        dropped = ", drop_remainder=True" if program.pipe == "drop_remainder" else ""
        if program.data == "ragged":
            yield f"data = data.padded_batch({GLOBAL_BATCH}{dropped})"
        else:
            yield f"data = data.batch({GLOBAL_BATCH}{dropped})"
    if program.topology.startswith("2x") and program.way == "plain":
        yield "options = tf.data.Options()"
        yield "options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA"
        yield "data = data.with_options(options)"
    if program.pipe == "repeat":
        yield "data = data.repeat()"
    if "prefetch" in order:
        yield "data = data.prefetch(tf.data.AUTOTUNE)"


def _source(program: Program) -> Iterator[str]:
    shapes = {"rows": "(10,)", "images": "(8, 8, 1)", "sequences": "(6, 4)", "words": "(6,)"}
    kind = "tf.int32" if _reads(program) == "words" else "tf.float32"
    if program.data == "directory":
        yield "folder = tempfile.mkdtemp()"
        yield "for number, (image, label) in enumerate(zip(x, y)):"
        yield '    os.makedirs(f"{folder}/kind{label}", exist_ok=True)'
        yield '    tf.io.write_file(f"{folder}/kind{label}/{number}.png", tf.io.encode_png(np.uint8(image * 255)))'
        yield "data = keras.utils.image_dataset_from_directory("
        yield f'    folder, image_size=(8, 8), color_mode="grayscale", batch_size={GLOBAL_BATCH}, shuffle=True, seed=4, verbose=False'
        yield ").map(lambda image, label: (image / 255, label))"
    elif program.data == "tfrecord":
        yield 'path = os.path.join(tempfile.mkdtemp(), "examples.tfrecord")'
        yield "with tf.io.TFRecordWriter(path) as writer:"
        yield f"    for example in zip(*{_parts(program)}):"
        yield '        named = {f"f{k}": tf.io.serialize_tensor(tf.constant(part)).numpy() for k, part in enumerate(example)}'
        yield "        lists = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[part])) for name, part in named.items()}"
        yield "        writer.write(tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString())"
        yield ""
        yield ""
        yield "def parse(record):"
        yield '    found = tf.io.parse_single_example(record, {name: tf.io.FixedLenFeature([], tf.string) for name in ("f0", "f1")})'
        yield f'    image = tf.ensure_shape(tf.io.parse_tensor(found["f0"], {kind}), {shapes[_reads(program)]})'
        yield '    return image, tf.ensure_shape(tf.io.parse_tensor(found["f1"], tf.int32), ())'
        yield ""
        yield ""
        yield "data = tf.data.TFRecordDataset(path).map(parse)"
    elif program.data == "ragged":
        yield "lengths = draw.integers(2, 7, len(x))"
        yield (
            "x = tf.ragged.constant([row[:length].tolist() for row, length in zip(x, lengths)], ragged_rank=1, dtype="
            + kind
            + ")"
        )
        yield "data = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda row, label: (row.to_tensor() if hasattr(row, 'to_tensor') else row, label))"
    else:
        yield f"data = tf.data.Dataset.from_tensor_slices({_tensors(program)})"
        if program.data == "filter":
            label = "parts[1]['kind']" if program.model == "two_outputs" else "parts[1]"
            yield f"data = data.filter(lambda *parts: {label} >= 0)"


def _layers(program: Program) -> list[str]:
    """Return the expressions of the hidden layers."""
    regular = ", kernel_regularizer=keras.regularizers.L2(0.01)" if program.loss == "l2" else ""
    layers = {
        "cnn": [f"keras.layers.Conv2D(6, 3{regular})"],
        "lstm": ["keras.layers.LSTM(8)"],
        "embedding": ["keras.layers.Embedding(20, 8)", "keras.layers.GlobalAveragePooling1D()"],
    }.get(program.model, [f"keras.layers.Dense(12{regular})"])
    layers += {
        "batch": ["keras.layers.BatchNormalization()"],
        "synchronized": ["keras.layers.BatchNormalization(synchronized=True)"],
        "layer": ["keras.layers.LayerNormalization()"],
    }.get(program.normalization, [])
    layers += ['keras.layers.Activation("relu")'] * (program.model in ("cnn", "dense", "subclassed", "two_outputs"))
    layers += ["keras.layers.MaxPooling2D()", "keras.layers.Flatten()"] * (program.model == "cnn")
    layers += {"dropout": ["keras.layers.Dropout(0.3)"], "gaussian": ["keras.layers.GaussianNoise(0.1)"]}.get(program.noise, [])
    augmentation = ['keras.layers.RandomFlip("horizontal")', "keras.layers.RandomTranslation(0.1, 0.1)"]
    return augmentation * (program.noise == "augmentation") + layers


def _last_layer(program: Program, units: int = 4, more: str = "") -> str:
    regular = ", kernel_regularizer=keras.regularizers.L2(0.01)" if program.loss == "l2" else ""
    return f"keras.layers.Dense({units}{regular}{more})"


def _input(program: Program) -> str:
    length = "None" if program.data == "ragged" else "6"
    return {
        "rows": "keras.Input((10,))",
        "images": "keras.Input((8, 8, 1))",
        "sequences": f"keras.Input(({length}, 4))",
        "words": f'keras.Input(({length},), dtype="int32")',
    }[_reads(program)]


def _model(program: Program) -> Iterator[str]:
    """Yield lines that make `model`, of class `Network` where it has a train_step or is subclassed, else as Keras has it."""
    kind = "Network" if program.style == "train_step" else "keras.Model"
    if program.model == "subclassed":
        yield "model = Network()"
    elif program.model == "two_outputs" or program.data == "dictionary" or program.model == "transformer":
        yield from _functional(program, kind)
    elif program.style == "train_step":
        yield f"inputs = {_input(program)}"
        yield f"outputs = keras.Sequential([{', '.join([*_layers(program), _last_layer(program)])}])(inputs)"
        yield "model = Network(inputs, outputs)"
    else:
        yield f"model = keras.Sequential([{', '.join([_input(program), *_layers(program), _last_layer(program)])}])"


def _functional(program: Program, kind: str) -> Iterator[str]:
    if program.data == "dictionary":
        yield 'inputs = {"left": keras.Input((5,), name="left"), "right": keras.Input((5,), name="right")}'
        yield 'hidden = keras.layers.Concatenate()([inputs["left"], inputs["right"]])'
    else:
        yield f"inputs = {_input(program)}"
        yield "hidden = inputs"
    if program.model == "transformer":
        yield "hidden = keras.layers.Dense(8)(hidden)"
        yield "hidden = hidden + keras.layers.MultiHeadAttention(2, 4)(hidden, hidden)"
        yield "hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(hidden))"
    yield f"for layer in [{', '.join(_layers(program))}]:"
    yield "    hidden = layer(hidden)"
    if program.model == "two_outputs":
        kinds, size = _last_layer(program, 4, ', name="kind"'), _last_layer(program, 1, ', name="size"')
        yield f'outputs = {{"kind": {kinds}(hidden), "size": {size}(hidden)}}'
    else:
        yield f"outputs = {_last_layer(program)}(hidden)"
    yield f"model = {kind}(inputs, outputs)"


def _network(program: Program) -> Iterator[str]:
    """Yield the class of a model that is subclassed, or has a train_step of its own."""
    if program.model != "subclassed" and program.style != "train_step":
        return
    yield "class Network(keras.Model):"
    if program.model == "subclassed":
        yield "    def __init__(self):"
        yield "        super().__init__()"
        yield f"        self.hidden = [{', '.join(_layers(program))}]"
        yield f"        self.last = {_last_layer(program)}"
        yield ""
        yield "    def call(self, x, training=False):"
        yield "        for layer in self.hidden:"
        yield "            x = layer(x, training=training) if isinstance(layer, (keras.layers.Dropout, keras.layers.BatchNormalization, keras.layers.GaussianNoise)) else layer(x)"
        yield "        return self.last(x)"
        yield ""
    if program.style == "train_step":
        yield "    def train_step(self, data):"
        yield "        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)"
        yield "        with tf.GradientTape() as tape:"
        yield "            y_pred = self(x, training=True)"
        yield "            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)"
        yield "            scaled = self.optimizer.scale_loss(loss)"
        yield "        gradients = tape.gradient(scaled, self.trainable_variables)"
        yield "        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))"
        # In plain Keras a replica's loss is its part of the sum: a program that logs it divides it by the replicas. Several outputs
        # have metrics that only compute_metrics knows.
        if program.way == "plain" or program.model == "two_outputs":
            yield "        return self.compute_metrics(x, y, y_pred, weight)"
        else:
            yield "        for metric in self.metrics:"
            yield '            if metric.name == "loss":'
            yield "                metric.update_state(loss)"
            yield "            else:"
            yield "                metric.update_state(y, y_pred, sample_weight=weight)"
            yield "        return {metric.name: metric.result() for metric in self.metrics}"
        yield ""
    yield ""


def _optimizer(program: Program) -> str:
    option = {
        "clipnorm": "clipnorm=0.1",
        "global_clipnorm": "global_clipnorm=0.1",
        "clipvalue": "clipvalue=0.01",
        "weight_decay": "weight_decay=0.01",
        "use_ema": "use_ema=True, ema_momentum=0.9",
    }
    clips = program.option in ("clipnorm", "global_clipnorm", "clipvalue")
    outside = clips and (program.way in ("plain", "core-step"))
    more = "" if program.option == "none" or outside else f", {option[program.option]}"
    if program.bug == "clip-before-reduce" and program.style == "fit":
        more = f"{more}, clipnorm=0.05"
    made = {
        "SGD": "SGD(0.1{})",
        "Momentum": "SGD(0.1, momentum=0.9, nesterov=True{})",
        "LossScale": "LossScaleOptimizer(keras.optimizers.Adam(0.01{}))",
        "Schedule": "SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9){})",
        "AdamSchedule": "Adam(keras.optimizers.schedules.CosineDecay(0.01, 20, warmup_target=0.02, warmup_steps=4){})",
        "Adadelta": "Adadelta(1.0{})",
        "Lion": "Lion(0.001{})",
    }.get(program.optimizer, program.optimizer + "(0.01{})")
    return "keras.optimizers." + made.format(more)


def _loss_object(program: Program, more: str = "") -> str:
    if program.loss == "label_smoothing":
        return f"keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1{more})"
    return f"keras.losses.SparseCategoricalCrossentropy(from_logits=True{more})"


def _one_hot(program: Program) -> Iterator[str]:
    if program.loss == "label_smoothing":
        yield "data = data.map(lambda x, y, *w: (x, tf.one_hot(y, 4), *w))"


def _metrics(program: Program) -> str:
    dense = program.loss == "label_smoothing"
    accuracy = "categorical_accuracy" if dense else "sparse_categorical_accuracy"
    if program.model == "two_outputs" and program.metrics != "none":
        return '{"kind": ["sparse_categorical_accuracy"], "size": ["mae"]}'
    return {
        "none": "None",
        "accuracy": f'["{accuracy}"]',
        "auc": "[keras.metrics.AUC(from_logits=True)]" if dense else "[OneOfFour()]",
        "f1": '[keras.metrics.F1Score(average="macro")]' if dense else f'["{accuracy}", OneOfFour()]',
        "top_k": "[keras.metrics.TopKCategoricalAccuracy(2)]" if dense else "[keras.metrics.SparseTopKCategoricalAccuracy(2)]",
        "weighted": f'["{accuracy}"]',
    }[program.metrics]


def _metric_class(program: Program) -> Iterator[str]:
    if "OneOfFour" not in _metrics(program):
        return
    yield "class OneOfFour(keras.metrics.AUC):"
    yield "    def update_state(self, y_true, y_pred, sample_weight=None):"
    yield "        scores = keras.ops.softmax(y_pred)[:, :1]"
    yield '        return super().update_state(keras.ops.cast(keras.ops.reshape(y_true, (-1, 1)) == 0, "float32"), scores, sample_weight)'
    yield ""
    yield ""


def _callbacks(program: Program) -> str:
    watched = "val_loss" if program.validation == "data" else "loss"
    return {
        "none": "",
        "early_stopping": f'keras.callbacks.EarlyStopping("{watched}", patience=1, restore_best_weights=True)',
        "checkpoint": 'keras.callbacks.ModelCheckpoint(os.path.join(tempfile.mkdtemp(), "best.weights.h5"), monitor="'
        + watched
        + '", save_best_only=True, save_weights_only=True)',
        "plateau": f'keras.callbacks.ReduceLROnPlateau("{watched}", factor=0.5, patience=0, min_delta=10.0)',
        "scheduler": "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)",
        "tensorboard": "keras.callbacks.TensorBoard(tempfile.mkdtemp())",
        "own": "History()",
    }[program.callback]


def _keras(program: Program) -> Iterator[str]:
    """Yield a training by fit, with or without a train_step of its own, or by train_on_batch."""
    yield from _network(program)
    yield from _metric_class(program)
    if program.callback == "own":
        yield from ["class History(keras.callbacks.Callback):", "    def __init__(self):", "        super().__init__()"]
        yield from ["        self.losses = []", "", "    def on_train_batch_end(self, batch, logs=None):"]
        yield from ["        self.losses.append(logs.get('loss'))", "", "    def on_epoch_end(self, epoch, logs=None):"]
        yield from ["        print(epoch, sorted(logs or {}))", "", ""]
    yield "strategy = " + ("gd.make_strategy()" if program.way.startswith("core") else "tf.distribute.MirroredStrategy()")
    yield "with strategy.scope():"
    yield from (_INDENT + line for line in _model(program))
    if program.way.startswith("core"):
        draws = ', draws="row"' if program.way == "core-row" else ""
        yield f"    model = gd.distributed(model{draws})"
    mark = f"  {MARK}" if program.bug == "clip-before-reduce" else ""
    yield f"    optimizer = {_optimizer(program)}{mark}"
    loss = _loss_object(program)
    if program.model == "two_outputs":
        loss = f'{{"kind": {loss}, "size": "mse"}}'
    weighted = "weighted_" if program.metrics == "weighted" else ""
    more = {
        "steps_per_execution": ", steps_per_execution=4",
        "run_eagerly": ", run_eagerly=True",
        "no_jit": ", jit_compile=False",
    }
    metrics = "" if program.metrics == "none" else f", {weighted}metrics={_metrics(program)}"
    yield f"    model.compile(optimizer, {loss}{metrics}{more.get(program.compile, '')})"
    if program.style == "on_batch":
        yield from _dataset(program)
        yield from _one_hot(program)
        yield f"for epoch in range({program.epochs}):"
        yield "    for batch in data:"
        if program.loss == "sample_weight":
            yield "        model.train_on_batch(batch[0], batch[1], sample_weight=batch[2])"
        else:
            yield "        model.train_on_batch(batch[0], batch[1])"
        return
    yield from _fit(program)


def _fit(program: Program) -> Iterator[str]:
    one_hot = "np.eye(4, dtype='float32')[{}]" if program.loss == "label_smoothing" else "{}"
    labels = one_hot.format("y") if program.loss == "label_smoothing" else _labels(program)
    weight = ", weight" if program.loss == "sample_weight" else ""
    batches = f"range(0, len(y), {GLOBAL_BATCH})"
    uneven_bug = f"  {MARK}" if program.bug == "uneven-batch" else ""
    arguments = [f"epochs={program.epochs}", "verbose=2"]
    validation_x, validation_y = _inputs(program, "x[:48]"), one_hot.format("y[:48]")
    if program.loss != "label_smoothing":
        validation_y = _labels(program, "y[:48]")
    if program.data == "ragged":  # the rows have other lengths: all of them, padded
        validation_x = "x.to_tensor()[:48]"
    if program.validation == "data":
        arguments += [f"validation_data=({validation_x}, {validation_y})", f"validation_batch_size={GLOBAL_BATCH}"]
    if program.callback != "none":
        arguments.append(f"callbacks=[{_callbacks(program)}]")
    if program.loss == "class_weight":
        arguments.append("class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5}")
    if program.data == "arrays":
        arrays = f"{_inputs(program)}, {labels}"
        arguments.insert(0, f"batch_size={GLOBAL_BATCH}, shuffle=False")
        yield f"model.fit({arrays}, {', '.join(arguments)}{', sample_weight=weight' if weight else ''}){uneven_bug}"
    elif program.data == "pydataset":
        yield ""
        yield ""
        yield "class Batches(keras.utils.PyDataset):"
        yield "    def __len__(self):"
        yield f"        return -(-len(y) // {GLOBAL_BATCH})"
        yield ""
        yield "    def __getitem__(self, index):"
        yield f"        part = slice(index * {GLOBAL_BATCH}, (index + 1) * {GLOBAL_BATCH})"
        yield f"        return {_sliced(program, 'part')}"
        yield ""
        yield ""
        yield f"model.fit(Batches(), {', '.join(arguments)}){uneven_bug}"
    elif program.data == "generator":
        yield ""
        yield ""
        yield "def batches():"
        yield "    while True:"
        yield f"        for start in {batches}:"
        yield f"            yield {_sliced(program, f'slice(start, start + {GLOBAL_BATCH})')}"
        yield ""
        yield ""
        steps = STEPS + (program.last == "uneven")
        yield f"model.fit(batches(), steps_per_epoch={steps}, {', '.join(arguments)}){uneven_bug}"
    else:
        yield from _dataset(program)
        yield from _one_hot(program)
        steps = f"steps_per_epoch={STEPS}, " if program.pipe == "repeat" else ""
        yield f"model.fit(data, {steps}{', '.join(arguments)}){uneven_bug}"
    if program.validation == "evaluate":
        yield f"print(model.evaluate({validation_x}, {validation_y}, batch_size={GLOBAL_BATCH}, verbose=0))"


def _sliced(program: Program, part: str) -> str:
    """Return the expression of one batch of arrays."""
    labels = f"np.eye(4, dtype='float32')[y[{part}]]" if program.loss == "label_smoothing" else _labels(program, f"y[{part}]")
    weight = f", weight[{part}]" if program.loss == "sample_weight" else ""
    return f"{_inputs(program, f'x[{part}]')}, {labels}{weight}"


def _core_step(program: Program) -> Iterator[str]:
    """Yield a loop around gd.TrainStep."""
    yield from _network(program)
    yield "strategy = gd.make_strategy()"
    if program.data == "arrays":
        shuffled = ", shuffle=True, seed=5" if program.pipe == "shuffle" else ""
        dropped = ', remainder="drop"' if program.pipe == "drop_remainder" else ""
        made = f"gd.Pipeline.from_arrays({_tensors(program)}, global_batch_size={GLOBAL_BATCH}{shuffled}{dropped})"
    else:
        yield from _dataset(program, batch=False)
        made = f"gd.Pipeline.from_dataset(data, global_batch_size={GLOBAL_BATCH})"
    if program.loss == "label_smoothing":
        made += ".map(lambda x, y, *w: (x, tf.one_hot(y, 4), *w))"
    yield f"batches = {made}{'.prefetch(2)' if program.pipe == 'prefetch' else ''}.distribute(strategy)"
    yield "with strategy.scope():"
    yield from (_INDENT + line for line in _model(program))
    yield f"    optimizer = {_optimizer(program)}"
    clip = {"clipnorm": ", clip_norm=0.1", "global_clipnorm": ", clip_global_norm=0.1", "clipvalue": ", clip_value=0.01"}
    loss = _loss_object(program)
    if program.model == "two_outputs":
        yield ""
        yield ""
        yield "def loss_of(y, y_pred):"
        yield "    kinds = tf.nn.sparse_softmax_cross_entropy_with_logits(y['kind'], y_pred['kind'])"
        yield "    return kinds + keras.losses.mean_squared_error(y['size'], y_pred['size'])"
        yield ""
        yield ""
        loss = "loss_of"
    metric = "keras.metrics." + (
        "CategoricalAccuracy()" if program.loss == "label_smoothing" else "SparseCategoricalAccuracy()"
    )
    counts = program.metrics == "accuracy" and program.model != "two_outputs"
    if counts:
        yield "with strategy.scope():"
        yield f"    accuracy = {metric}"
    metrics = ", metrics=[accuracy]" if counts else ""
    yield f"step = gd.TrainStep(model, optimizer, {loss}{clip.get(program.option, '')}{metrics})"
    yield f"for epoch in range({program.epochs}):"
    yield "    for batch in batches:"
    yield "        print(float(step(batch)))"


def _loop(program: Program) -> Iterator[str]:
    """Yield a loop of plain tf.distribute, compiled or eager, that divides by the global batch and clips the sum."""
    yield from _network(program)
    several = program.topology.startswith("2x")
    yield f"strategy = tf.distribute.{'MultiWorkerMirroredStrategy' if several else 'MirroredStrategy'}()"
    yield from _dataset(program)
    yield from _one_hot(program)
    if program.bug == "samples-missing":
        yield f"data = data.unbatch().shard(strategy.num_replicas_in_sync, 0).batch({GLOBAL_BATCH})  {MARK}"
    yield "data = strategy.experimental_distribute_dataset(data)"
    yield "with strategy.scope():"
    yield from (_INDENT + line for line in _model(program))
    yield f"    optimizer = {_optimizer(program)}"
    if program.model != "subclassed":
        yield "    optimizer.build(model.trainable_variables)"
    else:
        yield "    model(x[:1])"
        yield "    optimizer.build(model.trainable_variables)"
    if program.metrics == "accuracy":
        kind = "CategoricalAccuracy" if program.loss == "label_smoothing" else "SparseCategoricalAccuracy"
        yield f"    accuracy = keras.metrics.{kind}()"
    yield ""
    yield ""
    names = "x, y, weight" if program.loss == "sample_weight" else "x, y"
    yield f"def step({names}):"
    yield from (_INDENT + line for line in _replica_step(program))
    yield ""
    yield ""
    yield from ["@tf.function"] * (program.style == "loop")
    yield "def train(batch):"
    how = "MEAN" if program.bug == "loss-report" else "SUM"
    mark = f"  {MARK}" if program.bug == "loss-report" else ""
    yield "    losses = strategy.run(step, args=batch)"
    yield f'    return strategy.reduce("{how}", losses, axis=None){mark}'
    yield ""
    yield ""
    yield f"for epoch in range({program.epochs}):"
    yield "    for batch in data:"
    yield "        print(float(train(batch)))"
    if program.metrics == "accuracy":
        yield "    print(float(accuracy.result()))"
        yield "    accuracy.reset_state()"


def _replica_step(program: Program) -> Iterator[str]:
    uneven = program.last == "uneven" and program.bug != "uneven-batch"
    clips = program.option in ("clipnorm", "global_clipnorm", "clipvalue")
    yield "context = tf.distribute.get_replica_context()"
    yield "with tf.GradientTape() as tape:"
    yield "    y_pred = model(x, training=True)"
    pred, label = ("y_pred['kind']", "y['kind']") if program.model == "two_outputs" else ("y_pred", "y")
    if program.loss == "label_smoothing":
        loss = _loss_object(program, ', reduction="none"')
        yield f"    each = {loss}({label}, {pred})"
    else:
        yield f"    each = tf.nn.sparse_softmax_cross_entropy_with_logits({label}, {pred})"
    if program.model == "two_outputs":
        yield "    each += tf.reduce_mean(tf.square(tf.cast(y['size'], each.dtype) - y_pred['size']), axis=-1)"
    if program.loss == "sample_weight":
        yield "    each *= tf.cast(weight, each.dtype)"
    if program.loss == "class_weight":
        yield "    each *= tf.gather(tf.constant([1.0, 2.0, 0.5, 1.5], each.dtype), y)"
    if program.bug in ("loss-scaling", "uneven-batch"):
        divided = " / strategy.num_replicas_in_sync" if program.bug == "uneven-batch" else ""
        yield f"    loss = tf.reduce_mean(each){divided}  {MARK}"
    elif program.bug == "local-normalization":
        total = "tf.reduce_sum(tf.cast(weight, each.dtype))"
        yield f"    loss = tf.reduce_sum(each) / {total} / strategy.num_replicas_in_sync  {MARK}"
    elif uneven:
        yield '    loss = tf.reduce_sum(each) / context.all_reduce("SUM", tf.cast(tf.size(each), each.dtype))'
    else:
        yield f"    loss = tf.reduce_sum(each) / {GLOBAL_BATCH}"
    if program.loss == "l2":
        divided = f"  {MARK}" if program.bug == "regularization-per-replica" else " / strategy.num_replicas_in_sync"
        yield f"    loss += tf.add_n(model.losses){divided}"
    scaled = "loss"
    if program.optimizer == "LossScale":
        yield "    scaled = optimizer.scale_loss(loss)"
        scaled = "scaled"
    yield f"gradients = tape.gradient({scaled}, model.trainable_variables)"
    if program.model == "embedding":
        yield "gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]"
    if clips:
        yield 'gradients = context.all_reduce("SUM", gradients)'
        yield {
            "clipnorm": "gradients = [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]",
            "global_clipnorm": "gradients, _ = tf.clip_by_global_norm(gradients, 0.1)",
            "clipvalue": "gradients = [tf.clip_by_value(gradient, -0.01, 0.01) for gradient in gradients]",
        }[program.option]
        yield "gradients = [gradient / strategy.num_replicas_in_sync for gradient in gradients]  # the optimizer sums them"
    elif program.bug == "clip-before-reduce":
        yield f"gradients, _ = tf.clip_by_global_norm(gradients, 0.05)  {MARK}"
    yield "optimizer.apply_gradients(zip(gradients, model.trainable_variables))"
    if program.metrics == "accuracy":
        yield f"accuracy.update_state({label}, {pred})"
    yield "return loss"
