"""Read names and local values of variables, in one way for Keras 3, tf_keras and plain tf.Variables."""

from __future__ import annotations

from typing import Any

from emulate.probe import upstream


class Names:
    """Give every variable a stable, unique name: its path in the model, numbered if two share one."""

    def __init__(self) -> None:
        self._by_id: dict[int, str] = {}
        self._taken: dict[str, int] = {}
        self._kept: list[Any] = []

    def of(self, variable: Any) -> str:
        """Return the variable's name, the same for each call."""
        inner = upstream.tf_variable(variable)
        key = id(variable if inner is None else inner)  # one that Keras has not made yet has none
        if key not in self._by_id:
            self._by_id[key] = self._new(_path(variable))
            self._kept += [variable, inner]
        return self._by_id[key]

    def _new(self, path: str) -> str:
        count = self._taken.get(path, 0) + 1
        self._taken[path] = count
        return path if count == 1 else f"{path}#{count}"


def _path(variable: Any) -> str:
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    if path == type(variable).__name__:  # an optimizer by its default name: SGD in Keras 2 and 3.12 (for Python 3.10), else sgd
        path = path.lower()
    return str(path).removesuffix(":0")


def read_local(variable: Any) -> Any:
    """Return a tensor with the value for the current replica (the first copy outside of replicas)."""
    return upstream.tf_variable(variable).read_value()


def copy_of(variable: Any, local: int) -> Any:
    """Return the plain tf.Variable that a local replica uses."""
    copies = upstream.local_copies(variable)
    return copies[local % len(copies)]


def is_floating(variable: Any) -> bool:
    """Return whether a variable or tensor holds numbers that training changes. Keras names dtypes by strings."""
    dtype = getattr(variable, "dtype", None)
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", "")
    return name.startswith(("float", "bfloat"))


_of_metrics: list[Any] = []


def mark_of_metric(variable: Any) -> None:
    """Note that a Keras variable belongs to a metric. Within a `tf.function` its tf.Variable is only made later."""
    _of_metrics.append(variable)


def is_of_metric(variable: Any) -> bool:
    """Return whether a tf.Variable belongs to a metric (`mark_of_metric`)."""
    return any(upstream.tf_variable(other) is variable for other in _of_metrics)
