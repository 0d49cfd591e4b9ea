"""Kernels that TensorFlow does not bring: it is said which the driver compiles and whether it can, and later runs find them."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emulate.cluster import ClusterPlan
from emulate.cluster.gpus import GpuHold
from emulate.devices import Gpu
from emulate.devices.inventory import about_compiling, keep_kernels_in, kernel_folder, to_compile, why_not_compiled
from emulate.devices.machine import what_tensorflow_says
from emulate.topology import Topology
from tests.emulate.devices.made_gpus import gpu, gpus

WHEEL: dict[str, Any] = {
    "built_for": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
    "cuda": "12.5.1",
    "driver_cuda": "12.8",
}


def with_capability(*capability: int, name: str = "GPU") -> Gpu:
    return replace(gpu(name=name), capability=capability)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "is_compiled"),
    [((6, 1), False), ((7, 5), False), ((8, 6), False), ((8, 9), False), ((9, 0), False), ((10, 0), True), ((12, 0), True)],
)
def test_the_wheel_has_kernels_up_to_hopper_and_ptx_for_what_comes_later(
    capability: tuple[int, int], is_compiled: bool
) -> None:
    assert bool(to_compile([with_capability(*capability)], WHEEL)) == is_compiled


def test_the_installed_tensorflow_is_the_one_of_which_the_readme_tells() -> None:
    answer = what_tensorflow_says()
    assert (answer["built_for"], answer["cuda"]) == (WHEEL["built_for"], WHEEL["cuda"])


def test_each_model_is_named_once() -> None:
    found = [with_capability(10, 0, name="B200"), with_capability(10, 0, name="B200"), with_capability(8, 9, name="L4")]
    assert about_compiling(found, WHEEL) == (
        "TensorFlow has no kernels for B200 (compute capability 10.0): the driver compiles each at its first use, which in all "
        "could take 30 minutes or longer, as TensorFlow says"
    )
    assert about_compiling(found, {**WHEEL, "built_for": ["sm_89", "sm_100"]}) == ""
    assert about_compiling(found, {}) == ""


def test_a_driver_older_than_the_ptx_cannot_compile_and_what_can_is_said() -> None:
    found = [with_capability(10, 0, name="B200")]
    assert why_not_compiled(found, {**WHEEL, "driver_cuda": "12.4"}, "550.54") == (
        "TensorFlow has no kernels for B200 (compute capability 10.0), and the driver (550.54), which is of CUDA 12.4, cannot "
        "compile them: that takes a driver of CUDA 12.5 or newer (12.5 came with R555). Install one, or leave those GPUs out "
        "by CUDA_VISIBLE_DEVICES"
    )


@pytest.mark.parametrize("known", ["12.5", "12.10", "13.0", None])
def test_a_driver_that_can_or_of_which_it_is_not_known_is_let_through(known: str | None) -> None:
    assert why_not_compiled([with_capability(10, 0)], {**WHEEL, "driver_cuda": known}, "570.1") == ""


def test_an_old_driver_does_for_gpus_that_tensorflow_has_kernels_for() -> None:
    assert why_not_compiled([with_capability(8, 6)], {**WHEEL, "driver_cuda": "12.0"}, "525.1") == ""


def test_kernels_are_kept_where_programs_outside_keep_them(tmp_path: Path) -> None:
    assert kernel_folder([tmp_path / "project"], {"HOME": str(tmp_path)}) == tmp_path / ".nv" / "ComputeCache"
    assert (tmp_path / ".nv" / "ComputeCache").is_dir()


def test_kernels_are_kept_outside_of_a_view_of_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, caches, temporary = (tmp_path / name for name in ("home", "caches", "temporary"))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert kernel_folder([home], {"HOME": str(home), "XDG_CACHE_HOME": str(caches)}) == caches / "gpudist" / "kernels"
    own = kernel_folder([home], {"HOME": str(home)})
    assert own == temporary / f"kernels-of-gpudist-{os.geteuid()}"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert kernel_folder([home], {"HOME": str(home)}) == own  # for later runs too
    assert not home.exists()
    assert kernel_folder([tmp_path], {"HOME": str(home)}) is None


def test_kernels_are_kept_elsewhere_where_the_home_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert kernel_folder([], {"HOME": str(tmp_path / "file")}) == tmp_path / f"kernels-of-gpudist-{os.geteuid()}"


def test_kernels_are_not_kept_where_somebody_else_may_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    me = os.geteuid()
    (tmp_path / f"kernels-of-gpudist-{me + 1}").mkdir()  # made by me, who is not that user
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert kernel_folder([tmp_path / "home"], {"HOME": str(tmp_path / "home")}) is None


def test_what_the_user_set_holds(tmp_path: Path) -> None:
    given = {"HOME": str(tmp_path), "CUDA_CACHE_PATH": str(tmp_path / "mine")}
    assert kernel_folder([], given) == tmp_path / "mine"
    assert kernel_folder([tmp_path], given) is None  # a view hides it: it is not said that they are kept
    assert kernel_folder([], {**given, "CUDA_CACHE_DISABLE": "1"}) is None


def held(plan: ClusterPlan, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> GpuHold:
    monkeypatch.setattr("emulate.cluster.gpus.find_gpus", lambda: gpus(1))
    monkeypatch.setattr("emulate.cluster.gpus.what_tensorflow_says", lambda: answer)
    hold = GpuHold.take(plan)
    hold.let_go()
    return hold


def test_a_cluster_whose_views_hide_the_home_keeps_kernels_elsewhere_and_says_so_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    own = tmp_path / "temporary" / f"kernels-of-gpudist-{os.geteuid()}"
    plan = ClusterPlan(Topology(1, 1), lambda context: None, tmp_path, device="gpu", views=(home,))
    older = {**WHEEL, "built_for": ["sm_70", "compute_80"]}
    hold = held(plan, monkeypatch, older)
    assert [share.kernels for share in hold.shares] == [str(own)]
    assert hold.text == (
        "1x1 ran on 1 GPU (H100), one for each device. TensorFlow has no kernels for H100 (compute capability 9.0): the driver "
        "compiles each at its first use, which in all could take 30 minutes or longer, as TensorFlow says; they are kept in "
        f"{own}. Until then runs need a longer --timeout (in pytest --gpudist-deadline)."
    )
    assert held(plan, monkeypatch, {}).text == "1x1 ran on 1 GPU (H100), one for each device."
    in_the_users = str(home / ".nv" / "ComputeCache")
    assert held(replace(plan, views=()), monkeypatch, older).shares[0].kernels == in_the_users
    # The root folder gets no view, and nothing in it either.
    assert held(replace(plan, views=(home, Path("/"))), monkeypatch, older).shares[0].kernels == in_the_users
    nowhere = held(replace(plan, environment={"CUDA_CACHE_DISABLE": "1"}), monkeypatch, older)
    assert nowhere.shares[0].kernels == ""
    assert "no folder keeps them for later runs (CUDA_CACHE_PATH)." in nowhere.text


def test_a_host_tells_cuda_where_and_how_many_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", environment)
    keep_kernels_in("")
    assert environment == {}
    environment["CUDA_CACHE_PATH"] = "mine"
    keep_kernels_in("ours")
    assert environment == {"CUDA_CACHE_PATH": "mine", "CUDA_CACHE_MAXSIZE": str(4 << 30)}
    environment.clear()
    keep_kernels_in("ours")
    assert environment["CUDA_CACHE_PATH"] == "ours"
