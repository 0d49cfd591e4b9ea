"""What a host does with the GPUs it was given, told to a TensorFlow that is made up: there need be no GPU to know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.cluster import ClusterPlan, Preload
from emulate.devices import GpuShare
from emulate.devices.physical import layout
from emulate.errors import Unavailable
from emulate.topology import Topology
from tests.emulate.cluster.helpers import events_until
from tests.emulate.devices.hosts import Hosts
from tests.emulate.devices.made_gpus import gpus

WHOLE = GpuShare(("GPU-a", "GPU-b"))
SLICED = GpuShare(("GPU-a", "GPU-b"), ((1000, 1000), (1000,)))
SHARES = st.lists(st.lists(st.integers(100, 9000), min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda slices: GpuShare(tuple(map(str, range(len(slices)))), tuple(map(tuple, slices)))
)


@given(SHARES, st.dictionaries(st.integers(0, 15), st.lists(st.integers(1, 9000), min_size=1, max_size=5)))
def test_whatever_the_program_splits_the_parts_of_a_gpu_stay_within_its_slices(
    share: GpuShare, splits: dict[int, list[int]]
) -> None:
    made = layout(share, splits)
    assert all(sum(parts) <= sum(slices) for parts, slices in zip(made, share.slices, strict=True))
    assert sum(map(len, made)) == sum(len(splits.get(device, [0])) for device in range(len(share.owners)))


def test_a_whole_gpu_is_left_to_tensorflow_unless_the_program_splits_it() -> None:
    assert layout(WHOLE, {}) == ((), ())
    assert layout(WHOLE, {1: [500, 700]}) == ((), (500, 700))


def test_a_slice_that_the_program_splits_gives_it_what_it_asks_for_as_far_as_that_goes() -> None:
    assert layout(SLICED, {1: [300, 300]}) == ((1000, 300, 300), (1000,))
    assert layout(SLICED, {1: [800, 800]}) == ((1000, 500, 500), (1000,))


def on_made_up_gpus(number: int, share: GpuShare, use: Any, environment: dict[str, str] | None = None) -> Any:
    """In a host: what TensorFlow is told while the program uses GPUs that are not there."""
    import os

    import tensorflow as tf

    from emulate.devices import DevicePlan, upstream
    from emulate.devices.names import DeviceNames
    from emulate.devices.physical import PhysicalGpus

    class Context:
        _context_handle, _initialized = None, False

        def __init__(self) -> None:
            self.told: list[Any] = []
            self.shown: list[str | None] = []

        def list_physical_devices(self, kind: str) -> list[Any]:
            self.shown.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
            names = [f"/physical_device:{kind}:{i}" for i in range(number if kind == "GPU" else 1)]
            return [tf.config.PhysicalDevice(name, kind) for name in names]

        def __getattr__(self, name: str) -> Any:
            return lambda *args: self.told.append((name, *args))

    context = Context()
    upstream.context = lambda: context
    os.environ.update(environment or {})
    notes: list[Any] = []
    plan = DevicePlan(len(share.owners), gpus=share)
    made = PhysicalGpus(plan, lambda *note: notes.append(note))
    assert context.shown == [",".join(share.visible)]
    result = use(made, DeviceNames(made))
    told = [(name, *(d.name[-5:] if hasattr(d, "name") else _plain(d) for d in arguments)) for name, *arguments in context.told]
    return told, result, notes


def _plain(argument: Any) -> Any:
    if not isinstance(argument, list):
        return argument
    return [getattr(one, "memory_limit", None) or one.name[-5:] for one in argument]


def see(made: Any, names: Any) -> Any:
    return [d.name for d in made.physical], made.num_logical, names.all_for_strategy("/job:worker"), names.real("gpu:1")


def test_whole_gpus_are_as_tensorflow_makes_them(run: Hosts) -> None:
    told, seen, notes = run(on_made_up_gpus, 2, WHOLE, see)
    assert told == notes == []
    assert seen == (
        ["/physical_device:GPU:0", "/physical_device:GPU:1"],
        2,
        ["/job:worker/device:GPU:0", "/job:worker/device:GPU:1"],
        "gpu:1",
    )


def test_slices_have_explicit_memory_and_look_like_gpus(run: Hosts) -> None:
    told, seen, _ = run(on_made_up_gpus, 2, SLICED, see)
    assert told == [
        ("set_logical_device_configuration", "GPU:0", [1000, 1000]),
        ("set_logical_device_configuration", "GPU:1", [1000]),
    ]
    assert seen[1] == len(seen[0]) == len(seen[2]) == 3


def test_a_name_beyond_the_hosts_devices_is_refused_as_on_emulated_ones(run: Hosts) -> None:
    def name_one_too_many(made: Any, names: Any) -> str:
        try:
            return str(names.real("/gpu:3"))
        except ValueError as error:
            return str(error)

    _, text, _ = run(on_made_up_gpus, 2, SLICED, name_one_too_many)
    assert text.startswith(
        "A device that a program names must be there. Received: device='/gpu:3', and this host has GPU:0 to GPU:2"
    )


def test_a_program_that_hides_all_gpus_computes_on_the_cpu(run: Hosts) -> None:
    def hide(made: Any, names: Any) -> Any:
        made.show([])
        return names.all_for_strategy(), made.num_logical

    for share in (WHOLE, SLICED):
        told, seen, notes = run(on_made_up_gpus, 2, share, hide)
        assert told[-1] == ("set_visible_devices", [], "GPU")
        assert seen == (["/device:CPU:0"], 0)
        assert [code for code, _ in notes] == ["gpus-hidden"]


def test_a_program_that_writes_cuda_visible_devices_before_it_imports_tensorflow_means_the_gpus_of_its_host(run: Hosts) -> None:
    def look(made: Any, names: Any) -> Any:
        import os

        return len(made.physical), os.environ["CUDA_VISIBLE_DEVICES"]

    for share in (WHOLE, SLICED):
        for wanted, seen in (("0", 1), ("0,1", 2), ("-1", 0), (",".join(share.visible), len(share.owners))):
            _, result, notes = run(on_made_up_gpus, 2, share, look, {"CUDA_VISIBLE_DEVICES": wanted})
            assert result == (seen, wanted)
            assert [code for code, _ in notes] == ["gpus-hidden"] * (seen < len(share.owners))


def test_gpus_that_a_program_hides_by_the_variable_alone_compute_nothing(run: Hosts) -> None:
    def hide(wanted: str) -> Any:
        def begin(made: Any, names: Any) -> None:
            import os

            from emulate.devices import upstream

            os.environ["CUDA_VISIBLE_DEVICES"] = wanted
            for _ in range(2):
                upstream.context().ensure_initialized()

        return begin

    start = [("ensure_initialized",)] * 2
    for share in (WHOLE, SLICED):
        assert run(on_made_up_gpus, 2, share, hide("-1"))[0][-3:] == [("set_visible_devices", [], "GPU"), *start]
    assert run(on_made_up_gpus, 2, WHOLE, hide("0"))[0] == [("set_visible_devices", ["GPU:0"], "GPU"), *start]
    assert run(on_made_up_gpus, 2, WHOLE, hide("0,1"))[0] == start


def test_a_program_that_shows_one_whole_gpu_has_that_one(run: Hosts) -> None:
    told, shown, _ = run(on_made_up_gpus, 2, WHOLE, lambda made, names: (made.show(made.physical[1:]), made.num_logical)[1])
    assert told == [("set_visible_devices", ["GPU:1"], "GPU")]
    assert shown == 1


def test_cuda_is_told_where_kernels_are_kept_before_it_is_asked_for_gpus(run: Hosts) -> None:
    def look(made: Any, names: Any) -> Any:
        import os

        return os.environ.get("CUDA_CACHE_PATH"), os.environ.get("CUDA_CACHE_MAXSIZE")

    share = replace(WHOLE, kernels="/kept")
    assert run(on_made_up_gpus, 2, share, look)[1] == ("/kept", str(4 << 30))
    assert run(on_made_up_gpus, 2, share, look, {"CUDA_CACHE_PATH": "/mine"})[1][0] == "/mine"


def test_memory_growth_is_told_of_whole_gpus_only(run: Hosts) -> None:
    def grow(made: Any, names: Any) -> Any:
        made.set_growth(made.physical[0], True)
        return made.growth_of(made.physical[0])

    assert run(on_made_up_gpus, 2, WHOLE, grow)[:2] == ([("set_memory_growth", "GPU:0", True)], True)
    told, growth, _ = run(on_made_up_gpus, 2, SLICED, grow)
    assert growth
    assert "set_memory_growth" not in [name for name, *_ in told]


def test_gpus_that_tensorflow_does_not_see_are_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the inventory through the lease and the fork to the host, and back as the error that exits with 5."""
    if not_here := _reason_against():
        pytest.skip(not_here)
    monkeypatch.setattr("emulate.cluster.gpus.find_gpus", lambda: gpus(1))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    plan = ClusterPlan(Topology(2, 2), lambda context: None, tmp_path, device="gpu")
    with Preload() as preload:
        for _ in range(2):  # the GPUs are free again after the first
            with preload.launch(plan) as cluster, pytest.raises(Unavailable) as caught:
                events_until(cluster, lambda _: cluster.is_over)
            assert cluster.device == "gpu slice"
            assert "2x2 ran on 1 GPU (H100) in 4 slices of 18.5 GiB" in cluster.notes[0]
            assert str(caught.value) == (
                "TensorFlow must see the GPUs that a host is given. Received: gpus=GPU-0000, of which TensorFlow sees 0. "
                "Check `gpudist devices`; TensorFlow's CUDA libraries come with tensorflow[and-cuda]."
            )


def test_a_plain_program_sees_the_gpus_that_the_user_shows_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("emulate.cluster.gpus.find_gpus", lambda: gpus(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    plan = ClusterPlan(Topology(1, 1), look_at_the_variable, tmp_path, device="gpu", emulated=False)
    with Preload(imports=False) as preload, preload.launch(plan) as cluster:
        events_until(cluster, lambda _: cluster.is_over)
        assert cluster.outcomes[0].value == "0,1"


def look_at_the_variable(context: Any) -> str | None:
    import os

    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _reason_against() -> str:
    from emulate.devices import find_gpus

    return "this machine has GPUs, and a made-up one may be among them" if find_gpus().gpus else ""


def test_a_variable_that_is_written_before_tensorflow_is_imported_hides_emulated_gpus_too() -> None:
    import subprocess
    import sys

    program = (
        "import os; from emulate.devices import DevicePlan, install; notes = []\n"
        "install(DevicePlan(4), lambda code, text: notes.append(code)); os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\n"
        "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')), notes)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "2 ['gpus-hidden']\n"


def test_where_the_cpu_emulates_real_gpus_are_hidden_and_the_program_finds_its_variable_as_it_was(run: Hosts) -> None:
    def look() -> Any:
        import os

        import tensorflow as tf

        from emulate.devices import upstream

        tf.constant(1)
        return len(upstream.context().list_physical_devices("GPU")), os.environ.get("CUDA_VISIBLE_DEVICES")

    assert run(look, environment={"CUDA_VISIBLE_DEVICES": "0,1"}) == (0, "0,1")
